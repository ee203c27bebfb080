"""Benchmark `chunkattn bench gen`: the rounds of its cases on one engine, beside vLLM and llama.cpp.

Every case has one round that compiles and is not timed. In the timed rounds, chunkattn and its peers take turns on the same new
token ids. A case of documents is chunk-aware on chunkattn and one causal prompt of the same tokens on its peers.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from chunkattn.errors import EngineError
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.gguf_spec import config_from_gguf
from chunkattn.tools.bench.cases import BenchJob, GenerateBench, Timing
from chunkattn.tools.bench.gen_peers import GenPeer, make_llama, make_vllm
from chunkattn.tools.bench.geometry import GEOMETRIES
from chunkattn.tools.bench.measure import Progress, peak_bytes, reset_peak, round_name
from chunkattn.tools.bench.peak_rates import matmul_rate, read_mib, read_rate
from chunkattn.tools.bench.random_gguf import write_random
from chunkattn.tools.bench.sizes import FileOptions, Setup, Sizes, check_positions

if TYPE_CHECKING:
    pass

_UNQUANTIZED = {"float32": "F32", "bfloat16": "BF16"}
"""Type of the file that llama.cpp gets where chunkattn computes random weights of a geometry, by their dtype."""


@dataclass(frozen=True)
class PeerFigures:
    """A peer's figures in a row of the table.

    Attributes:
        values: the peer's value of every round; empty if some round has none.
        median: median of `values`; None without values.
        ratio: chunkattn's speed over the peer's, the quotient of the medians; None without values.
    """

    values: tuple[float, ...] = ()
    median: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class PeerReport:
    """A peer of the benchmark.

    Attributes:
        name: name in `peer_script.MODULES`.
        version: version of the library; empty if it did not start.
        is_installed: whether an interpreter has the library.
        notes: reasons for missing figures, and limitations of the others.
    """

    name: str
    version: str
    is_installed: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class GenCase:
    """Row of the table.

    Attributes:
        name: name of the case, with its sizes.
        unit: unit of all values: `s`, `tok/s` or `items/s`.
        values: chunkattn's value of every round.
        median: median of `values`.
        peers: figures of each peer that an interpreter has, by its name.
        cached: prompt tokens found in chunkattn's cache.
        compiles: programs that chunkattn compiled in the timed rounds.
        peak_share: share of the machine's rate that the median needs. `tok/s` reads the weights once a step and counts against
            `GenReport.read_bytes_per_s`. Other cases count needed operations against `GenReport.matmul_flops`.
        peak_mib: peak resident host memory of this process in the timed rounds in MiB, without the memory of an accelerator.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    median: float
    peers: dict[str, PeerFigures]
    cached: int
    compiles: int
    peak_share: float
    peak_mib: float


@dataclass(frozen=True)
class GenReport:
    """Result of the benchmark.

    Attributes:
        cases: rows of the table.
        backend: name of the attention backend.
        weight_bytes: bytes of the weights.
        matmul_flops: rate of a large matrix product in FLOP/s, the best of two measurements per case.
        read_bytes_per_s: rate at which a reduction reads `read_mib` MiB in bytes per second, the best of two measurements per
            case.
        read_mib: size in MiB of the array that the reduction reads.
        file: name, size and types of the GGUF file of the weights; empty without a file.
        peers: the peers, in the order of `GEN_PEERS`; empty if none was asked for.
    """

    cases: list[GenCase]
    backend: str
    weight_bytes: int
    matmul_flops: float
    read_bytes_per_s: float
    read_mib: int
    file: str
    peers: tuple[PeerReport, ...]


def run(
    setup: Setup,
    sizes: Sizes,
    files: FileOptions | None = None,
    *,
    engine: Mapping[str, Any] | None = None,
    pythons: Sequence[Path] | None = None,
    progress: Progress = nullcontext,
) -> GenReport:
    """Measure cases, and peers beside them.

    Args:
        setup: model and rounds.
        sizes: cases and their token counts.
        files: GGUF file of the weights; None for random weights of the geometry.
        engine: other options of the engine.
        pythons: interpreters, of which the first with a peer runs it; None measures no peer.
        progress: called with the name of each round; returns the context manager in which the round runs.

    Raises:
        ConfigError: the positions of the file's model end before the longest sequence.
        EngineError: a step failed.
        ModelError: the file cannot be read or is not supported.
    """
    with ExitStack() as stack:
        weights = _Weights(setup, files or FileOptions(), Path(stack.enter_context(TemporaryDirectory())), progress)
        check_positions(weights.name, sizes.longest, weights.config.max_position_embeddings)
        bench, rows = GenerateBench(setup, sizes, weights.gguf, **engine or {}), list[_Row]()
        if "score" in sizes.case:
            with progress("score, first requests"):
                bench.warm_up_score()
        peers = [] if pythons is None else _make_peers(setup, sizes, weights, pythons, progress)
        for peer in peers:
            stack.enter_context(peer)
        matmul = read = 0.0
        for make in bench.makers():
            for peer in peers:
                peer.begin_case()
            _round(bench, make, peers, round_name(0, setup.repeats), progress, {})
            matmul, read = max(matmul, matmul_rate(setup.dtype)), max(read, read_rate())
            reset_peak()
            measured: dict[str, _Row] = {}
            for number in range(setup.repeats):
                _round(bench, make, peers, round_name(number + 1, setup.repeats), progress, measured)
            rows += measured.values()
            matmul, read = max(matmul, matmul_rate(setup.dtype)), max(read, read_rate())
        facts = "" if weights.gguf is None else _facts_of(weights.gguf)
    runner, installed = bench.engine.core.runner, [peer.name for peer in peers if peer.is_installed]
    table = [row.case(runner.weight_bytes, matmul, read, installed) for row in rows]
    told = tuple(PeerReport(peer.name, peer.version, peer.is_installed, tuple(peer.notes)) for peer in peers)
    return GenReport(table, runner.backend.name, runner.weight_bytes, matmul, read, read_mib(), facts, told)


