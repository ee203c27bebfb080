"""Times of the engine's programs of decodes in this process: a step, and a run. `benchmarks.card` describes them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

MARK = "MARK "
"""Begin of the lines on standard error that part XLA's log."""
WARM_UPS = 4
"""Calls before the timed ones: they compile the program and record the graph."""
CONTEXT = 150
"""Tokens of a sequence."""
MOST_ROWS = 64
"""Maximum number of sequences."""


class Program(NamedTuple):
    """A program of the engine.

    Attributes:
        name: `step` or `run`.
        decodes: decodes of a call.
        call: calls the program with NumPy arrays, as the engine does, and returns its results.
        arrays: its arrays.
    """

    name: str
    decodes: int
    call: Callable[[], Any]
    arrays: Any


def programs(core: Any, rows: int) -> Iterator[Program]:
    """Yield a step of decodes, and a run of decodes if the backend has runs.

    Args:
        core: engine with room for 64 sequences.
        rows: number of sequences.
    """
    import numpy as np

    from chunkattn.engine.decode_program import STEPS
    from chunkattn.engine.step import StepArrays
    from chunkattn.engine.step_sizes import bucket_for

    runner, builder = core.runner, core.builder
    pages = -(-(CONTEXT + STEPS) // builder.block_size)

    def described(widths: tuple[int, ...]) -> tuple[int, Any, Any, Any]:
        width = bucket_for(pages, widths)
        token_ids, positions, attention = builder._arrays(rows, width, rows)
        attention.row_seq[:], attention.row_slot[:], positions[:] = np.arange(rows), CONTEXT - 1, CONTEXT - 1
        attention.block_tables[:, :pages] = np.arange(rows * pages).reshape(rows, pages)
        return width, token_ids, positions, attention

    _, token_ids, positions, attention = described(builder.width_buckets)
    step = StepArrays(token_ids, positions, builder.backends[None].build_metadata(attention), builder._slots(rows))
    yield Program("step", 1, lambda: runner.forward(step), list(step)[:-1])
    if runner.decodes:
        width, token_ids, positions, attention = described(builder.run_widths)
        run = core.runs.empty(rows, width)._replace(
            token_ids=token_ids,
            positions=positions,
            metadata=builder.backends[None].build_decodes(attention),
            left=np.full(rows, 2 * STEPS, np.int32),
            limit=np.int32(STEPS),
        )
        yield Program("run", STEPS, lambda: runner.decode(run, continues=False), run)


def measure(geometry: str, rows: int, calls: int, *, traces: bool) -> Iterator[dict[str, Any]]:
    """Yield the times of each program in this process, and mark the parts of XLA's log.

    Args:
        geometry: model shape.
        rows: number of sequences.
        calls: timed decodes of each kind.
        traces: whether to measure the kernels' time.
    """
    import jax

    from chunkattn.engine.decode_program import STEPS
    from chunkattn.tools.bench.geometry import default_block_size, make_core

    block_size = default_block_size(geometry)
    core: Any = make_core(geometry, MOST_ROWS * -(-(CONTEXT + STEPS) // block_size), max_num_seqs=MOST_ROWS)
    runner = core.runner
    for program in programs(core, rows):
        result: dict[str, Any] = {"program": program.name, "rows": rows, "arrays": len(jax.tree.leaves(program.arrays))}
        count, send = max(calls // program.decodes, 2), runner._sent
        sent, form = send(program.arrays, None)
        there = jax.device_put(sent)
        for name in ("new arrays", "arrays on the device"):
            runner._sent = send if name == "new arrays" else lambda *_, kept=(there, form): kept
            for _ in range(WARM_UPS):
                results = jax.block_until_ready(program.call())
            if program.name == "run" and int(results.table[-1, 0]) != program.decodes:
                raise RuntimeError(f"a run of {program.decodes} decodes ended after {results.table[-1, 0]}")
            print(f"{MARK}{count} {name}, {program.name} of {rows}", file=sys.stderr, flush=True)
            result[name] = {key: round(us / program.decodes, 1) for key, us in times(program.call, count).items()}
        print(f"{MARK}0 end", file=sys.stderr, flush=True)
        runner._sent = send
        if traces:
            busy = busy_us(program.call, 8)
            result["kernels_us"] = None if busy is None else round(busy / program.decodes, 1)
        yield result


def times(call: Callable[[], Any], count: int) -> dict[str, float]:
    """Return the microseconds of a call: `call_us`, `each_us` and `row_us`; see the module."""
    import jax

    until_return, each = [], []
    for _ in range(count):
        began = time.perf_counter()
        outputs = call()
        until_return.append(time.perf_counter() - began)
        jax.block_until_ready(outputs)
        each.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(count):
        outputs = call()
    jax.block_until_ready(outputs)
    in_a_row = (time.perf_counter() - began) / count
    found = {"call_us": statistics.median(until_return), "each_us": statistics.median(each), "row_us": in_a_row}
    return {name: 1e6 * seconds for name, seconds in found.items()}


def busy_us(call: Callable[[], Any], count: int) -> float | None:
    """Return the microseconds of a call in which the device is busy; None if the profiler sees no device."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(count):
                jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        spans = device_spans(jax.profiler.ProfileData.from_file(str(file)).planes)
        return union(spans) / 1000 / count if spans else None


def device_spans(planes: Iterable[Any]) -> list[tuple[float, float]]:
    """Return begin and end in nanoseconds of everything that a profile saw on the first device."""
    found: dict[str, list[tuple[float, float]]] = {}
    for plane in planes:
        if plane.name.startswith("/device:"):
            lines = [line for line in plane.lines if line.name.startswith(("Stream", "XLA Ops"))]
            spans = [(event.start_ns, event.start_ns + event.duration_ns) for line in lines for event in line.events]
            if spans:
                found[plane.name] = spans
    return found[min(found)] if found else []


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
