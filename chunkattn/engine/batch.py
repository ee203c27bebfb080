"""Spans to arrays: one step's tokens, positions, page tables and the rows to read out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chunkattn.backends.base import AttentionBackend, AttentionBatch, Metadata
from chunkattn.config import SamplingParams
from chunkattn.engine.buckets import bucket_for, buckets
from chunkattn.engine.rates import tile_area
from chunkattn.engine.request import Request, Sequence
from chunkattn.engine.scheduler import Span


class SampleRow(NamedTuple):
    """Sample the next token of `sequence` at a row of the step. `sample` tells the request's samples apart."""

    row: int
    sequence: Sequence
    sample: int

    @property
    def params(self) -> SamplingParams:
        """The request's; only generation requests are sampled."""
        params = self.sequence.request.sampling
        assert params is not None
        return params


class LogprobRow(NamedTuple):
    """Read log-probabilities at a row: for a scoring row or prompt token (`place`) of a request."""

    row: int
    request: Request
    place: int


@dataclass(frozen=True)
class StepBatch:
    """One step.

    Attributes:
        token_ids, positions: int32 `[T]`, padded to a bucket.
        num_rows: rows in use.
        metadata: the backend's description of the same rows.
        samples: rows to sample at.
        scores: rows of scoring requests; `place` is the index among the request's rows.
        prompt_logprobs: rows before a prompt token asked about; `place` is that token's index.
        area: rows times slots of the tiles its attention visits.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    num_rows: int
    metadata: Metadata
    samples: list[SampleRow]
    scores: list[LogprobRow]
    prompt_logprobs: list[LogprobRow]
    area: int


class BatchBuilder:
    """Builds steps whose array sizes come from two small lists of buckets.

    Attributes:
        token_buckets: sizes `T` of the flat token arrays.
        width_buckets: sizes `W` of the page tables.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        token_buckets: tuple[int, ...],
        max_spans: int,
        max_table_pages: int,
        block_size: int,
    ) -> None:
        self.backend = backend
        self.max_spans = max_spans
        self.block_size = block_size
        self.token_buckets = token_buckets
        self.width_buckets = buckets(32, max_table_pages, 8)

    @property
    def variants(self) -> list[tuple[int, int]]:
        """Every `(T, W)` a step can have, largest first."""
        return [(rows, width) for width in self.width_buckets for rows in reversed(self.token_buckets)]

    def empty(self, rows: int, width: int) -> StepBatch:
        """A step of nothing but padding, which writes no page."""
        token_ids, positions, attention = self._arrays(rows, width, 0)
        return StepBatch(token_ids, positions, 0, self.backend.build_metadata(attention), [], [], [], 0)

    def _arrays(self, rows: int, width: int, used: int) -> tuple[np.ndarray, np.ndarray, AttentionBatch]:
        """Token ids, positions and attention of a step, zero but for the page lengths."""
        token_ids, positions, row_seq, row_slot, row_start = np.zeros((5, rows), np.int32)
        prefix_end, block_tables = np.zeros(self.max_spans, np.int32), np.zeros((self.max_spans, width), np.int32)
        page_len = np.full((self.max_spans, width), self.block_size, np.int32)
        attention = AttentionBatch(used, row_seq, row_slot, row_start, prefix_end, block_tables, page_len, self.block_size)
        return token_ids, positions, attention

    def build(self, spans: list[Span]) -> StepBatch:
        """Arrays and readouts of one step; every span is a sequence of its own to the backend."""
        total = sum(s.end - s.start for s in spans)
        width = bucket_for(max(s.sequence.num_pages for s in spans), self.width_buckets)
        token_ids, positions, attention = self._arrays(bucket_for(total, self.token_buckets), width, total)
        samples: list[SampleRow] = []
        scores: list[LogprobRow] = []
        prompt_logprobs: list[LogprobRow] = []
        first = 0
        for index, (sequence, start, end) in enumerate(spans):
            request, plan, last = sequence.request, sequence.request.plan, first + end - start
            attention.row_seq[first:last] = index
            if start >= len(request.layout) and last == first + 1:  # a decode: no arrays needed
                token_ids[first] = sequence.output_ids[start - len(request.layout)]
                later = start - len(request.layout)
                positions[first], attention.row_slot[first] = request.next_position + later, plan.end + later
            else:
                token_ids[first:last] = sequence.tokens(start, end)
                rows = sequence.rows(start, end)
                positions[first:last], attention.row_slot[first:last], attention.row_start[first:last] = rows
            attention.block_tables[index, : sequence.num_pages] = sequence.pages[: sequence.num_pages]
            attention.prefix_end[index] = plan.prefix_end
            if plan.aligned:
                attention.page_len[index, : len(plan.page_len)] = plan.page_len
            if request.sampling and end == sequence.num_tokens:
                forks = request.samples if request.forks else 1
                samples += [SampleRow(last - 1, sequence, sequence.sample + f) for f in range(forks)]
            for wanted, found in ((_score_rows(request), scores), (_prompt_rows(request, sequence), prompt_logprobs)):
                if wanted is None:
                    continue
                low, high = np.searchsorted(wanted[0], (start, end))
                found += [
                    LogprobRow(first + int(r) - start, request, int(i))
                    for r, i in zip(wanted[0][low:high], wanted[1][low:high], strict=True)
                ]
            first = last
        metadata = self.backend.build_metadata(attention)
        return StepBatch(token_ids, positions, total, metadata, samples, scores, prompt_logprobs, tile_area(attention))


def _score_rows(request: Request) -> np.ndarray | None:
    """`[2, R]`: token indices to read labels at (ascending), and their places in the request."""
    if request.score is None:
        return None
    return np.stack([request.score.rows, np.arange(len(request.score.rows))])


def _prompt_rows(request: Request, sequence: Sequence) -> np.ndarray | None:
    """`[2, R]`: token indices with a next token in the same part, and that next token's index."""
    params = request.sampling
    if params is None or params.prompt_logprobs is None or sequence.sample or sequence.output_ids:
        return None
    rows = request.layout.known_rows
    return np.stack([rows, rows + 1])
