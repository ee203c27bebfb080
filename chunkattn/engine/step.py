"""`Step`: what one step computes, reads and for whom; and its builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from chunkattn.backends.base import NO_QUESTION, AttentionBackend, AttentionBatch, Metadata, Weighing
from chunkattn.backends.recurrence import NO_WALK, Recurrence, Walk
from chunkattn.engine.rates import tile_area
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.states import Move
from chunkattn.engine.step_sizes import bucket_for, buckets
from chunkattn.rope.positions import PADDING


class Span(NamedTuple):
    """Tokens `start ... end - 1` of a sample, computed in one step.

    Attributes:
        sample: the sample.
        start: token index of the first token.
        end: token index after the last token.
        move: what recurrent layers compute for the tokens, which lie in one part then; None for a model without such layers.
    """

    sample: Sample
    start: int
    end: int
    move: Move | None = None


class StepArrays(NamedTuple):
    """Input of one step on the device: arrays and plain values.

    Attributes:
        token_ids: int32 `[T]`, padded to a bucket.
        positions: int32 `[T]` position ids, padded to the same bucket.
        metadata: attention backend's description of the rows.
        slots: int32 `[T]`, slot of each row's adapter (see `AdapterSlots`); None for an engine without adapters.
        walks: description of the rows for recurrent layers (see `Recurrence`); None for a model without such layers.
        backend: attention backend that the step's only request names; None for the engine's.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    metadata: Metadata
    slots: np.ndarray | None = None
    walks: Any = None
    backend: str | None = None


SampleRow = tuple[int, Sample, int]
"""Row to sample from, the sample that computes the row, and the number of the sample that gets the token.

Before a fork, all samples of a request get their tokens from the row of its only sample."""
ReadRow = tuple[int, Request, int]
"""Row to read for a request, the request, and an index.

The index of a score counts the rows of its request. The index of a prompt log-probability is the predicted token's."""


@dataclass(frozen=True)
class Step:
    """A step: its tokens, their arrays, and the rows that are read for samples and requests.

    Only `arrays` goes to the device. The other fields stay on the host.

    Attributes:
        spans: tokens that the step computes.
        arrays: input of the step on the device.
        num_rows: number of rows in use.
        area: rows times slots of the tiles that attention visits.
        samples: rows to sample from.
        scores: rows whose labels or classes are read.
        prompt_logprobs: rows that predict a prompt token whose log-probability is read.
    """

    spans: list[Span]
    arrays: StepArrays
    num_rows: int
    area: int
    samples: list[SampleRow]
    scores: list[ReadRow]
    prompt_logprobs: list[ReadRow]

    @property
    def is_read(self) -> bool:
        """Return whether the host waits for values of this step."""
        return bool(self.samples or self.scores or self.prompt_logprobs)

    @property
    def ends_scores(self) -> bool:
        """Return whether the step computes the last token of a scoring request."""
        return any(span.sample.request.score is not None and span.end == span.sample.num_tokens for span in self.spans)

    def rows(self) -> Iterator[tuple[Span, slice]]:
        """Yield every span with its rows."""
        last = 0
        for span in self.spans:
            first, last = last, last + span.end - span.start
            yield span, slice(first, last)

    def not_finite(self, finite: np.ndarray) -> dict[Request, tuple[int, int]]:
        """Return the requests with a row that is not finite, each with token index and token id of its first such row.

        Args:
            finite: bool `[T]`, False for rows with a value that is not finite; padding may have either.
        """
        failed: dict[Request, tuple[int, int]] = {}
        if finite[: self.num_rows].all():
            return failed
        for span, rows in self.rows():
            if not finite[rows].all():
                offset = int(finite[rows].argmin())
                failed.setdefault(span.sample.request, (span.start + offset, int(self.arrays.token_ids[rows][offset])))
        return failed

    def computed_rows(self, is_alive: Callable[[Request], bool]) -> np.ndarray:
        """Return bool `[T]`, whether a row's token is computed, for a request that has not ended.

        Args:
            is_alive: returns whether a request has not ended.
        """
        computed = np.zeros(len(self.arrays.token_ids), bool)
        for (sample, start, end, _), rows in self.rows():
            if is_alive(sample.request):
                known = end if self.arrays.backend else sample.num_computed
                computed[rows] = np.arange(start, end) < known
        return computed


