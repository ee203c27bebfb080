"""`Holdings`: the pieces that one replica probably holds, from what it was sent."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

_serials = count()


class Holdings:
    """Record of the pieces that one replica was sent, the least recently sent first out.

    The record errs little against the replica's own cache, which evicts in the same order, as long as it assumes the right
    capacity.

    Args:
        name: the replica.
        where: names of the holders of each piece, the least recently sent first; all replicas share it.
        most_pieces: limit on the number of pieces.

    Attributes:
        name: the replica.
        capacity: bytes of the pieces that the replica's cache holds.
        most_pieces: limit on the number of pieces.
        size: bytes of the recorded pieces.
        serial: number of this record. A replica that left and came back has another record.
        work: bytes queued at the replica.
    """

    def __init__(self, name: str, where: dict[int, dict[str, None]], most_pieces: int) -> None:
        self.name, self._where, self.most_pieces = name, where, most_pieces
        self.capacity: float = math.inf
        self.size = self.work = 0
        self.serial = next(_serials)
        self._pieces: OrderedDict[int, tuple[int, float]] = OrderedDict()  # size and time of each

    def __contains__(self, key: int) -> bool:
        return key in self._pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def missing(self, pieces: Iterable[tuple[int, int]]) -> int:
        """Return the bytes of the pieces that are not recorded.

        Args:
            pieces: key and size of each piece.
        """
        return sum([size for key, size in pieces if key not in self._pieces])

    def add(self, pieces: Iterable[tuple[int, int]], now: float) -> None:
        """Record pieces as used now, and drop the oldest beyond the capacity.

        Args:
            pieces: key and size of each piece, the last to be evicted last.
            now: time of the use.
        """
        for key, size in pieces:
            before = self._pieces.pop(key, None)
            self._pieces[key] = size, now
            self.size += size - (before[0] if before else 0)
            holders = self._where.setdefault(key, {})
            holders.pop(self.name, None)
            holders[self.name] = None
        self.shrink()

    def shrink(self) -> None:
        """Drop the oldest pieces beyond the capacity."""
        while self._pieces and (self.size > self.capacity or len(self._pieces) > self.most_pieces):
            self.forget(next(iter(self._pieces)))

    def forget(self, key: int, unless_after: float = math.inf) -> None:
        """Drop a piece, if it is recorded.

        Args:
            key: key of the piece.
            unless_after: a piece that was sent after this time stays.
        """
        if key not in self._pieces or self._pieces[key][1] > unless_after:
            return
        self.size -= self._pieces.pop(key)[0]
        holders = self._where[key]
        del holders[self.name]
        if not holders:
            del self._where[key]

    def clear(self) -> None:
        """Drop all pieces: the replica's engine has restarted, or the replica is gone."""
        for key in list(self._pieces):
            self.forget(key)
