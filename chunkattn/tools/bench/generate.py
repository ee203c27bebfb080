"""Benchmark `chunkattn bench gen`: the rounds of its cases on one engine, beside vLLM.

Every case has one round that compiles and is not timed. In the timed rounds, chunkattn and vLLM take turns on the same new
token ids. A case of documents is chunk-aware on chunkattn and one causal prompt of the same tokens on vLLM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

from chunkattn.errors import EngineError
from chunkattn.tools.bench.cases import BenchJob, GenerateBench, Timing
from chunkattn.tools.bench.geometry import GEOMETRIES
from chunkattn.tools.bench.measure import Progress, peak_bytes, reset_peak, round_name
from chunkattn.tools.bench.peak_rates import matmul_rate, read_mib, read_rate
from chunkattn.tools.bench.peers import NOT_FOUND, PeerError, PeerProcess, find_python
from chunkattn.tools.bench.sizes import Setup, Sizes

_PAUSE_S = 0.3
"""Seconds between two processes' jobs, because idle threads of OpenMP and XLA spin for a while."""


@dataclass(frozen=True)
class GenCase:
    """Row of the table.

    Attributes:
        name: name of the case, with its sizes.
        unit: unit of all values: `s`, `tok/s` or `items/s`.
        values: chunkattn's value of every round.
        peer_values: vLLM's value of every round; empty without a measurement.
        median: median of `values`.
        peer_median: median of `peer_values`; None without a measurement.
        ratio: chunkattn's speed over vLLM's, the quotient of the medians; None without a measurement.
        cached: prompt tokens found in chunkattn's cache.
        compiles: programs that chunkattn compiled in the timed rounds.
        peak_share: share of the machine's rate that the median needs. `tok/s` reads the weights once a step and counts against
            `GenReport.read_bytes_per_s`. Other cases count needed operations against `GenReport.matmul_flops`.
        peak_mib: peak resident host memory of this process in the timed rounds in MiB, without the memory of an accelerator.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    peer_values: tuple[float, ...]
    median: float
    peer_median: float | None
    ratio: float | None
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
        peer: name and version of the peer; empty if it was not asked for.
        peer_note: reason for missing figures of the peer, or a limitation of them.
    """

    cases: list[GenCase]
    backend: str
    weight_bytes: int
    matmul_flops: float
    read_bytes_per_s: float
    read_mib: int
    peer: str
    peer_note: str


def run(
    setup: Setup,
    sizes: Sizes,
    *,
    pythons: Sequence[Path] | None = None,
    progress: Progress = nullcontext,
) -> GenReport:
    """Measure cases on random weights, and vLLM beside them.

    Args:
        setup: model and rounds.
        sizes: cases and their token counts.
        pythons: interpreters, of which the first with vLLM runs it; None measures no peer.
        progress: called with the name of each round; returns the context manager in which the round runs.

    Raises:
        EngineError: a step failed.
    """
    bench, rows = GenerateBench(setup, sizes), list[_Row]()
    if "score" in sizes.case:
        with progress("score, first requests"):
            bench.warm_up_score()
    matmul = read = 0.0
    with _Peer(setup, sizes.longest, pythons, progress) as peer:
        for make in bench.makers():
            _round(bench, make, peer, round_name(0, setup.repeats), progress, {})
            matmul, read = max(matmul, matmul_rate(setup.dtype)), max(read, read_rate())
            reset_peak()
            measured: dict[str, _Row] = {}
            for number in range(setup.repeats):
                _round(bench, make, peer, round_name(number + 1, setup.repeats), progress, measured)
            rows += measured.values()
            matmul, read = max(matmul, matmul_rate(setup.dtype)), max(read, read_rate())
    runner = bench.engine.core.runner
    table = [row.case(runner.weight_bytes, matmul, read) for row in rows]
    return GenReport(table, runner.backend.name, runner.weight_bytes, matmul, read, read_mib(), peer.name, peer.note)


def _round(
    bench: GenerateBench,
    make: Callable[[], list[BenchJob]],
    peer: _Peer,
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
        if (value := peer.measure(job, number)) is not None:
            row.peer_values.append(value)


@dataclass
class _Row:
    """Measurements of one row of the table."""

    job: BenchJob
    samples: list[Timing] = field(default_factory=list)
    peer_values: list[float] = field(default_factory=list)
    compiles: int = 0
    peak: int = 0

    def case(self, weight_bytes: int, matmul: float, read: float) -> GenCase:
        """Return the row, with shares of the machine's rates in FLOP/s and bytes/s."""
        measured = [self.job.value(sample.seconds, sample.decode_rate) for sample in self.samples]
        values = [value for value in measured if value is not None]
        if len(values) < len(measured):
            raise EngineError(f"{self.job.name}: the sequences do not decode together for as many tokens")
        # A peer that failed in some round has no figure.
        theirs = self.peer_values if len(self.peer_values) == len(values) else []
        median, other = statistics.median(values), statistics.median(theirs) if theirs else None
        if self.job.unit == "tok/s":
            share = median / len(self.job.batches[0]) * weight_bytes / read
        else:
            share = self.samples[0].flops / statistics.median(sample.seconds for sample in self.samples) / matmul
        ratio = None if other is None else other / median if self.job.unit == "s" else median / other
        cached, peak = max(sample.cached for sample in self.samples), self.peak / 2**20
        return GenCase(
            self.job.name, self.job.unit, tuple(values), tuple(theirs), median, other, ratio, cached, self.compiles, share, peak
        )


class _Peer(ExitStack):
    """vLLM, or the reason why there is no vLLM. After a failure it measures nothing.

    Attributes:
        name: see `GenReport.peer`.
        note: see `GenReport.peer_note`.
    """

    def __init__(self, setup: Setup, longest: int, pythons: Sequence[Path] | None, progress: Progress) -> None:
        super().__init__()
        self._process: PeerProcess | None = None
        self._progress = progress
        self.name, self.note = "", ""
        if pythons is None:
            return
        self.name = "vllm"
        if (python := find_python(pythons, "vllm")) is None:
            self.note = NOT_FOUND
            return
        limit = min(longest + setup.page, GEOMETRIES[setup.geometry].max_position_embeddings)
        options = {"dtype": setup.dtype, "max_model_len": limit, "max_num_batched_tokens": max(8192, limit)}
        try:
            with progress("start of vllm"):
                self._process = self.enter_context(PeerProcess(python, "vllm", setup.geometry, **options))
        except PeerError as error:
            self.note = f"failed: {error}"
        else:
            self.name, self.note = f"vllm {self._process.version}", self._process.note

    def measure(self, job: BenchJob, number: str) -> float | None:
        """Return vLLM's value of a job in a round, or None without a running vLLM."""
        if self._process is None:
            return None
        try:
            sleep(_PAUSE_S)
            with self._progress(f"{job.name}, vllm, {number}"):
                answer = self._process.run(job.batches, job.max_tokens, 2 if job.items else None)
            sleep(_PAUSE_S)
        except PeerError as error:
            self.note, self._process = f"failed: {error}", None
            self.close()
            return None
        return job.value(answer["seconds"], answer["decode_rate"])
