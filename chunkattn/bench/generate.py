"""Benchmark `chunkattn bench gen`: prefill, documents, decode and scoring on one engine, beside vLLM.

Every case has one round that compiles and is not timed. In the timed rounds, chunkattn and vLLM take turns on the same new
token ids. A case of documents is chunk-aware on chunkattn and one causal prompt of the same tokens on vLLM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple, Self

from chunkattn.bench.geometry import GEOMETRIES
from chunkattn.bench.memory import peak_bytes, reset_peak
from chunkattn.bench.peer_script import DecodeClock
from chunkattn.bench.peers import NOT_FOUND, PeerError, VllmProcess, find_python
from chunkattn.bench.score import BLOCK, IN_ORDER, ScoreBench, Workload, matmul_rate, needed_flops, pool_tokens, read_rate
from chunkattn.config import SamplingParams
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.errors import EngineError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout
from chunkattn.scoring.selector import refusals

CASES = ("prefill", "rag", "decode", "score")
_PAUSE_S = 0.3
"""Seconds between two processes' jobs, because idle threads of OpenMP and XLA spin for a while."""
_SPARE = 8
"""Tokens generated beyond those that are timed, because vLLM may start some sequences a few steps early."""


@dataclass(frozen=True)
class Sizes:
    """Token counts of the cases.

    Attributes:
        prefill: tokens of each plain prompt that is timed.
        documents: number of documents.
        document_tokens: tokens per document.
        prefix_tokens: tokens of the prefix before the documents.
        question_tokens: tokens of the question after the documents.
        sequences: numbers of sequences that decode together.
        prompt_tokens: tokens of the prompt of each sequence that decodes.
        decode_tokens: timed tokens of each sequence that decodes.
        score: query and items of the scoring request.
        block_size: slots per page.
    """

    prefill: tuple[int, ...] = (2000, 6000)
    documents: int = 12
    document_tokens: int = 500
    prefix_tokens: int = 32
    question_tokens: int = 50
    sequences: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 128
    decode_tokens: int = 32
    score: Workload = field(default_factory=lambda: Workload(items=100))
    block_size: int = BLOCK

    @property
    def rag_tokens(self) -> int:
        """Return the tokens of a prompt of documents."""
        return self.prefix_tokens + self.documents * self.document_tokens + self.question_tokens

    def longest(self, cases: Sequence[str]) -> int:
        """Return the tokens of the longest sequence of some cases, generated tokens included.

        Args:
            cases: names in `CASES`.
        """
        lengths = {
            "prefill": max(self.prefill) + 1,
            "rag": self.rag_tokens + 1,
            "decode": self.prompt_tokens + self.decode_tokens + _SPARE,
            "score": self.score.query + self.score.item_len + 1,
        }
        return max(lengths[case] for case in cases)

    def kv_tokens(self, cases: Sequence[str]) -> int:
        """Return the size in tokens of a KV pool that runs some cases without eviction.

        Args:
            cases: names in `CASES`.
        """
        page = self.block_size
        query, items, item_len = self.score.query, self.score.items, self.score.item_len + page
        chunks = self.prefix_tokens + self.documents * (self.document_tokens + page)
        sequence = self.prompt_tokens + self.decode_tokens + _SPARE + page
        tokens = {
            "prefill": max(self.prefill) + 2 * page,
            "rag": chunks + 2 * (self.question_tokens + 2 * page),  # the documents stay, and two questions follow
            "decode": max(self.sequences) * sequence,
            "score": min(pool_tokens(query), 4 * (query + items * item_len)),  # a pack has a quarter of the pool
        }
        return max(tokens[case] for case in cases)


