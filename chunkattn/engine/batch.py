"""`BatchBuilder`: turns the spans of a step into arrays of tokens, positions, page tables and rows to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chunkattn.backends.base import NO_QUESTION, AttentionBackend, AttentionBatch, Metadata, Weighing
from chunkattn.engine.buckets import bucket_for, buckets
from chunkattn.engine.rates import tile_area
from chunkattn.engine.request import Request
from chunkattn.engine.sampling import ROW_BUCKETS
from chunkattn.engine.sampling_plan import SampleRow, SamplingPlan, plan_sampling
from chunkattn.engine.scheduler import Span


class ReadRow(NamedTuple):
    """Row of a step whose hidden state is read for a request.

    Attributes:
        row: index of the row in the step.
        request: request that receives the values.
        place: for a scoring request, the index among its rows; for prompt log-probabilities, the index of the token whose
            log-probability the row gives.
    """

    row: int
    request: Request
    place: int


@dataclass(frozen=True)
class StepBatch:
    """Input of one step on the device: arrays and plain values.

    Attributes:
        token_ids: int32 `[T]`, padded to a bucket.
        positions: int32 `[T]` position ids, padded to the same bucket.
        num_rows: number of rows in use.
        metadata: attention backend's description of the rows.
        area: rows times slots of the tiles that attention visits.
        backend: attention backend that the step's only request names; None for the engine's.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    num_rows: int
    metadata: Metadata
    area: int = 0
    backend: str | None = None


@dataclass(frozen=True)
class StepReads:
    """Everything that the host reads of a step: arrays and plain numbers.

    Attributes:
        sampling: blocks of rows to sample from.
        score_rows: rows to read labels or classes from.
        labels: token ids of the labels to read from each of `score_rows`; empty for a classifier.
        raw: whether to read logits instead of log-probabilities from each of `score_rows`.
        target_rows: rows to read the log-probability of a prompt token from.
        targets: token id to read from each of `target_rows`.
    """

    sampling: tuple[SamplingPlan, ...]
    score_rows: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    raw: tuple[bool, ...]
    target_rows: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """Batch of a step, with the sequences and requests that receive its results.

    Attributes:
        batch: input of the step on the device.
        spans: tokens that the step computes.
        samples: rows to sample from, in the order of the rows of `StepReads.sampling`.
        scores: rows to read scores from, in the order of `StepReads.score_rows`.
        prompt_logprobs: rows to read prompt log-probabilities from, in the order of `StepReads.target_rows`.
    """

    batch: StepBatch
    spans: list[Span]
    samples: list[SampleRow]
    scores: list[ReadRow]
    prompt_logprobs: list[ReadRow]

    @property
    def is_read(self) -> bool:
        """Return whether the host waits for values of this step."""
        return bool(self.samples or self.scores or self.prompt_logprobs)

    def not_finite(self, finite: np.ndarray) -> dict[Request, tuple[int, int]]:
        """Return the requests with a row that is not finite, each with token index and token id of its first such row.

        Args:
            finite: bool `[T]`, False for rows with a value that is not finite; padding may have either.
        """
        found: dict[Request, tuple[int, int]] = {}
        if finite[: self.batch.num_rows].all():
            return found
        for span, rows in self.rows():
            if not finite[rows].all():
                offset = int(finite[rows].argmin())
                found.setdefault(span.sequence.request, (span.start + offset, int(self.batch.token_ids[rows][offset])))
        return found

    def computed_rows(self, is_alive: Callable[[Request], bool]) -> np.ndarray:
        """Return bool `[T]`, whether a row's token is computed, for a request that has not ended.

        Args:
            is_alive: returns whether a request has not ended.
        """
        computed = np.zeros(len(self.batch.token_ids), bool)
        for (sequence, start, end), rows in self.rows():
            if is_alive(sequence.request):
                known = end if self.batch.backend else sequence.num_computed
                computed[rows] = np.arange(start, end) < known
        return computed

    def rows(self) -> Iterator[tuple[Span, slice]]:
        """Yield every span with its rows."""
        last = 0
        for span in self.spans:
            first, last = last, last + span.end - span.start
            yield span, slice(first, last)

    def reads(self, vocab_size: int, sizes: tuple[int, ...] = ROW_BUCKETS) -> StepReads:
        """Make the arrays of the readouts. Edits of many tokens take long: call this after the step has been dispatched.

        Args:
            vocab_size: number of token ids.
            sizes: sizes to which blocks of sampled rows are padded.
        """
        return StepReads(
            sampling=tuple(plan_sampling(self.samples, vocab_size, sizes)),
            score_rows=tuple(r.row for r in self.scores),
            labels=tuple(r.request.score.label_token_ids for r in self.scores if r.request.score),
            raw=tuple(r.request.score.raw for r in self.scores if r.request.score),
            target_rows=tuple(r.row for r in self.prompt_logprobs),
            targets=tuple(int(r.request.layout.token_ids[r.place]) for r in self.prompt_logprobs),
        )


