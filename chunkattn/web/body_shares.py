"""`BodyShares`: the bytes of request bodies that each client may hold in memory at once."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

MOST_WAITING = 128
"""Requests of one client that wait at once. Each has up to 128 KiB of its body in the connection's buffer."""


class BodyShares:
    """Bytes of bodies held by each client. A request beyond its client's share waits, before its body is read.

    Args:
        most: number of bytes that one client may hold at once. A single body may exceed it, when it is the only one.

    Attributes:
        held: bytes held now, by client.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def take(self, owner: str | None, size: int) -> None:
        """Wait until a client may hold more bytes; the caller gives them back.

        Args:
            owner: the client.
            size: number of bytes.

        Raises:
            TimeoutError: `MOST_WAITING` requests of the client wait already.
        """
        if owner not in self._waiting and self._fits(owner, size):
            self.held[owner] += size
            return
        if len(self._waiting.get(owner, ())) >= MOST_WAITING:
            raise TimeoutError
        turn = size, asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn[1]
        except BaseException:
            if turn[1].done() and not turn[1].cancelled():  # the turn came as the caller left
                self.give(owner, size)
            else:
                if turn in (queue := self._waiting.get(owner, deque())):
                    queue.remove(turn)
                self._admit(owner)
            raise

    def give(self, owner: str | None, size: int) -> None:
        """Give bytes back, and admit the requests that fit now, in the order of their arrival.

        Args:
            owner: the client.
            size: number of bytes.
        """
        self.held[owner] -= size
        self._admit(owner)
        if not self.held[owner]:
            del self.held[owner]

    def _fits(self, owner: str | None, size: int) -> bool:
        return not self.held[owner] or self.held[owner] + size <= self.most

    def _admit(self, owner: str | None) -> None:
        queue = self._waiting.get(owner)
        while queue and (queue[0][1].done() or self._fits(owner, queue[0][0])):
            size, turn = queue.popleft()
            if not turn.done():  # else its client left in the present pass of the event loop
                self.held[owner] += size
                turn.set_result(None)
        if queue is not None and not queue:
            del self._waiting[owner]