@dataclass(frozen=True)
class Case:
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
            `Report.read_bytes_per_s`. Other cases count needed operations against `Report.matmul_flops`.
        peak_mib: peak resident memory of this process in the timed rounds in MiB.
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
class Report:
    """Result of the benchmark.

    Attributes:
        cases: rows of the table.
        backend: name of the attention backend.
        weight_bytes: bytes of the weights.
        matmul_flops: rate of a large matrix product in FLOP/s, the best of two measurements per case.
        read_bytes_per_s: rate at which a reduction reads 256 MiB in bytes per second, the best of two measurements per case.
        peer: name and version of the peer; empty if it was not asked for.
        peer_note: reason for missing figures of the peer, or a limitation of them.
    """

    cases: list[Case]
    backend: str
    weight_bytes: int
    matmul_flops: float
    read_bytes_per_s: float
    peer: str
    peer_note: str


class Sample(NamedTuple):
    """One measurement of chunkattn.

    Attributes:
        seconds: time of the whole job in seconds.
        decode_rate: tokens per second while all sequences decode; None if they do not.
        flops: floating-point operations that the job needs.
        cached: prompt tokens found in the cache.
    """

    seconds: float
    decode_rate: float | None
    flops: float
    cached: int


@dataclass(frozen=True)
class Job:
    """One measurement to take, with token ids of its own.

    Attributes:
        name: see `Case`.
        unit: see `Case`.
        measure: measures chunkattn.
        batches: token ids that vLLM gets; see `VllmProcess.run`.
        max_tokens: tokens to generate for each prompt.
        items: items of a scoring request, else 0.
    """

    name: str
    unit: str
    measure: Callable[[], Sample]
    batches: list[list[list[int]]]
    max_tokens: int = 1
    items: int = 0

    def value(self, seconds: float, decode_rate: float | None) -> float | None:
        """Return a measurement in the job's unit; None if it needs a decode rate and there is none.

        Args:
            seconds: time of the whole job in seconds.
            decode_rate: tokens per second while all sequences decode.
        """
        if self.unit == "tok/s":
            return decode_rate
        return self.items / seconds if self.items else seconds


