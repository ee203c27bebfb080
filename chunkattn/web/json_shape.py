"""`measure`: the number of values and the depth of a JSON text, without making objects of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkattn.fair_threads import check_wanted

_PIECE = 1 << 18
"""Bytes measured at once. The arrays of a piece take some 20 bytes for each byte of the text."""
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_OPEN, _CLOSE = b"[{", b"]}"


class Shape(NamedTuple):
    """Numbers that bound the time and the memory of decoding a JSON text.

    Attributes:
        containers: number of objects and arrays.
        strings: number of strings, names in objects included.
        values: number of commas outside strings, a bound on the values that are neither first nor alone in their container.
        depth: largest number of containers around a value.
    """

    containers: int
    strings: int
    values: int
    depth: int


def measure(text: bytes) -> Shape:
    """Return the shape of a JSON text in UTF-8. Malformed text has a shape, too.

    Args:
        text: the JSON text.

    Raises:
        AbandonedError: the caller has left.
    """
    containers = quotes = values = depth = deepest = 0
    in_string, escapes = False, False  # whether the piece begins within a string, and after an odd number of backslashes
    for start in range(0, len(text), _PIECE):
        check_wanted()
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - start), start)
        marks = piece == _QUOTE
        is_backslash = piece == _BACKSLASH
        if escapes or is_backslash.any():
            escaped, escapes = _escaped(is_backslash, escapes)
            marks &= ~escaped
        count = int(marks.sum())
        inside = np.bitwise_xor.accumulate(marks.view(np.uint8)).view(bool) ^ in_string
        in_string ^= bool(count % 2)
        quotes += count
        outside = ~inside
        values += int(((piece == _COMMA) & outside).sum())
        opened = ((piece == _OPEN[0]) | (piece == _OPEN[1])) & outside
        closed = ((piece == _CLOSE[0]) | (piece == _CLOSE[1])) & outside
        containers += int(opened.sum())
        levels = np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int32) + depth
        deepest, depth = max(deepest, int(levels.max(initial=0))), int(levels[-1])
    return Shape(containers, (quotes + 1) // 2, values, deepest)


def _escaped(is_backslash: np.ndarray, after: bool) -> tuple[np.ndarray, bool]:
    """Return which bytes follow an odd number of backslashes, and whether the byte after the last one does.

    Args:
        is_backslash: whether each byte is a backslash.
        after: whether an odd number of backslashes precedes the first byte.
    """
    places = np.arange(len(is_backslash), dtype=np.int32)
    # The last place up to here that holds no backslash; an odd run before the piece counts as one backslash at place -1.
    last = np.maximum.accumulate(np.where(is_backslash, np.int32(-2 if after else -1), places))
    run = places - last  # length of the run of backslashes that ends here
    odd = (run % 2).astype(bool)
    escaped = np.empty(len(odd), bool)
    escaped[0], escaped[1:] = after, odd[:-1]
    return escaped, bool(odd[-1])
