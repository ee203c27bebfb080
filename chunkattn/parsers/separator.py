"""Search for separators in token ids, and splitting at separators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def find_ids(ids: Sequence[int], separator: Sequence[int]) -> Iterator[int]:
    """Yield the start indices of non-overlapping leftmost matches of `separator`.

    Args:
        ids: token ids to search.
        separator: token ids of the separator.

    Raises:
        ValueError: the separator is empty.

    >>> list(find_ids([1, 9, 9, 9, 2], [9, 9]))
    [1]
    """
    if not separator:
        raise ValueError("separator must not be empty")
    ids, separator = list(ids), list(separator)
    at = 0
    while True:
        try:
            at = ids.index(separator[0], at)  # skips mismatches in C
        except ValueError:
            return
        if ids[at : at + len(separator)] == separator:
            yield at
            at += len(separator)
        else:
            at += 1


def split_ids(ids: Sequence[int], separator: Sequence[int]) -> list[list[int]]:
    """Split token ids at non-overlapping leftmost matches of `separator`.

    Args:
        ids: token ids to split.
        separator: token ids of the separator.

    >>> split_ids([1, 9, 9, 9, 2], [9, 9])
    [[1], [9, 2]]
    """
    ids = list(ids)
    begins = list(find_ids(ids, separator))
    ends = [begin + len(separator) for begin in begins]
    return [ids[first:last] for first, last in zip([0, *ends], [*begins, len(ids)], strict=True)]