class _Weights:
    """Weights of the benchmark: a GGUF file, or random weights of a geometry.

    Attributes:
        name: name of the model.
        gguf: GGUF file that chunkattn reads; None for random weights.
        config: configuration of the model.
    """

    def __init__(self, setup: Setup, files: FileOptions, folder: Path, progress: Progress) -> None:
        self._setup, self._folder, self._progress = setup, folder, progress
        self.name, self.gguf, self.config = setup.geometry, files.model, GEOMETRIES[setup.geometry]
        if files.gguf is not None:
            self.gguf = self._write(files.gguf)
        elif files.model is not None:
            self.name, self.config = files.model.name, config_from_gguf(open_gguf(files.model))

    @cached_property
    def for_llama(self) -> Path:
        """Return the GGUF file, or write one with other random weights of the same dtype."""
        return self.gguf or self._write(_UNQUANTIZED[self._setup.dtype])

    def _write(self, quant: str) -> Path:
        path = self._folder / f"{self._setup.geometry}-{quant}.gguf"
        with self._progress(f"random weights, {quant}"):
            write_random(self.config, quant, path)
        return path


def _make_peers(
    setup: Setup, sizes: Sizes, weights: _Weights, pythons: Sequence[Path], progress: Progress
) -> tuple[GenPeer, GenPeer]:
    limit = min(sizes.longest + setup.page, weights.config.max_position_embeddings)
    reads_file = weights.gguf is not None
    return (
        make_vllm(pythons, weights.config, setup.dtype, limit, progress, reads_file=reads_file),
        make_llama(pythons, lambda: weights.for_llama, progress),
    )


def _facts_of(path: Path) -> str:
    """Return name, size and types of a GGUF file."""
    tensors = open_gguf(path).tensors.values()
    types = Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1)
    size = sum(tensor.data.nbytes for tensor in tensors)
    return f"{path.name}, {size / 2**20:.0f} MiB, matrices: {', '.join(f'{n} {kind}' for kind, n in types.most_common())}"


def _round(
    bench: GenerateBench,
    make: Callable[[], list[BenchJob]],
    peers: Sequence[GenPeer],
    number: str,
    progress: Progress,
    rows: dict[str, _Row],
) -> None:
    """Measure the jobs of one case once, chunkattn first, and add the values to the rows of their names."""
    compiles = bench.engine.core.runner.compiles
    for job in make():
        row, before = rows.setdefault(job.name, _Row(job)), compiles.total()
        with progress(f"{job.name}, {number}"):
            row.samples.append(job.measure())
        row.compiles += compiles.total() - before
        row.peak = max(row.peak, peak_bytes())
        for peer in peers:
            if (value := peer.measure(job, number)) is not None:
                row.peer_values.setdefault(peer.name, []).append(value)


@dataclass
class _Row:
    """Measurements of one row of the table."""

    job: BenchJob
    samples: list[Timing] = field(default_factory=list)
    peer_values: dict[str, list[float]] = field(default_factory=dict)
    compiles: int = 0
    peak: int = 0

    def case(self, weight_bytes: int, matmul: float, read: float, peers: Sequence[str]) -> GenCase:
        """Return the row, with shares of the machine's rates in FLOP/s and bytes/s."""
        measured = [self.job.value(sample.seconds, sample.decode_rate) for sample in self.samples]
        values = [value for value in measured if value is not None]
        if len(values) < len(measured):
            raise EngineError(f"{self.job.name}: the sequences do not decode together for as many tokens")
        median = statistics.median(values)
        if self.job.unit == "tok/s":
            share = median / self.job.sequences * weight_bytes / read
        else:
            share = self.samples[0].flops / statistics.median(sample.seconds for sample in self.samples) / matmul
        figures = {name: self._beside(median, self.peer_values.get(name, [])) for name in peers}
        cached, peak = max(sample.cached for sample in self.samples), self.peak / 2**20
        return GenCase(self.job.name, self.job.unit, tuple(values), median, figures, cached, self.compiles, share, peak)

    def _beside(self, median: float, values: list[float]) -> PeerFigures:
        if len(values) < len(self.samples):  # a peer that failed in some round has no figure
            return PeerFigures()
        other = statistics.median(values)
        return PeerFigures(tuple(values), other, other / median if self.job.unit == "s" else median / other)
