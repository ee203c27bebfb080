"""`StepSizes`: the few numbers of rows that steps are padded to, and how tokens are cut into them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from chunkattn.backends.base import AttentionBackend

SMALLEST_STEP = 8
"""Rows of the smallest step, unless the attention backend has a smaller one."""


def buckets(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Return array sizes from `smallest` by `factor` up to exactly `largest`.

    >>> buckets(8, 100, 4)
    (8, 32, 100)
    """
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return (*sizes, largest)


def bucket_for(size: int, sizes: Sequence[int]) -> int:
    """Return the smallest of ascending buckets that holds `size`."""
    return sizes[bisect_left(sizes, size)]


@dataclass(frozen=True)
class StepSizes:
    """Sizes of an engine's steps.

    Attributes:
        buckets: sizes `T` of a step's arrays, ascending, each twice the one before except the first and the last.
        step_rows: see `AttentionBackend`.
    """

    buckets: tuple[int, ...]
    step_rows: int

    @classmethod
    def of(cls, backend: AttentionBackend, most: int, *, one_size: bool = False) -> StepSizes:
        """Return the sizes of an engine's steps.

        Args:
            backend: attention backend of the engine.
            most: maximum number of rows of a step.
            one_size: whether all steps have the largest size.
        """
        sizes = buckets(SMALLEST_STEP, max(most, SMALLEST_STEP), 2)
        if backend.smallest_step < SMALLEST_STEP:
            sizes = (backend.smallest_step, *sizes)
        return cls(sizes[-1:] if one_size else sizes, backend.step_rows)

    def trimmed(self, tokens: int) -> int:
        """Return how many of `tokens` a step should compute, so that padding and further steps take least.

        Args:
            tokens: number of tokens that can run in the step.

        >>> sizes = StepSizes((512, 1024, 2048), step_rows=256)
        >>> sizes.trimmed(1100), sizes.trimmed(1600)
        (1024, 1600)
        """
        tokens = min(tokens, self.buckets[-1])
        place = bisect_left(self.buckets, tokens)
        return tokens if self._rows_of(tokens) == self.buckets[place] else self.buckets[place - 1]

    def cut(self, tokens: int) -> list[int]:
        """Return the sizes of the steps that compute `tokens` tokens and nothing else.

        >>> StepSizes((512, 1024, 2048), step_rows=256).cut(3000)
        [2048, 1024]
        """
        whole, tokens = divmod(tokens, self.buckets[-1])  # `trimmed` fills steps of the largest size first
        sizes = [self.buckets[-1]] * whole
        while tokens > 0:
            taken = self.trimmed(tokens)
            sizes.append(bucket_for(taken, self.buckets))
            tokens -= taken
        return sizes

    def _rows_of(self, tokens: int) -> int:
        """Return the rows that `tokens` take, padding included, and `step_rows` for every step but one."""
        place = bisect_left(self.buckets, tokens)
        size, smaller = self.buckets[place], self.buckets[place - 1] if place else 0
        return min(size, smaller + self.step_rows + self._rows_of(tokens - smaller)) if smaller else size
