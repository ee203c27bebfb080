"""Counts of compiled programs: what they launch, the bytes that it moves, and the weights that they copy at every call.

Counts are read from optimised HLO, so they are the compiler's. The bytes are those of every launch's operands and results, an
upper bound of the traffic: caches hold some of them, and a kernel that gathers does not read all of its operand. Arrays in a
TPU's own memory count for nothing; transfers to and from there are counted apart, and their bytes are those of a memory's side.
The difference of two numbers of layers is one layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.aot import MIB, Step, compile_call, decoder, lower_step
from chunkattn.backends import AttentionBackend, AttentionSpec
from chunkattn.engine.decode_program import STEPS
from chunkattn.engine.runner import Runner
from chunkattn.engine.runs import Runs
from chunkattn.engine.step import StepBuilder

LAYERS = 2, 4
"""Numbers of layers whose difference is one layer."""
LABELS = 8
"""Labels of a row whose log-probabilities are read."""
_LARGE = 256 * MIB
"""Arrays of more bytes are the pool, or the embedding that rows are taken from; no launch reads them whole."""
_SILENT = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier", "iota"}
"""Operations that launch nothing."""
_CALLS = {"while", "call", "conditional"}
"""Operations that launch what other computations launch."""
_VIEWS = {"bitcast", "opt-barrier", "copy-done"}
"""Operations whose result lies where their operand lies."""
_MOVES = {"copy", "copy-start", "transpose", "reshape", "concatenate", "pad", "convert", "slice", "broadcast", "reverse"}
"""Operations that write their operand again."""
_READERS = {"dot", "convolution", "custom-call", "gather", "dynamic-slice", "reduce", "reduce-window", "scatter"}
"""Operations that use a weight for what it is. A fusion with one of them is no copy."""
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SHAPE = re.compile(r"\b(pred|[sufbc]\w*?\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_ON_CHIP = "S(1)"
"""Mark of arrays in a TPU's own memory, which cost no traffic."""
_FREE = "ConcatBitcast", "AllocateBuffer"
"""Targets of custom calls that do nothing."""


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: name, text of the result's shape, opcode, names of operands, and the rest of the line."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def called(self) -> list[str]:
        """Return the computations that the instruction calls."""
        branches = _BRANCHES.search(self.rest)
        return _CALLED.findall(self.rest) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])

    @property
    def kind(self) -> str:
        """Return the opcode, with the target of a custom call or the kind of a fusion."""
        pattern = {"custom-call": r'custom_call_target="([^"]+)"', "fusion": r"kind=(\w+)"}.get(self.opcode)
        found = re.search(pattern, self.rest) if pattern else None
        return f"{self.opcode} {found[1]}" if found else self.opcode

    @property
    def is_parallel_loop(self) -> bool:
        """Return whether XLA:CPU runs a called computation as one loop in parallel parts."""
        return self.opcode == "call" and "outer_dimension_partitions" in self.rest

    @property
    def is_transfer(self) -> bool:
        """Return whether a TPU copies an array or a part of one while it computes."""
        return self.opcode in ("copy-start", "slice-start")

    @property
    def is_free(self) -> bool:
        """Return whether the instruction is a custom call that does nothing."""
        return any(f'custom_call_target="{target}"' in self.rest for target in _FREE)

    @property
    def size(self) -> int:
        """Return the bytes of the result, without the workspace of a library call."""
        return size_of(re.sub(r"s8\[\d+\]", "", self.shape) if self.opcode == "custom-call" else self.shape)

    @property
    def moved(self) -> int:
        """Return the bytes that a transfer reads and writes outside a TPU's own memory."""
        ends = [found for found in _SHAPE.finditer(self.shape) if found[2]]
        return min(size_of(f"{end[1]}[{end[2]}]") for end in ends) * sum(_ON_CHIP not in (end[3] or "") for end in ends)


