"""`chunkattn bench rag`: the first token of an answer from documents, cold and warm, chunk-aware and plain.

Four ways to serve the same prefix, documents and question, in one process on one engine:

    plain cold     one causal prompt, nothing cached
    plain warm     the same documents in another order: plain prefix caching finds the prefix
    chunks cold    chunk-aware, nothing cached
    chunks warm    chunk-aware, every document served before, in another order
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from chunkattn.bench.geometry import GEOMETRIES, make_core
from chunkattn.config import SamplingParams
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.errors import EngineError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout

MODES = ("plain cold", "plain warm", "chunks cold", "chunks warm")


@dataclass(frozen=True)
class Case:
    """One row of the table; the token counts are those of the last repeat.

    Attributes:
        ttft_s: median seconds from the request to its first token.
        scheduled: prompt tokens the steps computed.
        padding: rows computed to fill buckets.
        cached: prompt tokens found in the cache.
        speedup: over `plain cold` of the same documents.
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
    """What is asked: token counts, and how often each warm case is repeated."""

    documents: tuple[int, ...] = (4, 12)
    document_tokens: tuple[int, ...] = (500,)
    prefix_tokens: int = 32
    question_tokens: int = 50
    repeats: int = 5


def run(geometry: str, workload: Workload, *, dtype: str = "bfloat16", max_num_batched_tokens: int = 2048) -> Iterator[Case]:
    """Run every case of a workload on random weights of a known geometry.

    Raises:
        EngineError: a step failed.
    """
    longest = workload.prefix_tokens + max(workload.documents) * (max(workload.document_tokens) + 16) + workload.question_tokens
    pages = 2 * -(-(longest + 64) // 16)  # plain and chunked prompts of one case at once, so that warm means warm
    core = make_core(geometry, pages, dtype=dtype, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8)
    bench = _Bench(core, GEOMETRIES[geometry].vocab_size)
    for count in workload.documents:
        for size in workload.document_tokens:
            yield from bench.cases(count, size, workload)


class _Bench:
    def __init__(self, core: EngineCore, vocab_size: int) -> None:
        self.core, self.vocab_size = core, vocab_size
        self.rng = np.random.default_rng(0)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab_size, count).tolist()

    def cases(self, count: int, size: int, workload: Workload) -> Iterator[Case]:
        prefix, documents = self.ids(workload.prefix_tokens), [self.ids(size) for _ in range(count)]
        baseline = 0.0
        for mode in MODES:
            results: list[tuple[float, int, int, int]] = []
            # The first round, which compiles, is not counted. What takes long is measured a fifth as often.
            for _ in range(1 + (workload.repeats if mode == "chunks warm" else max(1, workload.repeats // 5))):
                if mode != "chunks warm" or not results:
                    self.core.reset_prefix_cache()
                    if mode.endswith("warm"):
                        self.request(_layout(mode, prefix, documents, self.ids(workload.question_tokens)))
                chunked = mode.startswith("chunks")
                other = [documents[i] for i in (self.rng.permutation(count) if chunked else np.roll(np.arange(count), -1))]
                results.append(self.request(_layout(mode, prefix, other, self.ids(workload.question_tokens))))
            ttft = statistics.median(r[0] for r in results[1:])
            baseline = baseline or ttft
            _, scheduled, padding, cached = results[-1]
            tokens = workload.prefix_tokens + count * size + workload.question_tokens
            yield Case(count, size, mode, tokens, scheduled, padding, cached, ttft, baseline / ttft)

    def request(self, layout: ChunkLayout) -> tuple[float, int, int, int]:
        """Time to first token, prompt rows run, padding rows, cached tokens."""
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


def as_records(cases: list[Case]) -> list[dict[str, object]]:
    """Cases as JSON objects."""
    return [asdict(c) for c in cases]
