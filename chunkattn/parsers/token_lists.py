"""`TokenLists`: lists of token ids, with their lengths and their ids in arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain

import numpy as np


class TokenLists(list[list[int]]):
    """Lists of token ids that fit int32 and stay as they are. Their arrays are made once for all who read them.

    Args:
        lists: the lists.
        flat: their ids in one array, int32 `[T]`, if it is there; None makes it when it is read.
    """

    def __init__(self, lists: Iterable[list[int]] = (), flat: np.ndarray | None = None) -> None:
        super().__init__(lists)
        if flat is not None:
            self.flat = flat

    @classmethod
    def of(cls, lists: Sequence[list[int]]) -> TokenLists:
        """Return lists of token ids as `TokenLists`.

        Args:
            lists: the lists.
        """
        return lists if isinstance(lists, cls) else cls(lists)

    @cached_property
    def lens(self) -> list[int]:
        """Return the length of each list."""
        return [*map(len, self)]

    @cached_property
    def flat(self) -> np.ndarray:
        """Return the ids of all lists in one array, int32 `[T]`."""
        return np.fromiter(chain.from_iterable(self), np.int32, sum(self.lens))

    @cached_property
    def encoded(self) -> list[bytes]:
        """Return the ids of each list as the bytes of int32 numbers."""
        data, size = self.flat.tobytes(), self.flat.itemsize
        return [data[size * start : size * end] for start, end in zip(self._ends, self._ends[1:], strict=False)]

    def joined(self, places: Sequence[int]) -> np.ndarray:
        """Return the ids of some lists in one array, int32 `[T]`.

        Args:
            places: ascending places of the lists.
        """
        if not places:
            return self.flat[:0]
        if places[-1] - places[0] == len(places) - 1:
            return self.flat[self._ends[places[0]] : self._ends[places[-1] + 1]]
        return np.concatenate([self.flat[self._ends[place] : self._ends[place + 1]] for place in places])

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.lens)]
