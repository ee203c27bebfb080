"""Benchmark `chunkattn bench score`: one query and many items by every algorithm, in one process on one engine.

The algorithms take turns in rounds, each time with a new query and new items. `prefill_extend` also runs with the query in
the cache. `serial` is timed on some of the items, and its time is scaled to all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from chunkattn.calls.algorithm_choice import refusals
from chunkattn.calls.algorithms import ALGORITHMS
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import CheckShape, Question, answer, drive
from chunkattn.calls.score import ScoreCall
from chunkattn.engine.messages import GenerateRequest, Message, ScoreRequest
from chunkattn.engine.runner import Runner
from chunkattn.errors import RequestError
from chunkattn.models.loader import ModelFiles
from chunkattn.outputs import ScoreOutput
from chunkattn.tools.bench.geometry import load_core, make_core, spec_of
from chunkattn.tools.bench.measure import Progress, peak_bytes, reset_peak, resident_bytes, round_name
from chunkattn.tools.bench.peak_rates import matmul_rate
from chunkattn.tools.bench.sizes import BLOCK, ScoreWorkload, Setup, pool_tokens

LABELS = 9454, 2753
EXTEND = "prefill_extend"
IN_ORDER = ("serial", *(name for name in ALGORITHMS if name != "serial"))
"""All algorithms, the baseline `serial` first."""


@dataclass(frozen=True)
class ScoreCase:
    """Row of the table, with medians over the rounds.

    Attributes:
        query: tokens of the query.
        items: number of items.
        item_len: tokens per item.
        algorithm: name of the algorithm.
        cached: whether the query was in the cache.
        measured_items: number of timed items; figures that depend on the number are scaled to all items.
        seconds: time of all items in seconds.
        items_per_s: items per second.
        speedup: speed over `serial` on the same workload; None without `serial`.
        peak_share: achieved share of `matmul_flops`, counting needed operations only: the matrices for every row laid out,
            attention for every visible pair, the head for every row that is read.
        matmul_flops: rate of a large matrix product in FLOP/s, measured in the same process.
        rows: number of rows laid out and not cached.
        padding: rows computed to fill buckets.
        compiles: programs compiled in the timed rounds.
        predicted_s: time in seconds that the cost model predicted before the run; None if it predicts none.
        auto: whether `auto` picks this algorithm after all rounds, given this row's state of the cache.
        peak_mib: peak resident host memory of the process in MiB, without the memory of an accelerator.
        growth_mib: growth of the resident host memory in MiB; None if the system does not report it.
    """

    query: int
    items: int
    item_len: int
    algorithm: str
    cached: bool
    measured_items: int
    seconds: float
    items_per_s: float
    speedup: float | None
    peak_share: float
    matmul_flops: float
    rows: int
    padding: int
    compiles: int
    predicted_s: float | None
    auto: bool
    peak_mib: float
    growth_mib: float | None

    @property
    def name(self) -> str:
        """Return the algorithm's name, with the state of the cache if the query is cached."""
        return f"{self.algorithm}, cached" if self.cached else self.algorithm


class ScoreRun(NamedTuple):
    """Measurement of one scoring request: times in seconds, memory in bytes."""

    seconds: float
    output: ScoreOutput
    flops: float
    padding: int
    compiles: int
    peak: int
    growth: int | None


