"""Separators between prefix, chunks and question."""

from __future__ import annotations

from collections.abc import Sequence


def split_ids(ids: Sequence[int], separator: Sequence[int]) -> list[list[int]]:
    """Cut token ids at non-overlapping leftmost matches of `separator`.

    >>> split_ids([1, 9, 9, 9, 2], [9, 9])
    [[1], [9, 2]]
    """
    if not separator:
        raise ValueError("separator must not be empty")
    parts, start, i = [], 0, 0
    ids, separator = list(ids), list(separator)
    while i <= len(ids) - len(separator):
        if ids[i : i + len(separator)] == separator:
            parts.append(ids[start:i])
            start = i = i + len(separator)
        else:
            i += 1
    return [*parts, ids[start:]]