class BatchBuilder:
    """Builder of steps whose array sizes come from two small lists of buckets.

    Attributes:
        backends: attention backends by the name that a request gives; None names the engine's.
        token_buckets: sizes `T` of the flat token arrays.
        width_buckets: sizes `W` of the page tables.
    """

    def __init__(
        self,
        backends: Mapping[str | None, AttentionBackend],
        *,
        token_buckets: tuple[int, ...],
        max_spans: int,
        max_table_pages: int,
        block_size: int,
        weighs: bool = False,
    ) -> None:
        self.backends = backends
        self.max_spans = max_spans
        self.block_size = block_size
        self.weighs = weighs
        self.token_buckets = token_buckets
        whole = backends[None].any_table_width
        self.width_buckets = (max_table_pages,) if whole else buckets(32, max_table_pages, 8)

    def empty(self, rows: int, width: int) -> StepBatch:
        """Return a step of padding rows only, which writes no page.

        Args:
            rows: one of `token_buckets`.
            width: one of `width_buckets`.
        """
        token_ids, positions, attention = self._arrays(rows, width, 0)
        return StepBatch(token_ids, positions, 0, self.backends[None].build_metadata(attention))

    def _arrays(self, rows: int, width: int, used: int) -> tuple[np.ndarray, np.ndarray, AttentionBatch]:
        """Return the token ids, positions and attention batch of a step, all zero except the page lengths."""
        token_ids, positions, row_seq, row_slot, row_start = np.zeros((5, rows), np.int32)
        prefix_end, block_tables = np.zeros(self.max_spans, np.int32), np.zeros((self.max_spans, width), np.int32)
        page_len = np.full((self.max_spans, width), self.block_size, np.int32)
        weighing = None
        if self.weighs:
            weighing = Weighing(np.full(self.max_spans, NO_QUESTION, np.int32), *np.ones((2, self.max_spans), np.float32))
        attention = AttentionBatch(
            used, row_seq, row_slot, row_start, prefix_end, block_tables, page_len, self.block_size, weighing
        )
        return token_ids, positions, attention

    def build(self, spans: list[Span]) -> StepPlan:
        """Return the step that computes `spans`. The attention backend sees every span as its own sequence.

        Args:
            spans: tokens to compute, at most `max_spans` spans, or the whole prompt of one request that names a backend.
        """
        total, first_request = sum(s.end - s.start for s in spans), spans[0].sequence.request
        backend = self.backends[first_request.backend]
        if first_request.backend is None:
            sizes, width = self.token_buckets, bucket_for(max(s.sequence.num_pages for s in spans), self.width_buckets)
        else:
            sizes, width = buckets(8, max(backend.max_rows, 8), 2), len(first_request.plan.page_len)
        token_ids, positions, attention = self._arrays(bucket_for(total, sizes), width, total)
        attention.row_seq[:total] = np.repeat(np.arange(len(spans)), [s.end - s.start for s in spans])
        samples: list[SampleRow] = []
        scores: list[ReadRow] = []
        prompt_logprobs: list[ReadRow] = []
        first = 0
        for index, span in enumerate(spans):
            sequence, start, end = span
            request, plan, last = sequence.request, sequence.request.plan, first + end - start
            if start >= len(request.layout) and last == first + 1:  # fast path for a decode
                token_ids[first] = sequence.output_ids[start - len(request.layout)]
                later = start - len(request.layout)
                positions[first], attention.row_slot[first] = request.next_position + later, plan.end + later
            else:
                token_ids[first:last] = sequence.tokens(start, end)
                rows = sequence.rows(start, end)
                positions[first:last], attention.row_slot[first:last], attention.row_start[first:last] = rows
            attention.block_tables[index, : sequence.num_pages] = sequence.pages[: sequence.num_pages]
            attention.prefix_end[index] = plan.prefix_end
            if attention.weighing is not None and request.weighing is not None:
                attention.weighing.question_start[index] = plan.slots[request.layout.question_start]
                attention.weighing.temperature[index], attention.weighing.scale[index] = request.weighing
            if plan.aligned:
                attention.page_len[index, : len(plan.page_len)] = plan.page_len
            if request.sampling and end == sequence.num_tokens:
                forks = request.samples if request.forks else 1
                samples += [SampleRow(last - 1, sequence, sequence.sample + f) for f in range(forks)]
            if request.score is not None:
                scored = np.asarray(request.score.rows)
                scores += _read_rows(span, first, scored, np.arange(len(scored)))
            if request.logprobs_from is not None and not sequence.sample and not sequence.output_ids:
                predicting = request.logprob_rows
                prompt_logprobs += _read_rows(span, first, predicting, predicting + 1)
            first = last
        metadata, area = backend.build_metadata(attention), tile_area(attention)
        batch = StepBatch(token_ids, positions, total, metadata, area, first_request.backend)
        return StepPlan(batch, spans, samples, scores, prompt_logprobs)


def _read_rows(span: Span, first: int, indices: np.ndarray, places: np.ndarray) -> list[ReadRow]:
    """Return the rows of a span that are read for its request.

    Args:
        span: span of the step.
        first: row of the span's first token.
        indices: int `[R]`, ascending token indices that the request reads.
        places: int `[R]`, the place of each (see `ReadRow`).
    """
    low, high = np.searchsorted(indices, (span.start, span.end))
    request, rows = span.sequence.request, first + indices[low:high] - span.start
    return [ReadRow(row, request, place) for row, place in zip(rows.tolist(), places[low:high].tolist(), strict=True)]
