"""Spans to arrays: one step's tokens, positions, page tables and the rows to read out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chunkattn.backends.base import AttentionBatch
from chunkattn.config import SamplingParams
from chunkattn.engine.request import Request, Sequence
from chunkattn.engine.scheduler import Span


def buckets(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Array sizes from `smallest` by `factor` up to exactly `largest`.

    >>> buckets(8, 100, 4)
    (8, 32, 100)
    """
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return (*sizes, largest)


def bucket_for(size: int, sizes: Seq[int]) -> int:
    """The smallest bucket that holds `size`."""
    return next(s for s in sizes if s >= size)


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
        attention: the backend's description of the same rows.
        samples: rows to sample at.
        scores: rows of scoring requests; `place` is the index among the request's rows.
        prompt_logprobs: rows before a prompt token asked about; `place` is that token's index.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    attention: AttentionBatch
    samples: list[SampleRow]
    scores: list[LogprobRow]
    prompt_logprobs: list[LogprobRow]


class BatchBuilder:
    """Builds steps whose array sizes come from two small lists of buckets.

    Attributes:
        token_buckets: sizes `T` of the flat token arrays.
        width_buckets: sizes `W` of the page tables.
    """

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int, num_pages: int, block_size: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.token_buckets = buckets(8, max(max_num_batched_tokens, 8), 2)
        self.width_buckets = buckets(32, max(1 << (num_pages - 1).bit_length(), 32), 8)

    def build(self, spans: list[Span]) -> StepBatch:
        """Arrays and readouts of one step."""
        sizes = [s.end - s.start for s in spans]
        total = sum(sizes)
        rows = bucket_for(total, self.token_buckets)
        width = bucket_for(max(len(s.sequence.pages) for s in spans), self.width_buckets)
        token_ids, positions, row_seq, row_slot, row_start = np.zeros((5, rows), np.int32)
        block_tables = np.zeros((self.max_num_seqs, width), np.int32)
        page_len = np.full((self.max_num_seqs, width), self.block_size, np.int32)
        prefix_end = np.zeros(self.max_num_seqs, np.int32)
        samples: list[SampleRow] = []
        scores: list[LogprobRow] = []
        prompt_logprobs: list[LogprobRow] = []
        first = 0
        for index, (sequence, start, end) in enumerate(spans):
            request = sequence.request
            here = slice(first, first + end - start)
            token_ids[here] = sequence.tokens(start, end)
            positions[here], row_slot[here], row_start[here] = sequence.rows(start, end)
            row_seq[here] = index
            block_tables[index, : len(sequence.pages)] = sequence.pages
            page_len[index, : len(request.plan.page_len)] = request.plan.page_len
            prefix_end[index] = request.plan.prefix_end
            if request.sampling and end == sequence.num_tokens:
                forks = request.samples if not sequence.output_ids and len(request.sequences) == 1 else 1
                samples += [SampleRow(first + end - start - 1, sequence, sequence.sample + f) for f in range(forks)]
            for wanted, found in ((_score_rows(request), scores), (_prompt_rows(request, sequence), prompt_logprobs)):
                low, high = np.searchsorted(wanted[0], (start, end))
                found += [
                    LogprobRow(first + int(r) - start, request, int(i))
                    for r, i in zip(wanted[0][low:high], wanted[1][low:high], strict=True)
                ]
            first += end - start
        attention = AttentionBatch(total, row_seq, row_slot, row_start, prefix_end, block_tables, page_len, self.block_size)
        return StepBatch(token_ids, positions, attention, samples, scores, prompt_logprobs)


_NONE = np.zeros((2, 0), np.int64)


def _score_rows(request: Request) -> np.ndarray:
    """`[2, R]`: token indices to read labels at (ascending), and their places in the request."""
    if request.score is None:
        return _NONE
    return np.stack([request.score.rows, np.arange(len(request.score.rows))])


def _prompt_rows(request: Request, sequence: Sequence) -> np.ndarray:
    """`[2, R]`: token indices with a next token in the same part, and that next token's index."""
    params = request.sampling
    if params is None or params.prompt_logprobs is None or sequence.sample or sequence.output_ids:
        return _NONE
    rows = request.layout.known_rows
    return np.stack([rows, rows + 1])
