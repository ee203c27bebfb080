"""Buckets: the few array sizes that steps are padded to, so that few programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

TRIM_FROM = 512
"""Rows below which `trimmed` leaves a step alone: smaller steps all take about as long as reading the weights."""


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
    """Return the smallest bucket that holds `size`."""
    return next(s for s in sizes if s >= size)


def trimmed(tokens: int, sizes: Sequence[int]) -> int:
    """Return how many of `tokens` a step should compute: a bucket less than three quarters full is mostly padding.

    Args:
        tokens: number of tokens that can run in the step.
        sizes: buckets, ascending.

    >>> trimmed(1100, (512, 1024, 2048)), trimmed(1600, (512, 1024, 2048))
    (1024, 1600)
    """
    tokens = min(tokens, sizes[-1])
    size = bucket_for(tokens, sizes)
    smaller = max((s for s in sizes if s < size), default=0)
    return smaller if smaller >= TRIM_FROM and 4 * tokens < 3 * size else tokens
