"""Benchmark `chunkattn bench rag`: time to the first token of an answer from documents.

Four modes serve the same prefix, documents and question, in one process on one engine:

    plain cold     one causal prompt, nothing cached
    plain warm     one causal prompt, served before with another document order: prefix caching finds the prefix
    chunks cold    chunk-aware prompt, nothing cached
    chunks warm    chunk-aware prompt, every document served before in another order
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from chunkattn.config import SamplingParams
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.errors import EngineError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout
from chunkattn.tools.bench.geometry import GEOMETRIES, make_core
from chunkattn.tools.bench.measure import Progress, round_name

MODES = ("plain cold", "plain warm", "chunks cold", "chunks warm")


@dataclass(frozen=True)
class Case:
    """Row of the table: the measurements of one mode over prompts of equal size. Token counts are from the last repeat.

    Attributes:
        documents: number of documents.
        document_tokens: tokens per document.
        mode: name in `MODES`.
        prompt_tokens: tokens of the prompt.
        scheduled: prompt tokens that the steps computed.
        padding: rows computed to fill buckets.
        cached: prompt tokens found in the cache.
        ttft_s: median time from the request to its first token in seconds.
        speedup: time of `plain cold` over the time of this mode, for the same documents.
    """

    documents: int
    document_tokens: int
    mode: str
    prompt_tokens: int
    scheduled: int
    padding: int
    cached: int
    ttft_s: float
    speedup: float


@dataclass(frozen=True)
class Workload:
    """Token counts of the prompts, and the number of warm repeats.

    Attributes:
        documents: numbers of documents.
        document_tokens: tokens per document.
        prefix_tokens: tokens of the prefix.
        question_tokens: tokens of the question.
        repeats: requests per `chunks warm` case; other cases have a fifth as many.
    """

    documents: tuple[int, ...] = (4, 12)
    document_tokens: tuple[int, ...] = (500,)
    prefix_tokens: int = 32
    question_tokens: int = 50
    repeats: int = 5


def run(
    geometry: str,
    workload: Workload,
    *,
    dtype: str = "bfloat16",
    max_num_batched_tokens: int = 2048,
    progress: Progress = nullcontext,
) -> Iterator[Case]:
    """Yield every case of a workload, measured on random weights.

    Args:
        geometry: name of the model's geometry.
        workload: token counts and repeats.
        dtype: dtype of weights and K/V.
        max_num_batched_tokens: token budget of a step.
        progress: called with the name of each round; returns the context manager in which the round runs.

    Raises:
        EngineError: a step failed.
    """
    longest = workload.prefix_tokens + max(workload.documents) * (max(workload.document_tokens) + 16) + workload.question_tokens
    pages = 2 * -(-(longest + 64) // 16)  # room for two prompts of a case, so warm requests hit the cache
    core = make_core(geometry, pages, dtype=dtype, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8)
    bench = _Bench(core, GEOMETRIES[geometry].vocab_size)
    for count in workload.documents:
        for size in workload.document_tokens:
            yield from bench.cases(count, size, workload, progress)


class _Bench:
    def __init__(self, core: EngineCore, vocab_size: int) -> None:
        self.core, self.vocab_size = core, vocab_size
        self.rng = np.random.default_rng(0)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab_size, count).tolist()

    def cases(self, count: int, size: int, workload: Workload, progress: Progress) -> Iterator[Case]:
        prefix, documents = self.ids(workload.prefix_tokens), [self.ids(size) for _ in range(count)]
        baseline = 0.0
        for mode in MODES:
            results: list[tuple[float, int, int, int]] = []
            # The first round compiles and is not counted. Slow modes are measured a fifth as often.
            rounds = workload.repeats if mode == "chunks warm" else max(1, workload.repeats // 5)
            for number in range(1 + rounds):
                with progress(f"{count} x {size}, {mode}, {round_name(number, rounds)}"):
                    if mode != "chunks warm" or not results:
                        self.core.reset_prefix_cache()
                        if mode.endswith("warm"):
                            self.request(_layout(mode, prefix, documents, self.ids(workload.question_tokens)))
                    chunked = mode.startswith("chunks")
                    order = self.rng.permutation(count) if chunked else np.roll(np.arange(count), -1)
                    other = [documents[i] for i in order]
                    results.append(self.request(_layout(mode, prefix, other, self.ids(workload.question_tokens))))
            ttft = statistics.median(r[0] for r in results[1:])
            baseline = baseline or ttft
            _, scheduled, padding, cached = results[-1]
            tokens = workload.prefix_tokens + count * size + workload.question_tokens
            yield Case(count, size, mode, tokens, scheduled, padding, cached, ttft, baseline / ttft)

    def request(self, layout: ChunkLayout) -> tuple[float, int, int, int]:
        """Run one request; return its time to first token (s), computed prompt rows, padding rows and cached tokens."""
        metrics = self.core.metrics
        before = metrics.value("tokens_total", kind="prefill"), metrics.value("padding_rows_total")
        began = time.perf_counter()
        self.core.add(GenerateRequest("bench", layout, SamplingParams(temperature=0, max_tokens=1)))
        while self.core.has_work:
            for event in self.core.step():
                if isinstance(event, TokenOutput) and event.cached:
                    taken, cached = time.perf_counter() - began, event.cached.total
                elif not isinstance(event, TokenOutput):
                    raise EngineError(f"the request failed: {event}")
        after = metrics.value("tokens_total", kind="prefill"), metrics.value("padding_rows_total")
        return taken, int(after[0] - before[0]), int(after[1] - before[1]), cached


def _layout(mode: str, prefix: list[int], documents: list[list[int]], question: list[int]) -> ChunkLayout:
    if mode.startswith("chunks"):
        return make_layout(prefix, documents, question)
    return make_layout([], [], [*prefix, *(token for document in documents for token in document), *question])