@dataclass(frozen=True)
class Module:
    """The computations of an optimised program, by name."""

    computations: dict[str, list[Instruction]]
    entry: str

    @staticmethod
    def of(text: str) -> Module:
        """Read the text of optimised HLO."""
        computations: dict[str, list[Instruction]] = {}
        entry, inside = "", list[Instruction]()
        for line in text.splitlines():
            if line.startswith((" ", "\t")):
                if found := _INSTRUCTION.match(line):
                    root, name, shape, opcode, rest = found.groups()
                    operands = re.findall(r"%([\w.\-]+)", re.split(r"\), (?=\w+=)", rest)[0])
                    inside.append(Instruction(name, shape, opcode, tuple(operands), rest, root is not None))
            elif found := _COMPUTATION.match(line):
                inside = computations.setdefault(found[2], [])
                entry = found[2] if found[1] else entry
        return Module(computations, entry)

    def launched(self, computation: str | None = None) -> Iterator[tuple[Instruction, int]]:
        """Yield what the program launches, with its bytes, in loops and branches once each."""
        instructions = self.computations[computation or self.entry]
        sizes = {one.name: one.size for one in instructions}
        for one in instructions:
            if one.opcode in _CALLS and not one.is_parallel_loop:
                for called in one.called:
                    yield from self.launched(called)
            elif one.opcode not in _SILENT and not one.opcode.endswith("-done") and not one.is_free:
                yield one, one.moved if one.is_transfer else one.size + sum(sizes.get(name, 0) for name in one.operands)

    def weights(self, of: Iterable[Any]) -> dict[str, int]:
        """Return the elements of the program's weights by the names of their parameters.

        Args:
            of: weights of the model, or their shapes and dtypes. Those of two axes or more count, and are known by their shape.
        """
        shapes = {_shape_of(weight) for weight in of if len(weight.shape) > 1}
        parameters = [one for one in self.computations[self.entry] if one.opcode == "parameter"]
        return {one.name: _elements(one.shape) for one in parameters if one.shape.partition("{")[0] in shapes}

    def copied_weights(self, of: Iterable[Any]) -> list[str]:
        """Return the weights that the program writes again, each with the instruction.

        Args:
            of: see `weights`.
        """
        return sorted(set(self._copies(self.entry, {name: (name, size) for name, size in self.weights(of).items()})))

    def _copies(self, computation: str, known: dict[str, Any]) -> Iterator[str]:
        """Yield the copies that a computation makes of weights.

        Args:
            computation: name of the computation.
            known: name and elements of the weight by the name of each array that is one; for a tuple, those by index.
        """
        known = dict(known)
        for one in self.computations[computation]:
            read = [known.get(name) for name in one.operands]
            weights = [found for found in read if isinstance(found, tuple)]
            if one.opcode == "tuple":
                known[one.name] = dict(enumerate(read))
            elif one.opcode == "get-tuple-element":
                number = int(re.findall(r"index=(\d+)", one.rest)[0])
                known[one.name] = read[0].get(number) if isinstance(read[0], dict) else None
            elif one.opcode in _VIEWS:
                known[one.name] = read[0]
            elif one.opcode in _CALLS:
                for called in one.called:  # the first operand of a conditional chooses the branch
                    yield from self._copies(called, self._inside(called, read[one.opcode == "conditional" :]))
            elif weights and (one.opcode in _MOVES or (one.opcode == "fusion" and not self._reads(one.called))):
                weight, elements = max(weights, key=lambda found: found[1])
                # A prefetch into a TPU's own memory is the read of the product.
                if _elements(one.shape) >= elements and _ON_CHIP not in one.shape:
                    yield f"{weight}: {one.kind} {one.name} {one.shape}"

    def _inside(self, called: str, read: list[Any]) -> dict[str, Any]:
        """Return what a called computation knows of its parameters."""
        inside = [one for one in self.computations[called] if one.opcode == "parameter"]
        return {one.name: read[number] for one in inside if (number := int(one.rest.partition(")")[0])) < len(read)}

    def _reads(self, computations: Sequence[str]) -> bool:
        """Return whether a computation, or one that it calls, uses its operands for more than a copy."""
        ones = [one for name in computations for one in self.computations[name]]
        return any(one.opcode in _READERS or self._reads([c for c in one.called if c not in computations]) for one in ones)


