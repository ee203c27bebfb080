"""The page pool: which pages are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from chunkattn.errors import OutOfPagesError


class PagePool:
    """Pages `0 ... num_pages - 1`, each free or held by one `Block`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page.

        Raises:
            OutOfPagesError: none is free.
        """
        if not self._free:
            raise OutOfPagesError(f"none of {self.num_pages} pages is free")
        return self._free.popleft()

    def release(self, page: int) -> None:
        """Give a page back."""
        self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Assert that every page is free or held, and none both or twice.

        Raises:
            AssertionError: a page is lost, free while held, or held twice.
        """
        assert sorted([*self._free, *held]) == list(range(self.num_pages)), "pages are lost, or both free and held"
