"""The page pool, which tracks the free pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from chunkattn.errors import OutOfPagesError


class PagePool:
    """Page numbers `0 ... num_pages - 1`, each free or held by one `Block`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """Take a free page and return its number.

        Raises:
            OutOfPagesError: no page is free.
        """
        if not self._free:
            raise OutOfPagesError(f"none of {self.num_pages} pages is free")
        return self._free.popleft()

    def release(self, page: int) -> None:
        """Return a page to the pool."""
        self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Assert that every page is either free or held, exactly once.

        Raises:
            AssertionError: a page is lost, free while held, or held twice.
        """
        assert sorted([*self._free, *held]) == list(range(self.num_pages)), "pages are lost, or both free and held"
