"""Routing keys of a request: a 64-bit key for each piece whose K/V a replica may hold, from the JSON body alone."""

from __future__ import annotations

from typing import NamedTuple


class Keys(NamedTuple):
    """Pieces of a request, with their sizes in bytes of text.

    Attributes:
        pieces: key and size of each distinct piece that a replica may have cached, in the request's order.
        rest: size of what no replica can have cached, such as the question.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    rest: int = 0