class ScoreBench:
    """Engine with the scoring calls of `LLM`, for token ids.

    Args:
        geometry: name of the model's geometry.
        kv_tokens: size of the KV pool in tokens.
        dtype: dtype of weights and K/V.
        block_size: slots per page.
        gguf: GGUF file to load; None for random weights of the geometry.
        **options: other options of the engine.
    """

    def __init__(
        self,
        geometry: str,
        kv_tokens: int,
        *,
        dtype: str = "bfloat16",
        block_size: int = BLOCK,
        gguf: Path | None = None,
        **options: Any,
    ) -> None:
        pages, options = -(-kv_tokens // block_size), {"dtype": dtype, "block_size": block_size, **options}
        if gguf is None:
            self.core = make_core(geometry, pages, **options)
            files = ModelFiles(Path(), spec_of(geometry), jnp.dtype(dtype), tokenizer=None, eos_token_ids=())
        else:
            self.core, files = load_core(gguf, pages, **options)
        self.frontend = Frontend(self.core.config, files)
        self.frontend.connect(self.core.limits)
        self.vocab_size = self.core.limits.vocab_size
        self.labels = tuple(label % self.vocab_size for label in LABELS)
        self._rng = np.random.default_rng(0)

    def ids(self, size: int) -> list[int]:
        """Return `size` random token ids."""
        return self._rng.integers(0, self.vocab_size, size).tolist()

    def items(self, workload: ScoreWorkload) -> list[list[int]]:
        """Return the random items of a workload."""
        return [self.ids(workload.item_len) for _ in range(workload.items)]

    def call(self, query: list[int], items: list[list[int]], algorithm: str = "auto") -> ScoreCall:
        """Return the call of one query, with its algorithm chosen.

        Args:
            query: token ids of the query.
            items: token ids of each item.
            algorithm: name of the algorithm, or `"auto"`.
        """
        labels = [self.labels] * len(items)
        call = ScoreCall(self.frontend, query, items, labels, algorithm=algorithm)
        call.plan({})
        return call

    def refused(self, query: list[int], items: list[list[int]]) -> dict[str, str]:
        """Return the reason for each algorithm that cannot serve a call.

        Args:
            query: token ids of the query.
            items: token ids of each item.
        """
        call, backends = self.call(query, items), self.core.limits.backends
        return refusals(call, caching=True, backends=backends)

    def run(self, query: list[int], items: list[list[int]], algorithm: str) -> ScoreRun:
        """Run one scoring request, from its token ids to the scores.

        Args:
            query: token ids of the query.
            items: token ids of each item.
            algorithm: name of the algorithm, or `"auto"`.

        Raises:
            EngineError: a step failed.
        """
        metrics, compiles = self.core.metrics, self.core.runner.compiles
        padding, compiled = metrics.value("padding_rows_total"), compiles.total()
        reset_peak()
        before = resident_bytes()
        self.frontend.scores.results.clear()  # the same items again are work again
        began = time.perf_counter()
        call, requests = self.call(query, items, algorithm), list[Message]()

        def ask(question: Question) -> list[Any]:
            if not isinstance(question, CheckShape):
                requests.extend(question.requests)
            return answer(self.core, question)

        drive(call.flow(), ask)
        output = call.result()
        seconds, peak = time.perf_counter() - began, peak_bytes()
        return ScoreRun(
            seconds,
            output,
            needed_flops(self.core.runner, requests, call.cached_query),
            int(metrics.value("padding_rows_total") - padding),
            compiles.total() - compiled,
            peak,
            None if before is None else max(peak - before, 0),
        )


def needed_flops(runner: Runner, requests: Sequence[Message], cached: int) -> float:
    """Return the floating-point operations that requests need, without padding or repeated work.

    Args:
        runner: runner of the model.
        requests: requests of one scoring job, or one prompt, of which the first token is counted.
        cached: tokens at the start of the prompt that were in the cache.
    """
    rows = pairs = read = 0
    for request in requests:
        layout = request.layout
        if isinstance(request, ScoreRequest):
            first = layout.prefix_len if request.share_prefix else 0
            read += len(request.rows)
        else:
            first = cached
            read += isinstance(request, GenerateRequest)
        index = np.arange(first, len(layout))
        rows += len(index)
        pairs += int((index + 1 - np.maximum(layout.row_start[first:] - layout.prefix_len, 0)).sum())
    head = 2 * runner.spec.hidden_size * runner.spec.vocab_size
    return rows * runner.row_flops + pairs * runner.pair_flops + read * head


def run(
    setup: Setup,
    workloads: Sequence[ScoreWorkload],
    algorithms: Sequence[str],
    *,
    serial_items: int = 4,
    kv_tokens: int | None = None,
    progress: Progress = nullcontext,
) -> Iterator[list[ScoreCase]]:
    """Yield the cases of each workload, measured on random weights.

    Args:
        setup: model and rounds.
        workloads: workloads to measure, in order.
        algorithms: algorithms to measure; a workload skips algorithms that cannot serve it.
        serial_items: number of items that `serial` is timed on.
        kv_tokens: size of the KV pool in tokens; None for `pool_tokens` of the longest query.
        progress: called with the name of each round; returns the context manager in which the round runs.

    Raises:
        EngineError: a step failed.
        RequestError: no algorithm can serve a workload.
    """
    tokens = kv_tokens or pool_tokens(max(w.query for w in workloads))
    bench = ScoreBench(setup.geometry, tokens, dtype=setup.dtype, block_size=setup.page)
    matmul = 0.0
    for workload in workloads:
        query, items = bench.ids(workload.query), bench.items(workload)
        refused = bench.refused(query, items)
        served = [name for name in algorithms if name not in refused]
        if not served:
            raise RequestError(next(iter(refused.values())))
        runs: dict[Key, list[ScoreRun]] = {}
        for number in range(1 + setup.repeats):
            if number:
                matmul = max(matmul, matmul_rate(setup.dtype))
            for key, measured in _round(bench, workload, served, serial_items, progress, round_name(number, setup.repeats)):
                if number:  # the first round compiles
                    runs.setdefault(key, []).append(measured)
        # Ask `auto` now that the cost model has measured the engine.
        picks = {False: bench.call(query, items).choice[0]}
        if EXTEND in served:
            known = bench.ids(workload.query)
            bench.run(known, items[:1], EXTEND)
            picks[True] = bench.call(known, items).choice[0]
        yield _cases(workload, runs, picks, matmul)


Key = tuple[str, bool]
"""Name of an algorithm, and whether the query is in the cache."""


def _round(
    bench: ScoreBench, workload: ScoreWorkload, algorithms: Sequence[str], serial_items: int, progress: Progress, number: str
) -> list[tuple[Key, ScoreRun]]:
    """Run every algorithm once; `prefill_extend` again with a cached query."""
    measured = []
    for name in algorithms:
        query, items = bench.ids(workload.query), bench.items(workload)
        with progress(f"{workload.name}, {name}, {number}"):
            measured.append(((name, False), bench.run(query, items[:serial_items] if name == "serial" else items, name)))
        if name == EXTEND:
            with progress(f"{workload.name}, {name} cached, {number}"):
                measured.append(((name, True), bench.run(query, bench.items(workload), name)))
    return measured


def _cases(workload: ScoreWorkload, runs: dict[Key, list[ScoreRun]], picks: dict[bool, str], matmul: float) -> list[ScoreCase]:
    cases: list[ScoreCase] = []
    serial = None
    for (name, cached), rounds in runs.items():
        first, measured = rounds[0], len(rounds[0].output.scores)
        scale = workload.items / measured
        seconds = statistics.median(r.seconds for r in rounds)
        if name == "serial":
            serial = seconds * scale
        predicted = [r.output.predicted_seconds[name] for r in rounds if name in r.output.predicted_seconds]
        growth = [r.growth for r in rounds if r.growth is not None]
        cases.append(
            ScoreCase(
                **asdict(workload),
                algorithm=name,
                cached=cached,
                measured_items=measured,
                seconds=seconds * scale,
                items_per_s=measured / seconds,
                speedup=None if serial is None else serial / (seconds * scale),
                peak_share=first.flops / seconds / matmul,
                matmul_flops=matmul,
                rows=round(first.output.usage.computed_tokens * scale),
                padding=round(first.padding * scale),
                compiles=max(r.compiles for r in rounds),
                predicted_s=statistics.median(predicted) * scale if predicted else None,
                auto=picks.get(cached) == name,
                peak_mib=max(r.peak for r in rounds) / 2**20,
                growth_mib=max(growth) / 2**20 if growth else None,
            )
        )
    return cases
