"""`FairTurns`: a bound on what runs at once, in turns of the clients."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from chunkattn.fair_threads import OWNER


class FairTurns:
    """Places for the work of many clients. The clients that wait take turns, and one client holds at most half of the places.

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._places, self._most_each = places, max(1, places // 2)
        self._held: Counter[str | None] = Counter()
        self._waiting: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a place on behalf of the present `OWNER` for a `with` statement."""
        owner, turn = OWNER.get(), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._held[owner] -= 1
                if not self._held[owner]:
                    del self._held[owner]
            else:
                with suppress(KeyError, ValueError):
                    self._waiting[owner].remove(turn)
            self._admit()

    def _admit(self) -> None:
        """Give free places to those who wait, one client after the other."""
        for owner in list(self._waiting):
            queue = self._waiting[owner]
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if queue and self._held.total() < self._places and self._held[owner] < self._most_each:
                self._held[owner] += 1
                queue.popleft().set_result(None)
                self._waiting.move_to_end(owner)
            if not queue:
                del self._waiting[owner]