class GenerateBench:
    """Engine over random weights, and the jobs of the benchmark.

    Args:
        geometry: name of the model's geometry.
        sizes: token counts of the cases.
        cases: names in `CASES`.
        dtype: dtype of weights and K/V.
    """

    def __init__(self, geometry: str, sizes: Sizes, cases: Sequence[str], *, dtype: str = "bfloat16") -> None:
        self.sizes, self.cases = sizes, cases
        running = max(64, *sizes.sequences)
        pool, block_size = sizes.kv_tokens(cases), sizes.block_size
        self.engine = ScoreBench(geometry, pool, dtype=dtype, block_size=block_size, max_num_seqs=running)
        self._numbers = count()

    def makers(self) -> Iterator[Callable[[], list[Job]]]:
        """Yield a function for each case that makes the jobs of one round."""
        for case in self.cases:
            if case == "prefill":
                yield from (partial(self.prefill, tokens) for tokens in self.sizes.prefill)
            elif case == "rag":
                yield self.rag
            elif case == "decode":
                yield from (partial(self.decode, sequences) for sequences in self.sizes.sequences)
            else:
                yield self.score

    def prefill(self, tokens: int) -> list[Job]:
        """Return the job of one plain prompt.

        Args:
            tokens: tokens of the prompt.
        """
        ids = self.engine.ids(tokens)
        return [Job(f"prefill {tokens}", "s", partial(self.generate, [make_layout([], [], ids)]), [[ids]])]

    def rag(self) -> list[Job]:
        """Return two jobs over the same documents: nothing cached, then all documents cached, in a new order."""
        sizes = self.sizes
        prefix = self.engine.ids(sizes.prefix_tokens)
        documents = [self.engine.ids(sizes.document_tokens) for _ in range(sizes.documents)]
        jobs = []
        for state, ordered in (("cold", documents), ("warm", documents[1:] + documents[:1])):
            question = self.engine.ids(sizes.question_tokens)
            measure = partial(self.generate, [make_layout(prefix, ordered, question)], fresh=state == "cold")
            name = f"rag {state} {sizes.documents} x {sizes.document_tokens} + {sizes.question_tokens}"
            jobs.append(Job(name, "s", measure, [[[*prefix, *(token for ids in ordered for token in ids), *question]]]))
        return jobs

    def decode(self, sequences: int) -> list[Job]:
        """Return the job of sequences that decode together.

        Args:
            sequences: number of sequences.
        """
        prompts = [self.engine.ids(self.sizes.prompt_tokens) for _ in range(sequences)]
        layouts = [make_layout([], [], prompt) for prompt in prompts]
        tokens = 1 + self.sizes.decode_tokens + _SPARE
        return [Job(f"decode {sequences}", "tok/s", partial(self.generate, layouts, tokens), [prompts], tokens)]

    def score(self) -> list[Job]:
        """Return the job of one scoring request.

        `auto` picks the algorithm. vLLM gets the first item before the others, so that the query is in its cache.
        """
        workload = self.sizes.score
        query, items = self.engine.ids(workload.query), self.engine.items(workload)
        prompts = [query + item for item in items]
        name = f"score {workload.query} + {workload.items} x {workload.item_len}"
        batches = [batch for batch in (prompts[:1], prompts[1:]) if batch]
        return [Job(name, "items/s", partial(self._score, query, items), batches, items=len(items))]

    def _score(self, query: list[int], items: list[list[int]], algorithm: str = "auto") -> Sample:
        self.engine.core.reset_prefix_cache()
        found = self.engine.run(query, items, algorithm)
        return Sample(found.seconds, None, found.flops, found.output.usage.cached_tokens)

    def warm_up_score(self) -> None:
        """Run every scoring algorithm that `auto` may take."""
        workload = self.sizes.score
        query, items = self.engine.ids(workload.query), self.engine.items(workload)
        backends = self.engine.core.limits.backends
        refused = refusals(self.engine.job(query, items), sliding_window=None, caching=True, backends=backends)
        for name in IN_ORDER:
            if name not in (*refused, "packed_dense"):
                self._score(query, items[:2] if name == "serial" else items, name)

    def generate(self, layouts: list[ChunkLayout], max_tokens: int = 1, *, fresh: bool = True) -> Sample:
        """Generate for all prompts at once.

        Args:
            layouts: layouts of the prompts.
            max_tokens: tokens to generate for each prompt.
            fresh: whether to empty the cache first, untimed.

        Raises:
            EngineError: a step failed.
        """
        core, clock = self.engine.core, DecodeClock(len(layouts))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        if fresh:
            core.reset_prefix_cache()
        requests = [GenerateRequest(f"gen-{next(self._numbers)}", layout, params) for layout in layouts]
        counts: dict[str, int] = {}
        cached = 0
        began = perf_counter()
        for request in requests:
            core.add(request)
        while core.has_work:
            ended = False
            for event in core.step():
                if not isinstance(event, TokenOutput):
                    raise EngineError(f"the request failed: {event}")
                counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)
                cached += event.cached.total if event.cached else 0
                ended = ended or event.finish_reason is not None
            clock.step(counts, ended=ended)
        seconds = perf_counter() - began
        # Only one prompt may have cached tokens, and its cached tokens come before the question.
        return Sample(seconds, clock.rate, needed_flops(core.runner, requests, cached), cached)