def size_of(shape: str, most: float = _LARGE) -> int:
    """Return the bytes of an array's or a tuple's text, less its arrays of more than `most` bytes or in a TPU's own memory."""
    total = 0
    for kind, sides, layout in _SHAPE.findall(shape):
        found = re.search(r"\d+", kind)
        size = max(1, int(found[0]) // 8 if found else 1) * math.prod(int(side) for side in sides.split(",") if side)
        total += size if size <= most and _ON_CHIP not in layout else 0
    return total


def _shape_of(weight: Any) -> str:
    """Return the text of an array's shape without its layout, such as `bf16[64,32]`."""
    kind = jnp.dtype(weight.dtype).name.replace("float", "f").replace("uint", "u").replace("int", "s")
    return f"{kind}[{','.join(map(str, weight.shape))}]"


def _elements(shape: str) -> int:
    """Return the elements of the largest array in a text."""
    return max((math.prod(int(s) for s in sides.split(",") if s) for _, sides, _ in _SHAPE.findall(shape)), default=0)


def count(text: str) -> dict[str, Any]:
    """Return the launches of optimised HLO in all and by kind, transfers, and the bytes in all and by the largest names."""
    kinds, moved, transfers = Counter[str](), Counter[str](), 0
    for one, size in Module.of(text).launched():
        kinds[one.kind] += not one.is_transfer
        transfers += one.is_transfer
        moved[one.kind if one.opcode == "custom-call" else re.sub(r"[.\d]+$", "", one.name)] += size
    return {
        "launches": sum(kinds.values()),
        "transfers": transfers,
        "bytes": sum(moved.values()),
        "by_kind": dict(kinds.most_common()),
        "largest_mib": {name: round(size / MIB, 2) for name, size in moved.most_common(12)},
    }


@dataclass(frozen=True)
class LaunchCase(Step):
    """A program to count.

    Attributes:
        program: `step` of prompts, `decodes` for a step of one row a sequence, `run` for a run of decodes with head, choice
            and feeding back, or `labels` for a readout of picked rows.
    """

    program: str = "step"


def cases(
    chip: str, block_size: int, width: int, *, runs: bool, quick: bool, model: str = "qwen3-0.6b"
) -> Iterator[LaunchCase]:
    """Yield the programs: decodes of 8 and 64 rows, a prefill of 2,048 rows, and the readout of scores of 64 rows.

    Args:
        chip: name of the chip.
        block_size: tokens of a page.
        width: pages of a page table.
        runs: whether the backend runs several decodes in one program.
        quick: leaves out 64 rows and the whole model.
        model: name in `benchmarks.aot.MODELS`.
    """
    step = LaunchCase(chip, model, 8, width, block_size=block_size, program="decodes")
    for layers in LAYERS if quick else (*LAYERS, None):
        yield replace(step, layers=layers)
        if layers is not None:
            yield replace(step, rows=2048, layers=layers, program="step")
            if runs:
                yield replace(step, layers=layers, program="run")
            if not quick:
                yield replace(step, rows=64, layers=layers)
    yield replace(step, rows=64, layers=LAYERS[0], program="labels")


def compile_launches(
    case: LaunchCase,
    backend: Callable[[AttentionSpec], AttentionBackend],
    memory_bytes: int,
    where: jax.sharding.Sharding,
    read: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Compile a program and return its counts for JSON.

    Args:
        case: program to count.
        backend: makes the attention backend.
        memory_bytes: memory of a device in bytes.
        where: sharding of all arrays on one device.
        read: returns further counts, after the compilation.
    """
    programs = {"labels": partial(_lower_labels, case, where), "run": partial(_lower_run, case, where)}
    _, lower = lower_step(case, backend, memory_bytes, where, programs.get(case.program))

    def counted(compiled: jax.stages.Compiled) -> dict[str, Any]:
        text, weights = compiled.as_text() or "", decoder(case.model, case.layers, "accelerator").weights.values()
        module = Module.of(text)
        found = {"weights": len(module.weights(weights)), "copied_weights": module.copied_weights(weights)}
        return count(text) | found | read()

    return {"kind": "launches", **asdict(case)} | compile_call(lower, counted)


def _lower_run(
    case: LaunchCase, where: jax.sharding.Sharding, runner: Runner, builder: StepBuilder, pages: int
) -> jax.stages.Lowered:
    """Lower a run of decodes."""
    planner = Runs(None, builder, runner, STEPS, case.max_num_seqs)  # type: ignore[arg-type]  # there is nothing to plan
    return runner.lower(planner.empty(case.rows, case.width), pages, where)


def _lower_labels(
    case: LaunchCase, where: jax.sharding.Sharding, runner: Runner, builder: StepBuilder, pages: int
) -> jax.stages.Lowered:
    """Lower the program that reads the labels of picked rows."""
    rows = case.rows

    def there(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    head = [there(weight.shape, runner.dtype) for weight in runner._head]
    labels = there((rows, LABELS), np.int32)
    lowered: jax.stages.Lowered = runner._read_labels.lower(head, there((rows, runner.spec.hidden_size), jnp.float32), labels)
    return lowered


@dataclass(frozen=True)
class LayerCount:
    """Launches and bytes of one layer of a program, and of all that is not a layer."""

    chip: str
    program: str
    rows: int
    launches: float
    rest: float
    mib: float
    largest_mib: dict[str, float] = field(default_factory=dict)


def by_layer(results: Sequence[dict[str, Any]]) -> list[LayerCount]:
    """Return the counts of one layer of every program that was compiled with both of `LAYERS`."""
    of = {(r["chip"], r["program"], r["rows"], r["layers"]): r for r in results if r["kind"] == "launches" and r["compiled"]}
    found, (few, many) = [], LAYERS
    for (chip, program, rows, layers), result in of.items():
        if layers != few or (more := of.get((chip, program, rows, many))) is None:
            continue
        launches, mib = ((more[name] - result[name]) / (many - few) for name in ("launches", "bytes"))
        parts = {n: round((v - result["largest_mib"].get(n, 0)) / (many - few), 2) for n, v in more["largest_mib"].items()}
        parts = {name: size for name, size in parts.items() if size > 0}
        found.append(LayerCount(chip, program, rows, launches, result["launches"] - few * launches, mib / MIB, parts))
    return found


def describe_layers(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for every program's layer."""
    return [
        f"{one.chip} {one.program} of {one.rows} rows: a layer has {one.launches:g} launches and moves {one.mib:.1f} MiB "
        f"(most: {', '.join(f'{name} {size:g}' for name, size in list(one.largest_mib.items())[:4])}); "
        f"{one.rest:g} launches beside the layers"
        for one in by_layer(results)
    ]


def describe(result: dict[str, Any]) -> str:
    """Return a program's counts as text."""
    graphs = f", {result['graphs']} CUDA graphs and {result['outside_graphs']} outside" if "graphs" in result else ""
    copied = f", COPIES {len(result['copied_weights'])} weights" if result["copied_weights"] else ""
    transfers = f" and {result['transfers']} transfers" if result["transfers"] else ""
    return f"{result['launches']} launches{transfers}, {result['bytes'] / MIB:,.0f} MiB{graphs}{copied}"
