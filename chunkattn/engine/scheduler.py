"""`Scheduler`: chooses the tokens that the next step computes.

Running decodes come first, one token each. Prefill spans of any size then fill the token budget. Half of the budget goes
to the first request in order of priority and arrival, so that every request gets its turn. The other half goes to the
samples with the fewest tokens left, so that short prompts do not wait for long prompts.

A request is admitted when its adapter has a slot and the pages of its prompt are available. Pages for its generated tokens are
taken one by one. When no page is left, the scheduler preempts the last request in order, which is recomputed later. Its
computed blocks stay cached while there is room.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from chunkattn.cache.trie import BlockTrie
from chunkattn.engine.fills import Fills
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.placement import Placement
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.shape_turns import held_back
from chunkattn.engine.states import Move, States, Track
from chunkattn.engine.step import Span
from chunkattn.engine.walks import Walks

if TYPE_CHECKING:
    from chunkattn.engine.adapters import LoadedAdapters

_LEAST_ROWS = 128
"""Minimum rows of a step that computes prompts beside decodes: fewer save little time, as all weights are read anyway."""
EXTRA_SPANS = 32
"""Spans that a step has room for beyond one per sample, since cached parts split the tokens of a sample."""


class Room(NamedTuple):
    """Room for a request.

    Attributes:
        pages: pages, less one for every sample that may grow.
        samples: samples.
        adapters: slots for the request's adapter, 1 or 0.
        seats: seats of recurrent layers.
        slots: slots of recurrent layers.
    """

    pages: int
    samples: int
    adapters: int
    seats: int
    slots: int


class Scheduler:
    """Queues of waiting and running requests, both in order, and the blocks of the requests.

    Args:
        limits: limits of the engine.
        adapters: adapters that requests may name; None for none.
        states: slots and seats of recurrent layers; None for a model without such layers.

    Attributes:
        sizes: sizes of the steps.
        trie: cache of blocks, which owns every page.
        fills: planned steps.
        waiting: requests that are not placed yet, or are preempted.
        running: requests that hold their blocks.
        pinned: completed precompute requests that keep their blocks.
        uncached: waiting requests that name an attention backend. Each takes one step for itself and no pages.
        alone: the only request that may be placed; None if all may.
        preemptions: number of preemptions for lack of pages.
        changes: number of times that a request or a sample entered a queue, left it or was placed.
    """

    def __init__(self, limits: EngineLimits, adapters: LoadedAdapters | None = None, states: States | None = None) -> None:
        self._config, self.sizes, self._adapters = limits.config, limits.steps, adapters
        self.states, self.block_size = states, limits.block_size
        self.trie = BlockTrie(limits.num_pages, None if states is None else states.drop)
        self.walks = None if states is None else Walks(states, self.block_size)
        self.placement = Placement(self.trie, self.block_size, self.walks)
        self.max_spans = limits.config.max_num_seqs + EXTRA_SPANS
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pinned: list[Request] = []
        self.uncached: list[Request] = []
        self.alone: Request | None = None
        self.preemptions = self.changes = 0
        self.fills = Fills(self.placement, self.walks, self.block_size, self.max_spans)
        self._grown: list[Sample] = []  # samples that got a page for the step planned ahead
        self._uncached_before = False  # `_uncached_next` before that step was planned
        self._uncached_next = False  # the requests without pages take turns with the others
        self._refused: tuple[Request, Room] | None = None  # request that could not be placed, and the room then

    @property
    def num_samples(self) -> int:
        """Return the number of running samples, including samples that running requests will fork."""
        return sum(r.num_samples if r.forks else len(r.samples) for r in self.running)

    def holders(self, priority: float = inf) -> list[Request]:
        """Return the requests whose adapters keep their slots: those that run, and the next one without pages.

        Args:
            priority: the worst priority of the running ones.
        """
        return [*(r for r in self.running if r.priority <= priority), *self._next_uncached]

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request, which must fit the limits of the engine."""
        self.changes += 1
        insort(self.waiting if request.backend is None else self.uncached, request, key=lambda r: r.order)

    def admit(self) -> Request | None:
        """Place the first waiting request, if pages and samples are available. No request overtakes another.

        Returns:
            The request, or None if it has to wait.

        Raises:
            LostAdapterError: the adapter of the next request cannot be loaded again.
        """
        if self._adapters is not None and not all(self._adapters.take(r, self.holders()) for r in self._next_uncached):
            return None
        while (request := self._next) and not self._still_refused(request):
            if self._place(request):
                self.changes += 1
                self.waiting.remove(request)
                insort(self.running, request, key=lambda r: r.order)
                return request
            if not self._make_room(request):
                self._refused = (request, self._room(request))
                break
        return None

    @property
    def _next(self) -> Request | None:
        """Return the waiting request to place next."""
        if self.alone is not None:
            return self.alone if self.alone in self.waiting else None
        return self.waiting[0] if self.waiting else None

    @property
    def _next_uncached(self) -> list[Request]:
        """Return the next request without pages, if there is one and all may run."""
        return self.uncached[:1] if self.alone is None else []

    def _slot_is_free(self, request: Request, priority: float = inf) -> bool:
        return self._adapters is None or self._adapters.has_room(request, self.holders(priority))

    def _room(self, request: Request) -> Room:
        """Return what is available for a request."""
        growing = sum(len(r.samples) for r in self.running if r.sampling)
        pages, samples = self.trie.num_available - growing, self._config.max_num_seqs - self.num_samples
        states = (0, 0) if self.states is None else (self.states.num_free_seats, self.states.num_available)
        return Room(pages, samples, int(self._slot_is_free(request)), *states)

    def _still_refused(self, request: Request) -> bool:
        """Return whether the request was refused before and the room has not grown: walking its blocks again is slow."""
        if not self.running or self._refused is None or self._refused[0] is not request:
            return False
        return all(now <= then for now, then in zip(self._room(request), self._refused[1], strict=True))

    def _place(self, request: Request) -> bool:
        pages, samples, *_ = self._room(request)
        self.placement.lacks_states = False
        if request.num_samples > samples or (self._adapters is not None and not self._adapters.take(request, self.holders())):
            return False
        if self.walks is not None and not self.walks.may_take(request):  # or pages would be evicted in vain
            self.placement.lacks_states = True
            return False
        return self.placement.place(request, headroom=self.trie.num_available - pages)

    def _make_room(self, request: Request) -> bool:
        """Preempt the last running request for a request of better priority. Return whether a request was preempted.

        Preemption happens only if all running requests of worse priority together would make enough room.
        """
        worse = [r for r in self.running if r.priority > request.priority]
        held = {block for r in worse for s in r.samples for block in s.held if block.page >= 0}
        pages, samples, _, seats, slots = self._room(request)
        if not worse or not self._slot_is_free(request, request.priority):
            return False
        if request.num_samples > samples + sum(r.num_samples for r in worse):
            return False
        if self.walks is not None:
            tracks = sum(len(r.samples) + len(r.spare_tracks) for r in worse)
            held_by_worse = Counter(kept for r in worse for kept in r.sources)
            kept = sum(state.refs == refs for state, refs in held_by_worse.items())
            for needed, room in zip(self.walks.needs(request), (seats + tracks, slots + tracks + kept), strict=True):
                if needed > room:
                    return False
        if self.placement.missing(request) > pages + len(held) + len(worse):
            return False
        self.preempt(self.running[-1])
        return True

    @property
    def stuck(self) -> Request | None:
        """Return the first waiting request if nothing runs and it cannot be placed, because pinned pages leave too few."""
        waits = self._adapters is not None and self._next_uncached  # which may have the last slot
        return None if self.running or waits else self._next

    def preempt(self, request: Request) -> None:
        """Return a running request to the queue for lack of pages."""
        self.preemptions += 1
        request.preemptions += 1
        self.send_back(request)

    def send_back(self, request: Request) -> None:
        """Return a running or pinned request to the queue and release its blocks. It keeps its generated tokens."""
        (self.running if request in self.running else self.pinned).remove(request)
        self.placement.release(request)
        self.add(request)

    def finish(self, sample: Sample) -> None:
        """Remove a sample and release its blocks. Its request is removed with its last sample."""
        request = sample.request
        if len(request.samples) == 1:
            self.remove(request)
        else:
            self.changes += 1
            self.placement.release_sample(sample)
        request.samples.remove(sample)

    def remove(self, request: Request) -> None:
        """Remove a request from every queue and release its blocks."""
        self.changes += 1
        for requests in (self.waiting, self.running, self.pinned, self.uncached):
            if request in requests:
                requests.remove(request)
        self.placement.release(request)

    def pin(self, request: Request) -> None:
        """Keep the blocks of a completed precompute request."""
        self.changes += 1
        self.running.remove(request)
        self.pinned.append(request)
        if self.walks is not None:
            self.walks.pin(request)

    def restart(self, requests: Iterable[Request]) -> None:
        """Empty all queues and the trie after the loss of the pool, and queue `requests` in order, regardless of state."""
        self.changes += 1
        self.waiting, self.running, self.pinned, self.uncached, self._refused = [], [], [], [], None
        self.fills.clear()
        self.trie.reset()
        if self.walks is not None:
            self.walks.reset()
        for request in requests:
            self.placement.forget(request)
            self.add(request)

    # Steps

    def plan(self, beside_decodes: Callable[[], int] | None = None) -> list[Span]:
        """Return the spans of the next step, ascending within a sample; empty if there is nothing to compute.

        A request of `uncached` takes every second step, or every step if there is nothing else. Steps that are not committed
        yet count as computed.

        Args:
            beside_decodes: returns the row limit of a step with decodes and prompts; called only for such a step.
        """
        self.fills.begin()
        whole = [
            Span(r.samples[0], 0, len(r.layout))
            for r in self._next_uncached
            if self._adapters is None or self._adapters.has_slot(r)
        ]
        taken = 0 if whole and self._uncached_next else self._plan_paged(beside_decodes)
        self._uncached_next = taken > 0
        return self.fills.end(whole)

    def plan_ahead(self, beside_decodes: Callable[[], int]) -> list[Span]:
        """Plan the step after one that is not committed, as `plan` does, unless samples would be preempted for lack of pages.

        Args:
            beside_decodes: see `plan`.
        """
        grown, before = list[Sample](), self._uncached_next
        for sample, count in self._tokens_left().items():
            if count == 1:
                pages = sample.num_pages
                if not self.placement.grow(sample):
                    break
                grown += [sample] * (sample.num_pages > pages)
        else:
            if spans := self.plan(beside_decodes):
                self._grown, self._uncached_before = grown, before
                return spans
            self._uncached_next = before
        self.placement.shrink(grown)
        return []

    def unplan(self) -> None:
        """Undo `plan_ahead`, whose step has not begun."""
        self.fills.undo()
        self.placement.shrink(self._grown)
        self._uncached_next = self._uncached_before

    def _plan_paged(self, beside_decodes: Callable[[], int] | None) -> int:
        """Plan tokens of running requests. Return how many."""
        left = self._tokens_left()
        decoding = [s for s, count in left.items() if count == 1]
        held = held_back(decoding)
        decoding = [s for s in decoding if s not in held]
        for sample in decoding:
            self._grow(sample)
        decoding = [s for s in decoding if s.parts]  # drops preempted samples
        filling = [s for s, count in left.items() if count > 1 and s.parts]
        tokens = len(decoding) + sum(left[s] for s in filling)
        budget = self.sizes.trimmed(tokens)
        if 2 * (budget - len(decoding)) < tokens - len(decoding):  # the decodes come back, and prompts would creep
            budget = tokens
        budget = min(budget, self._config.max_num_batched_tokens)
        if beside_decodes is not None and filling and any(s.output_ids for s in decoding):
            most = max(beside_decodes(), _LEAST_ROWS, 2 * len(decoding))
            budget = min(budget, max(size for size in self.sizes.buckets if size <= max(most, self.sizes.buckets[0])))
        room = budget
        for sample in decoding:
            room -= self.fills.take(sample, 1)
        for sample, limit in self._prefill_turns(filling, left, room):
            room -= self.fills.take(sample, min(limit, room))
        return budget - room

    def _tokens_left(self) -> dict[Sample, int]:
        """Return the number of tokens that every running sample has still to plan."""
        if self.walks is not None:
            for request in self.running:
                for sample in request.samples:
                    self.walks.settle(sample)
        left = {s: s.num_tokens - s.num_planned for r in self.running for s in r.samples}
        begun = set[str]()
        for request in self.running:
            if request.score is not None and (name := request.score.series) is not None and left[request.samples[0]]:
                if name in begun:  # an earlier request of the series goes first
                    left[request.samples[0]] = 0
                begun.add(name)
        return left

    def _prefill_turns(self, filling: list[Sample], left: dict[Sample, int], budget: int) -> Iterator[tuple[Sample, int]]:
        """Yield samples, each with the number of prompt tokens it may compute, in turn; the caller stops at the budget."""
        if (threshold := self._config.long_prefill_token_threshold) is not None:
            yield from ((s, threshold) for s in filling)
        elif filling:
            yield filling[0], -(-budget // 2)
            yield from ((s, budget) for s in sorted(filling[1:], key=lambda s: (s.request.priority, left[s])))
        yield from ((s, budget) for s in filling)

    def _grow(self, sample: Sample) -> None:
        """Find a page for the sample's next token. Preempt the last request until a page is free, even the sample's own."""
        while sample.parts and not self.placement.grow(sample):
            self.preempt(self.running[-1])

    def take_forked(self) -> list[tuple[int, int, int, int]]:
        """Return the tracks that forked samples must be given since the last call (see `StatePool.copy`)."""
        return [] if self.walks is None else self.walks.take_forked()

    def check(self) -> None:
        """Assert that every page, block and slot is accounted for (see `BlockTrie.check` and `States.check`)."""
        held = [*self.running, *self.pinned]
        if self.states is not None:
            tracks = [t for r in held for t in (*(s.track for s in r.samples), *r.spare_tracks) if t is not None]
            owners: list[Move | Track] = [*tracks, *self.fills.moves]
            needed = Counter(s for r in held for s in r.sources) + Counter(s for o in owners for s in (o.source, o.goal) if s)
            self.states.check(tracks, needed)
        self.trie.check([*(s.held for r in held for s in r.samples), *(r.spares for r in held)])
