"""Index of the K/V that the workers hold."""

from __future__ import annotations

from collections import OrderedDict


class StoreIndex:
    """Keys of stored segments with their sizes, least recently used first.

    The scheduler's index alone decides what the workers keep: they add and drop exactly the segments they are told to.

    Args:
        max_bytes: bound of the stored K/V.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def keys(self) -> set[str]:
        """Return the keys of all stored segments."""
        return set(self._sizes)

    def touch(self, key: str) -> None:
        """Make a segment the most recently used one, if it is stored."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def add(self, key: str, num_bytes: int) -> bool:
        """Add a segment, or use it again, as the most recently used one.

        Returns:
            Whether it was added: False if it is stored already or exceeds the whole store.
        """
        self.touch(key)
        if key in self._sizes or num_bytes > self.max_bytes:
            return False
        self._sizes[key] = num_bytes
        self.num_bytes += num_bytes
        return True

    def evict(self) -> list[tuple[str, int]]:
        """Remove the least recently used segments until the rest fits.

        Returns:
            Key and size in bytes of every removed segment.
        """
        removed = []
        while self.num_bytes > self.max_bytes:
            key, num_bytes = self._sizes.popitem(last=False)
            self.num_bytes -= num_bytes
            removed.append((key, num_bytes))
        return removed

    def clear(self) -> list[str]:
        """Remove all segments and return their keys."""
        keys = list(self._sizes)
        self._sizes.clear()
        self.num_bytes = 0
        return keys
