"""The page pool: which pages are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from chunkattn.errors import OutOfPagesError


class PagePool:
    """Reference-counted pages `0 ... num_pages - 1`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one holder.

        Raises:
            OutOfPagesError: fewer are free.
        """
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of the pages, which must be held."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each of the pages; those without holders become free."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free and cannot be released")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert the pool's invariants against every sequence's pages.

        Raises:
            AssertionError: a page is both free and held, lost, or counted wrongly.
        """
        expected = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                expected[page] += 1
        assert self._holders == expected, "page holders do not match the sequences that hold them"
        assert sorted(self._free) == [p for p, n in enumerate(expected) if not n], "free list does not match the holders"
