"""Which tokens run in the next step.

Running decodes first, one token each, then prefill spans in order of arrival, cut to
whatever is left of the token budget. A request is admitted when all the pages it can
ever need are free, so nothing has to be taken back from a running one.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from chunkattn.cache.pages import PagePool
from chunkattn.engine.request import Request, Sequence


class Span(NamedTuple):
    """Tokens `start ... end - 1` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int


class Scheduler:
    """Waiting requests, running sequences, and their pages."""

    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def num_sequences(self) -> int:
        """Sequences running or promised to a running request's samples."""
        return sum(r.samples for r in self.running)

    def add(self, request: Request) -> None:
        """Queue a request that fits the limits of the engine."""
        self.waiting.append(request)

    def schedule(self) -> list[Span]:
        """The next step's spans, neighbours in a sequence's order; empty when there is nothing to do."""
        self._admit()
        budget, spans = self.max_num_batched_tokens, []
        sequences = [s for r in self.running for s in r.sequences]
        for sequence in sorted(sequences, key=lambda s: s.num_tokens - s.num_computed > 1):  # stable: decodes first
            take = min(sequence.num_tokens - sequence.num_computed, budget)
            if take:
                spans.append(Span(sequence, sequence.num_computed, sequence.num_computed + take))
                budget -= take
        return spans

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            if self.num_sequences + request.samples > self.max_num_seqs or request.total_pages > self.pool.num_free:
                return  # in order of arrival: nobody overtakes
            pages = self.pool.take(request.total_pages)
            request.sequences.append(Sequence(request, 0, pages[: request.pages_per_sample]))
            request.spare_pages = pages[request.pages_per_sample :]
            self.running.append(self.waiting.popleft())

    def fork(self, request: Request) -> list[tuple[int, int]]:
        """Make the further samples of a request whose prompt is computed.

        Returns:
            Pages to copy, `(from, to)`: each sample's own copy of the prompt's last, partial page.
        """
        first, copies = request.sequences[0], []
        shared = first.pages[: request.shared_pages]
        own = request.pages_per_sample - request.shared_pages
        partial = request.plan.end % request.plan.block_size > 0
        for sample in range(1, request.samples):
            self.pool.share(shared)
            pages, request.spare_pages = request.spare_pages[:own], request.spare_pages[own:]
            if partial:
                copies.append((first.pages[request.shared_pages], pages[0]))
            request.sequences.append(Sequence(request, sample, shared + pages, first.num_computed))
        return copies

    def finish(self, sequence: Sequence) -> None:
        """Free a sequence's pages; its request leaves with its last sequence."""
        self.pool.release(sequence.pages)
        sequence.request.sequences.remove(sequence)
        if not sequence.request.sequences:
            self.remove(sequence.request)

    def remove(self, request: Request) -> None:
        """Forget a request, waiting or running, and free everything it holds."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        for sequence in request.sequences:
            self.pool.release(sequence.pages)
        self.pool.release(request.spare_pages)
        request.sequences, request.spare_pages = [], []
        self.running.remove(request)

    def check(self) -> None:
        """Assert that every page is accounted for (see `PagePool.check`)."""
        self.pool.check([*(s.pages for r in self.running for s in r.sequences), *(r.spare_pages for r in self.running)])
