"""`FairShares`: a bound on what clients hold at once, such as threads, places or bytes. Clients that wait take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

OWNER: ContextVar[str | None] = ContextVar("owner", default=None)
"""Client on whose behalf a task runs. A server sets it for each request."""


class FairShares:
    """Shares of all clients. What exceeds a share waits, in the order of arrival for each client.

    Args:
        most_each: what one client may hold at once. A single piece may exceed it, when the client holds nothing else.
        most: what all clients may hold together.
        most_waiting: number of pieces for which one client may wait at once.

    Attributes:
        most_each: what one client may hold at once.
        held: what is held now, by client.
        total: what all clients hold now.
    """

    def __init__(self, most_each: int, most: float = float("inf"), most_waiting: float = float("inf")) -> None:
        self.most_each, self._most, self._most_waiting = most_each, most, most_waiting
        self.held: Counter[str | None] = Counter()
        self.total = 0
        self._waiting: OrderedDict[str | None, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @property
    def waiting(self) -> bool:
        """Return whether any client waits."""
        return bool(self._waiting)

    def is_full(self, owner: str | None) -> bool:
        """Return whether a client waits for as many pieces as it may."""
        return len(self._waiting.get(owner, ())) >= self._most_waiting

    async def take(self, owner: str | None, size: int = 1) -> None:
        """Wait until a client may hold more; the caller gives it back.

        Args:
            owner: the client.
            size: size of the piece.

        Raises:
            TimeoutError: the client waits for `most_waiting` pieces already.
        """
        if self.is_full(owner):
            raise TimeoutError
        queue = self._waiting.setdefault(owner, deque())
        turn = size, asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._admit()
        try:
            await turn[1]
        except BaseException:
            if turn[1].done() and not turn[1].cancelled():  # the turn came as the caller left
                self.give(owner, size)
            else:
                with suppress(ValueError):
                    queue.remove(turn)
                self._admit()
            raise

    def give(self, owner: str | None, size: int = 1) -> None:
        """Give a piece back, and admit those that fit now.

        Args:
            owner: the client.
            size: size of the piece.
        """
        self.held[owner] -= size
        self.total -= size
        if not self.held[owner]:
            del self.held[owner]
        self._admit()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a piece of size 1 on behalf of the present `OWNER` for a `with` statement."""
        owner = OWNER.get()
        await self.take(owner)
        try:
            yield
        finally:
            self.give(owner)

    def _admit(self) -> None:
        """Admit pieces that wait, one of each client after the other."""
        turns = deque(self._waiting)
        while turns and self.total < self._most:
            owner = turns.popleft()
            queue = self._waiting[owner]
            while queue and queue[0][1].done():  # its client left in the present pass of the event loop
                queue.popleft()
            if not queue:
                del self._waiting[owner]
            elif self._fits(owner, queue[0][0]):
                size, turn = queue.popleft()
                self.held[owner] += size
                self.total += size
                turn.set_result(None)
                self._waiting.move_to_end(owner)
                turns.append(owner)

    def _fits(self, owner: str | None, size: int) -> bool:
        fits_each = owner not in self.held or self.held[owner] + size <= self.most_each
        return fits_each and self.total + size <= self._most