class StepBuilder:
    """Builder of steps whose array sizes come from two small lists of buckets.

    Args:
        adapters: number of slots of adapters.
        slot_of: slot of each adapter by digest; it may change between steps.
        recurrence: form of the recurrent layers; None for a model without.

    Attributes:
        backends: attention backends by the name that a request gives; None names the engine's.
        token_buckets: sizes `T` of the flat token arrays.
        width_buckets: sizes `W` of the page tables.
        run_widths: those of runs of decodes: fewer, as a table is sent once for several decodes.
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
        adapters: int = 0,
        slot_of: Mapping[str, int] | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        self.backends, self._adapters, self._slot_of = backends, adapters, {} if slot_of is None else slot_of
        self._recurrence, self.max_spans = recurrence, max_spans
        self.block_size = block_size
        self.weighs, self.windowed = weighs, backends[None].spec.windowed
        self.token_buckets = token_buckets
        narrowest = max_table_pages if backends[None].any_table_width else backends[None].narrowest_table
        self.width_buckets = buckets(min(narrowest, max_table_pages), max_table_pages, 8)
        self.run_widths = tuple(sorted({self.width_buckets[0], self.width_buckets[-1]}))

    def empty(self, rows: int, width: int, backend: str | None = None) -> StepArrays:
        """Return the arrays of a step of padding rows only, which writes no page.

        Args:
            rows: one of `token_buckets`.
            width: one of `width_buckets`.
            backend: see `StepArrays`.
        """
        token_ids, positions, attention = self._arrays(rows, width, 0)
        metadata = self.backends[backend].build_metadata(attention)
        return StepArrays(token_ids, positions, metadata, self._slots(rows), self._walks([], rows), backend)

    def _walks(self, walks: list[Walk], rows: int) -> Any:
        """Return the description of walks for recurrent layers; None for a model without such layers."""
        if self._recurrence is None:
            return None
        entries = min(self.max_spans, rows)
        return self._recurrence.build(np.asarray(walks + [NO_WALK] * (entries - len(walks)), np.int32), rows)

    def _slots(self, rows: int) -> np.ndarray | None:
        """Return the slots of rows without an adapter; None for an engine without adapters."""
        return np.full(rows, self._adapters, np.int32) if self._adapters else None

    def _arrays(self, rows: int, width: int, used: int) -> tuple[np.ndarray, np.ndarray, AttentionBatch]:
        """Return the token ids, positions and attention batch of a step, all zero except page lengths and positions."""
        token_ids, row_seq, row_slot, row_start = np.zeros((4, rows), np.int32)
        positions = np.full(rows, PADDING, np.int32)
        spans = min(self.max_spans, rows)  # a span has a row at least
        prefix_end, block_tables = np.zeros(spans, np.int32), np.zeros((spans, width), np.int32)
        page_len = np.full((spans, width), self.block_size, np.int32)
        weighing = None
        if self.weighs:
            weighing = Weighing(np.full(spans, NO_QUESTION, np.int32), *np.ones((2, spans), np.float32))
        attention = AttentionBatch(
            used, row_seq, row_slot, row_start, prefix_end, block_tables, page_len, self.block_size, weighing
        )
        if self.windowed:
            attention = replace(attention, page_position=attention.page_positions().copy())
        return token_ids, positions, attention

    def _describe(self, attention: AttentionBatch, index: int, sample: Sample) -> None:
        """Describe a sample's pages as sequence `index` of an attention batch."""
        request, plan = sample.request, sample.request.plan
        attention.block_tables[index, : sample.num_pages] = sample.pages[: sample.num_pages]
        attention.prefix_end[index] = plan.prefix_end
        if attention.weighing is not None and request.weighing is not None:
            attention.weighing.question_start[index] = plan.slots[request.layout.question_start]
            attention.weighing.temperature[index], attention.weighing.scale[index] = request.weighing
        if plan.aligned:
            attention.page_len[index, : len(plan.page_len)] = plan.page_len
            if attention.page_position is not None:
                prompt = len(plan.page_len)
                attention.page_position[index, :prompt] = request.page_positions
                attention.page_position[index, prompt:] += request.next_position - plan.end

    def build_decodes(
        self, rows: Sequence[tuple[Sample, int]], size: int, width: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, Metadata, np.ndarray | None]:
        """Return the arrays of a run of decodes: token ids, positions, the attention backend's metadata, and adapters' slots.

        Args:
            rows: a sample for each row, and how many of its tokens the device has drawn that the host does not know.
            size: number of rows, padding included.
            width: one of `run_widths`; None takes the smallest that holds the pages of the samples.
        """
        width = width or bucket_for(max(sample.num_pages for sample, _ in rows), self.run_widths)
        token_ids, positions, attention = self._arrays(size, width, len(rows))
        slots = self._slots(size)
        attention.row_seq[: len(rows)] = np.arange(len(rows))
        for row, (sample, unknown) in enumerate(rows):
            request, later = sample.request, len(sample.output_ids) - 1 + unknown
            token_ids[row] = sample.output_ids[-1]
            positions[row], attention.row_slot[row] = request.next_position + later, request.plan.end + later
            if slots is not None and request.adapter is not None:
                slots[row] = self._slot_of[request.adapter]
            self._describe(attention, row, sample)
        return token_ids, positions, self.backends[None].build_decodes(attention), slots

    def build(self, spans: list[Span]) -> Step:
        """Return the step that computes `spans`. The attention backend sees every span as its own sequence.

        Args:
            spans: tokens to compute, at most `max_spans` spans, or the whole prompt of one request that names a backend.
        """
        total, name = sum(s.end - s.start for s in spans), spans[0].sample.request.backend
        backend = self.backends[name]
        if name is None:
            sizes, width = self.token_buckets, bucket_for(max(s.sample.num_pages for s in spans), self.width_buckets)
        else:
            sizes, width = buckets(8, max(backend.max_rows, 8), 2), len(spans[0].sample.request.plan.page_len)
        token_ids, positions, attention = self._arrays(bucket_for(total, sizes), width, total)
        attention.row_seq[:total] = np.repeat(np.arange(len(spans)), [s.end - s.start for s in spans])
        slots, walks = self._slots(len(token_ids)), list[Walk]()
        samples: list[SampleRow] = []
        scores: list[ReadRow] = []
        prompt_logprobs: list[ReadRow] = []
        first = 0
        for index, span in enumerate(spans):
            sample, start, end, move = span
            request, plan, last = sample.request, sample.request.plan, first + end - start
            if start >= len(request.layout) and last == first + 1:  # fast path for a decode
                later = start - len(request.layout)
                token_ids[first] = sample.output_ids[later]
                positions[first], attention.row_slot[first] = request.next_position + later, plan.end + later
            else:
                token_ids[first:last] = sample.tokens(start, end)
                rows = sample.rows(start, end)
                positions[first:last], attention.row_slot[first:last], attention.row_start[first:last] = rows
            if move is not None:
                walks.append(move.walk(first))
            if slots is not None and request.adapter is not None:
                slots[first:last] = self._slot_of[request.adapter]
            self._describe(attention, index, sample)
            if request.sampling and end == sample.num_tokens:
                forks = request.num_samples if request.forks else 1
                samples += [(last - 1, sample, sample.number + f) for f in range(forks)]
            if request.score is not None:
                scored = np.asarray(request.score.rows)
                scores += _read_rows(span, first, scored, np.arange(len(scored)))
            if request.logprobs_from is not None and not sample.number and not sample.output_ids:
                predicting = request.logprob_rows
                prompt_logprobs += _read_rows(span, first, predicting, predicting + 1)
            first = last
        described = self._walks(walks, len(token_ids))
        arrays = StepArrays(token_ids, positions, backend.build_metadata(attention), slots, described, name)
        return Step(spans, arrays, total, tile_area(attention), samples, scores, prompt_logprobs)


def _read_rows(span: Span, first: int, tokens: np.ndarray, indices: np.ndarray) -> list[ReadRow]:
    """Return the rows of a span that are read for its request.

    Args:
        span: span of the step.
        first: row of the span's first token.
        tokens: int `[R]`, ascending token indices that the request reads.
        indices: int `[R]`, the index of each (see `ReadRow`).
    """
    low, high = np.searchsorted(tokens, (span.start, span.end))
    rows = first + tokens[low:high] - span.start
    return [(row, span.sample.request, index) for row, index in zip(rows.tolist(), indices[low:high].tolist(), strict=True)]
