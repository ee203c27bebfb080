"""Which tokens run in the next step.

Running decodes first, one token each, then prefill spans of any size until the token
budget is full: half for the first in order of priority and arrival, so that everybody's
turn comes, and half for those with the fewest tokens to go, so that short prompts need
not wait for long ones. A request is admitted when the pages of its prompt can be had;
pages for what it generates are taken one by one, and when there are none the last in
order is preempted, to be computed again later (what it had computed stays cached while
there is room).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from chunkattn.cache.trie import Block, BlockTrie
from chunkattn.engine.buckets import buckets, trimmed
from chunkattn.engine.placement import Placement
from chunkattn.engine.request import Part, Request, Sequence

_LEAST_ROWS = 128
"""Of a step that computes prompts beside decodes, however long that takes: reading the weights takes a while anyway."""
EXTRA_SPANS = 32
"""A step has room for a span of every sequence, and so many more: parts found in the cache tear holes."""


class Span(NamedTuple):
    """Tokens `start ... end - 1` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int


class Scheduler:
    """Waiting and running requests, both in order, and their blocks.

    Attributes:
        token_buckets: sizes `T` of a step's arrays.
        trie: the cache, and through it every page.
        waiting: not placed yet, or preempted.
        running: hold their blocks.
        pinned: completed precompute requests that go on holding theirs.
        alone: the only request that may be placed, None when all may.
        preemptions: requests sent back for want of pages so far.
    """

    def __init__(
        self,
        trie: BlockTrie,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int | None = None,
    ) -> None:
        self.trie, self.block_size = trie, block_size
        self.placement = Placement(trie, block_size)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.token_buckets = buckets(8, max(max_num_batched_tokens, 8), 2)
        self.max_spans = max_num_seqs + EXTRA_SPANS
        self.threshold = long_prefill_token_threshold
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pinned: list[Request] = []
        self.alone: Request | None = None
        self.preemptions = 0
        self._touched: list[tuple[Sequence, Part, int]] = []
        self._span_of: dict[Sequence, int] = {}
        self._refused: tuple[Request, tuple[int, int]] | None = None  # who could not be placed, and the room then

    @property
    def num_sequences(self) -> int:
        """Sequences running or promised to a running request's samples."""
        return sum(r.samples if r.forks else len(r.sequences) for r in self.running)

    # Requests in and out

    def add(self, request: Request) -> None:
        """Queue a request that fits the limits of the engine."""
        insort(self.waiting, request, key=lambda r: r.order)

    def admit(self) -> Request | None:
        """Place the first waiting request, if pages and sequences are there for it. Nobody overtakes.

        Returns:
            The request, None when it has to wait.
        """
        while (request := self._next) and not self._refused_still(request):
            if self._place(request):
                self.waiting.remove(request)
                insort(self.running, request, key=lambda r: r.order)
                return request
            if not self._make_room(request):
                self._refused = (request, self._room)
                break
        return None

    @property
    def _next(self) -> Request | None:
        """The waiting request to place next."""
        if self.alone is not None:
            return self.alone if self.alone in self.waiting else None
        return self.waiting[0] if self.waiting else None

    @property
    def _room(self) -> tuple[int, int]:
        """Pages to be had, less one for every sequence that may grow; and sequences."""
        growing = sum(len(r.sequences) for r in self.running if r.sampling)
        return self.trie.num_available - growing, self.max_num_seqs - self.num_sequences

    def _refused_still(self, request: Request) -> bool:
        """Whether the request was refused before and there is no more room since. Walking its blocks again costs."""
        if not self.running or self._refused is None or self._refused[0] is not request:
            return False
        return all(now <= then for now, then in zip(self._room, self._refused[1], strict=True))

    def _place(self, request: Request) -> bool:
        pages, sequences = self._room
        return request.samples <= sequences and self.placement.place(request, headroom=self.trie.num_available - pages)

    def _make_room(self, request: Request) -> bool:
        """Preempt the last in order for a request of a better priority, if all of its like would make enough room."""
        worse = [r for r in self.running if r.priority > request.priority]
        held = {block for r in worse for s in r.sequences for block in s.held if block.page >= 0}
        pages, sequences = self._room
        if not worse or request.samples > sequences + sum(r.samples for r in worse):
            return False
        if self.placement.missing(request) > pages + len(held) + len(worse):
            return False
        self.preempt(self.running[-1])
        return True

    @property
    def stuck(self) -> Request | None:
        """The first in line, when nothing runs and still it could not be placed: pinned pages leave too few."""
        return None if self.running else self._next

    def preempt(self, request: Request) -> None:
        """Send a running request back to the waiting for want of pages."""
        self.preemptions += 1
        self.send_back(request)

    def send_back(self, request: Request) -> None:
        """Let a running or pinned request wait again, with what it has generated, and release its blocks."""
        (self.running if request in self.running else self.pinned).remove(request)
        self.placement.release(request)
        self.add(request)

    def finish(self, sequence: Sequence) -> None:
        """Let a sequence go; its request leaves with its last sequence."""
        request = sequence.request
        if len(request.sequences) == 1:
            self.remove(request)
        else:
            self.placement.release_sequence(sequence)
        request.sequences.remove(sequence)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and let go of everything it holds."""
        for requests in (self.waiting, self.running, self.pinned):
            if request in requests:
                requests.remove(request)
        self.placement.release(request)

    def pin(self, request: Request) -> None:
        """Keep what a completed precompute request holds."""
        self.running.remove(request)
        self.pinned.append(request)

    def restart(self, requests: Iterable[Request]) -> None:
        """The pool is lost: these requests wait, in order, and the trie is empty, whatever state they were in."""
        self.waiting, self.running, self.pinned, self._touched, self._refused = [], [], [], [], None
        self.trie.reset()
        for request in requests:
            self.placement.forget(request)
            self.add(request)

    # A step

    def plan(self, beside_decodes: Callable[[], int] | None = None) -> list[Span]:
        """The next step's spans, ascending within a sequence; empty when there is nothing to compute.

        Args:
            beside_decodes: how many rows a step may have that somebody's next token waits for; asked when it matters.
        """
        self._touched, self._span_of = [], {}
        spans: list[Span] = []
        decoding = [s for r in self.running for s in r.sequences if s.num_tokens - s.num_computed == 1]
        for sequence in decoding:
            self._grow(sequence)
        decoding = [s for s in decoding if s.parts]  # the others have been preempted
        filling = [s for r in self.running for s in r.sequences if s.num_tokens - s.num_computed > 1]
        tokens = len(decoding) + sum(s.num_tokens - s.num_computed for s in filling)
        budget = min(trimmed(tokens, self.token_buckets), self.max_num_batched_tokens)
        if beside_decodes is not None and filling and any(s.output_ids for s in decoding):
            most = max(beside_decodes(), _LEAST_ROWS, 2 * len(decoding))
            budget = min(budget, max(size for size in self.token_buckets if size <= max(most, self.token_buckets[0])))
        for sequence in decoding:
            budget -= self._advance(sequence, 1, spans)
        for sequence, limit in self._helpings(filling, budget):
            budget -= self._advance(sequence, min(limit, budget), spans)
        return spans

    def _helpings(self, filling: list[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
        """Who may compute up to how many prompt tokens, in turn, as long as the budget lasts."""
        if self.threshold is not None:
            yield from ((s, self.threshold) for s in filling)
        elif filling:
            yield filling[0], -(-budget // 2)
            yield from (
                (s, budget) for s in sorted(filling[1:], key=lambda s: (s.request.priority, s.num_tokens - s.num_computed))
            )
        yield from ((s, budget) for s in filling)

    def _grow(self, sequence: Sequence) -> None:
        """Find a page for the sequence's next token, preempting whoever is last, be it itself."""
        while sequence.parts and not self.placement.grow(sequence):
            self.preempt(self.running[-1])

    def _advance(self, sequence: Sequence, room: int, spans: list[Span]) -> int:
        """Plan up to `room` of a sequence's next tokens. Returns how many.

        In order, so that every slot before a planned one is filled when it runs. What another
        sequence has planned of a shared block counts as filled: all rows of a step write
        before any of them reads.
        """
        taken = 0
        for part in sequence.parts[sequence.current :]:
            if part.complete:
                continue
            for index in range(part.cursor, len(part.blocks)):
                block, first = part.blocks[index], part.start + index * self.block_size
                known = min(block.size, sequence.num_tokens - first)
                take = min(known - block.planned, room - taken)
                if take > 0:
                    if not self._emit(spans, sequence, first + block.planned, take):
                        return taken
                    block.planned += take
                    taken += take
                    self._touched.append((sequence, part, index))
                if block.planned < known:
                    return taken
        return taken

    def _emit(self, spans: list[Span], sequence: Sequence, start: int, count: int) -> bool:
        """Add tokens to the spans, to the sequence's last where they adjoin; False when there is no room for a span."""
        last = self._span_of.get(sequence, -1)
        if last >= 0 and spans[last].end == start:
            spans[last] = Span(sequence, spans[last].start, start + count)
        elif len(spans) < self.max_spans:
            self._span_of[sequence] = len(spans)
            spans.append(Span(sequence, start, start + count))
        else:
            return False
        return True

    def commit(self, spans: list[Span]) -> None:
        """The planned step has run: what it computed is there for everybody."""
        for sequence, start, end in spans:
            if not sequence.output_ids:
                sequence.request.computed[start:end] = True
        for sequence, part, index in self._touched:
            block: Block = part.blocks[index]
            block.filled = block.planned
            if block.complete and block.key is None and part is sequence.parts[-1]:
                self.placement.publish(sequence, part, index)
        self._touched = []

    def check(self) -> None:
        """Assert that every page and block is accounted for (see `BlockTrie.check`)."""
        held = [*self.running, *self.pinned]
        self.trie.check([*(s.held for r in held for s in r.sequences), *(r.spares for r in held)])