def run(
    geometry: str,
    sizes: Sizes,
    cases: Sequence[str] = CASES,
    *,
    dtype: str = "bfloat16",
    repeats: int = 3,
    pythons: Sequence[Path] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure cases on random weights, and vLLM beside them.

    Args:
        geometry: name of the model's geometry.
        sizes: token counts of the cases.
        cases: names in `CASES`, in order.
        dtype: dtype of weights and K/V.
        repeats: number of timed rounds, after one round that compiles.
        pythons: interpreters, of which the first with vLLM runs it; None measures no peer.
        progress: called with the name of the job under way.

    Raises:
        EngineError: a step failed.
    """
    bench = GenerateBench(geometry, sizes, cases, dtype=dtype)
    if "score" in cases:
        progress("score, warm-up")
        bench.warm_up_score()
    rows: list[_Row] = []
    matmul = read = 0.0

    def measure_rates() -> None:
        nonlocal matmul, read
        matmul, read = max(matmul, matmul_rate(dtype)), max(read, read_rate())

    with _Peer(geometry, sizes, cases, dtype, pythons, progress) as peer:
        for make in bench.makers():
            for job in make():
                progress(f"{job.name}, warm-up")
                job.measure()
                peer.measure(job)
            measure_rates()
            rows += _rounds(bench, make, peer, repeats, progress)
            measure_rates()
    core = bench.engine.core
    return Report(
        [row.case(core.runner.weight_bytes, matmul, read) for row in rows],
        core.runner.backend.name,
        core.runner.weight_bytes,
        matmul,
        read,
        peer.name,
        peer.note,
    )


def _rounds(
    bench: GenerateBench,
    make: Callable[[], list[Job]],
    peer: _Peer,
    repeats: int,
    progress: Callable[[str], None],
) -> list[_Row]:
    """Measure the jobs of one case in timed rounds, chunkattn first."""
    rows: dict[str, _Row] = {}
    compiles = bench.engine.core.runner.compiles
    reset_peak()
    for number in range(repeats):
        for job in make():
            progress(f"{job.name}, round {number + 1} of {repeats}")
            row = rows.setdefault(job.name, _Row(job))
            before = compiles.total()
            row.samples.append(job.measure())
            row.compiles += compiles.total() - before
            row.peak = max(row.peak, peak_bytes())
            if (value := peer.measure(job)) is not None:
                row.peer_values.append(value)
    return list(rows.values())


@dataclass
class _Row:
    """Measurements of one row of the table."""

    job: Job
    samples: list[Sample] = field(default_factory=list)
    peer_values: list[float] = field(default_factory=list)
    compiles: int = 0
    peak: int = 0

    def case(self, weight_bytes: int, matmul: float, read: float) -> Case:
        """Return the row, with shares of the machine's rates in FLOP/s and bytes/s."""
        found = [self.job.value(sample.seconds, sample.decode_rate) for sample in self.samples]
        values = [value for value in found if value is not None]
        if len(values) < len(found):
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
        return Case(
            self.job.name, self.job.unit, tuple(values), tuple(theirs), median, other, ratio, cached, self.compiles, share, peak
        )


class _Peer:
    """vLLM, or the reason why there is no vLLM. After a failure it measures nothing.

    Attributes:
        name: see `Report.peer`.
        note: see `Report.peer_note`.
    """

    def __init__(
        self,
        geometry: str,
        sizes: Sizes,
        cases: Sequence[str],
        dtype: str,
        pythons: Sequence[Path] | None,
        progress: Callable[[str], None],
    ) -> None:
        self._process: VllmProcess | None = None
        self.name, self.note = "", ""
        if pythons is None:
            return
        self.name = "vllm"
        if (python := find_python(pythons, "vllm")) is None:
            self.note = NOT_FOUND
            return
        progress("starting vllm")
        limit = min(sizes.longest(cases) + sizes.block_size, GEOMETRIES[geometry].max_position_embeddings)
        options = {"dtype": dtype, "max_model_len": limit, "max_num_batched_tokens": max(8192, limit)}
        try:
            self._process = VllmProcess(python, geometry, **options)
        except PeerError as error:
            self.note = f"failed: {error}"
        else:
            self.name, self.note = f"vllm {self._process.version}", self._process.note

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def measure(self, job: Job) -> float | None:
        """Return vLLM's value of a job, or None without a running vLLM."""
        if self._process is None:
            return None
        try:
            sleep(_PAUSE_S)
            found = self._process.run(job.batches, job.max_tokens, 2 if job.items else None)
            sleep(_PAUSE_S)
        except PeerError as error:
            self.note = f"failed: {error}"
            self.__exit__()
            return None
        return job.value(found["seconds"], found["decode_rate"])
