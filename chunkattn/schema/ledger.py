"""`Ledger`: what a replica was sent, and which of it its engine still held when it was last asked; the source of reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")

_ENTRY_BYTES = 512
"""Memory of an entry beside its source."""
_MOST_GONE = 1 << 16


@dataclass
class _Entry(Generic[S]):
    size: int
    source: S
    noted: int = 0
    asked: int = 0
    found: int = 0


class Ledger(Generic[S]):
    """Bounded record of the pieces that a replica was sent by all gateways, the least recently sent first out.

    The engine is asked in turns: `batch` returns the pieces to ask for next, `found` takes each answer, and `snapshot` returns
    all answers, or those since an earlier version.

    Args:
        capacity_bytes: limit on the memory of all entries. The size of a piece counts as the size of its source.

    Attributes:
        version: number of the last change; pass it to `snapshot` for what has changed since.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._used = 0
        self.version = 0
        self._entries: OrderedDict[int, _Entry[S]] = OrderedDict()
        self._turns: OrderedDict[int, None] = OrderedDict()  # keys in the order in which they are asked for
        self._held: OrderedDict[int, None] = OrderedDict()  # keys in the order of their last answers
        self._gone: OrderedDict[int, int] = OrderedDict()  # version by key, in the order of the answers

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, pieces: Iterable[tuple[int, int]], sources: Iterable[S]) -> None:
        """Record the pieces of a request.

        Args:
            pieces: key and size of each piece.
            sources: for each piece, what it takes to ask the engine for it.
        """
        for (key, size), source in zip(pieces, sources, strict=True):
            self.version += 1
            before = self._entries.pop(key, None)
            self._used += size - before.size if before else size + _ENTRY_BYTES
            self._entries[key] = _Entry(size, source, self.version, 0, before.found if before else 0)
            self._turns.setdefault(key)
            self._gone.pop(key, None)
        while self._used > self._capacity and self._entries:
            self._drop(next(iter(self._entries)))

    def batch(self, most: int) -> list[tuple[int, S]]:
        """Return key and source of the pieces to ask the engine for next, each at most once.

        Args:
            most: limit on the number of pieces.
        """
        keys = [self._turns.popitem(last=False)[0] for _ in range(min(most, len(self._turns)))]
        self._turns.update(dict.fromkeys(keys))
        for key in keys:
            self._entries[key].asked = self.version
        return [(key, self._entries[key].source) for key in keys]

    def found(self, key: int, held: bool) -> None:
        """Record the engine's answer for a piece of `batch`. A piece that was sent again since then is not gone.

        Args:
            key: key of the piece.
            held: whether the engine holds it in memory.
        """
        entry = self._entries.get(key)
        if entry is None or (not held and entry.noted > entry.asked):
            return
        self.version += 1
        if held:
            entry.found = self.version
            self._held[key] = None
            self._held.move_to_end(key)
            return
        self._drop(key)
        self._gone[key] = self.version
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)

    def snapshot(self, since: int = 0) -> tuple[dict[int, int], set[int]]:
        """Return the pieces that the engine held when it was last asked, with their sizes, and the keys of those it did not.

        Args:
            since: version after which the engine was asked; 0, or a version of another ledger, returns all.
        """
        since = since if since <= self.version else 0
        held, gone = {}, set()
        for key in reversed(self._held):
            if self._entries[key].found <= since:
                break
            held[key] = self._entries[key].size
        for key, version in reversed(self._gone.items()):
            if version <= since:
                break
            gone.add(key)
        return held, gone

    def clear(self) -> None:
        """Drop everything: the engine has restarted."""
        self._used = 0
        for record in (self._entries, self._turns, self._held, self._gone):
            record.clear()

    def _drop(self, key: int) -> None:
        self._used -= self._entries.pop(key).size + _ENTRY_BYTES
        self._turns.pop(key, None)
        self._held.pop(key, None)
