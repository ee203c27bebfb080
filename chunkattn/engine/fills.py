"""`Fills`: the tokens of planned steps, as spans and as the slots of blocks that they fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from chunkattn.engine.placement import Placement
from chunkattn.engine.request import Part, Sample
from chunkattn.engine.states import Move
from chunkattn.engine.step import Span
from chunkattn.engine.walks import Walks

Fill = tuple[Sample, Part, int, int, int]
"""Sample and part, number of a block in the part, and slots `start ... end - 1` of the block, computed in one step."""


class Fills:
    """Planned steps, from the first token that one takes until its tokens are computed.

    Args:
        placement: places of requests in the cache, which publishes blocks.
        walks: walks over recurrent layers; None for a model without such layers.
        block_size: slots of a block.
        max_spans: maximum number of spans of a step.
    """

    def __init__(self, placement: Placement, walks: Walks | None, block_size: int, max_spans: int) -> None:
        self._placement, self._walks, self._block_size, self._max_spans = placement, walks, block_size, max_spans
        self._uncommitted: deque[tuple[list[Span], list[Fill]]] = deque()  # planned steps, the oldest first
        self._turn = 0  # number of the plan
        self.begin()

    @property
    def moves(self) -> list[Move]:
        """Return the moves of planned steps."""
        return [span.move for spans, _ in self._uncommitted for span in spans if span.move is not None]

    def clear(self) -> None:
        """Forget all planned steps, whose pool is lost."""
        self._uncommitted.clear()

    # Planning

    def begin(self) -> None:
        """Begin the plan of a step."""
        self._spans, self._fills, self._span_of = list[Span](), list[Fill](), dict[Sample, int]()
        self._turn += 1

    def end(self, others: list[Span]) -> list[Span]:
        """End the plan of a step, and return its spans.

        Args:
            others: spans of a step that fills no block, if nothing was taken.
        """
        spans = self._spans or others
        if spans:
            self._uncommitted.append((spans, self._fills))
        return spans

    def take(self, sample: Sample, room: int) -> int:
        """Plan up to `room` of a sample's next tokens. Return how many were planned.

        Tokens are planned in order, so that all slots before a token are filled when the token runs. Tokens of a shared block
        that another sample has planned count as filled: all rows of a step write before any of them reads.
        """
        if self._walks is not None:
            return self._walks.advance(sample, room, self._turn, self._move)
        taken = 0
        for part in sample.parts[sample.current :]:
            if part.complete:
                continue
            for index in range(part.cursor, len(part.blocks)):
                block, first = part.blocks[index], part.start + index * self._block_size
                known = min(block.size, sample.num_tokens - first)
                take = min(known - block.planned, room - taken)
                if take > 0:
                    if not self._emit(sample, first + block.planned, take):
                        return taken
                    self._fills.append((sample, part, index, block.planned, block.planned + take))
                    block.planned += take
                    taken += take
                if block.planned < known:
                    return taken
        return taken

    def _move(self, sample: Sample, move: Move, count: int) -> bool:
        """Add tokens behind a move, as `_emit` does, and fill the blocks that lack them."""
        spans, last = self._spans, self._span_of.get(sample, -1)
        if last >= 0 and spans[last].move is move:
            spans[last] = spans[last]._replace(end=move.end + count)
        elif len(spans) < self._max_spans:
            self._span_of[sample] = len(spans)
            spans.append(Span(sample, move.start, move.end + count, move))
        else:
            return False
        part = sample.parts[move.part]
        for index, end in self._blocks_of(part, move.end, move.end + count):
            block = part.blocks[index]
            if block.planned < end:
                self._fills.append((sample, part, index, block.planned, end))
                block.planned = end
        return True

    def _blocks_of(self, part: Part, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the place of each block of a part with tokens `start ... end - 1`, and how many of them lie before `end`."""
        first, size = start - part.start, self._block_size
        for index in range(first // size, -(-(end - part.start) // size)):
            yield index, min(end - part.start - index * size, size)

    def _emit(self, sample: Sample, start: int, count: int) -> bool:
        """Add tokens to the sample's last span if they adjoin, else as a new span. Return False if no span is left."""
        spans, last = self._spans, self._span_of.get(sample, -1)
        if last >= 0 and spans[last].end == start:
            spans[last] = Span(sample, spans[last].start, start + count)
        elif len(spans) < self._max_spans:
            self._span_of[sample] = len(spans)
            spans.append(Span(sample, start, start + count))
        else:
            return False
        return True

    def undo(self) -> None:
        """Undo the plan of the latest step, which has not begun."""
        spans, fills = self._uncommitted.pop()
        for span in reversed(spans):
            if span.move is not None and self._walks is not None:
                self._walks.undo(span.sample, span.move)
        for _, part, number, start, _ in fills:
            block = part.blocks[number]
            block.planned = max(min(block.planned, start), block.filled)

    # The device

    def sent(self, spans: Iterable[Span]) -> None:
        """Note that a step is on the device.

        Args:
            spans: the step's spans.
        """
        if self._walks is not None:
            for sample, _, _, move in spans:
                if move is not None:
                    self._walks.sent(sample, move)

    def commit(self) -> bool:
        """Mark the tokens of the oldest planned step as computed, for every request that shares their blocks.

        Tokens from the first that is not finite of a request stay uncomputed. So do tokens of other requests whose blocks
        continue from theirs. A request that needs such tokens computes them.

        Returns:
            Whether all tokens of the step are computed.
        """
        complete = True
        spans, fills = self._uncommitted.popleft()
        for sample, start, end, _ in spans:
            if not sample.output_ids:
                sample.request.computed[start : min(end, sample.request.finite_end)] = True
        for sample, part, number, start, end in fills:
            block, last = part.blocks[number], part.start + number * self._block_size + end
            before = part.blocks[number - 1 : number] if number else part.parents
            ready = block.filled == start and all(p is not None and p.complete for p in before)
            if not ready or last > sample.request.finite_end:
                block.planned, complete = block.filled, False
                continue
            block.filled, block.planned = end, max(block.planned, end)
            if block.complete and block.key is None and sample.parts and part is sample.parts[-1]:
                self._placement.publish(sample, part, number)
        return complete if self._walks is None else self._commit_moves(self._walks, spans) and complete

    def _commit_moves(self, walks: Walks, spans: list[Span]) -> bool:
        """End the moves of a step whose blocks have been filled. Return whether all their samples go on."""
        complete = True
        for sample, _, end, move in spans:
            if move is not None:
                is_current, finite = sample.track is move.track, sample.request.finite_end
                computed = is_current and end <= finite and self._is_filled(sample.parts[move.part], move)
                complete &= walks.commit(sample, move, computed=computed)
        return complete

    def _is_filled(self, part: Part, move: Move) -> bool:
        """Return whether the K/V of a move's tokens are computed."""
        return all(part.blocks[index].filled >= end for index, end in self._blocks_of(part, move.start, move.end))

    def commit_decodes(self, spans: Iterable[Span]) -> None:
        """Mark decodes as computed that no plan has named; no step is planned or on its way.

        Args:
            spans: decodes of each sample, whose tokens are known.
        """
        self.begin()
        for sample, start, end, _ in spans:
            self.take(sample, end - start)
        self._uncommitted.append((self._spans, self._fills))
        self.commit()
