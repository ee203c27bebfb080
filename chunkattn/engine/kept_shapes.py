"""`KeptShapes`: values of the shapes of texts that were used last."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from chunkattn.structured_outputs import StructuredOutputsParams

T = TypeVar("T")

MOST = 64
"""Shapes that are kept."""
MOST_CHARS = 1 << 19
"""Characters of the shapes that are kept. A compiled schema took up to 270 bytes of memory for each, of 35 that were tried."""


class KeptShapes(Generic[T]):
    """Values of the shapes that were used last: at most `MOST`, and of at most `MOST_CHARS` characters together.

    An engine and the checker of its shapes both keep theirs in this way, so a shape is checked before it is compiled again.
    """

    def __init__(self) -> None:
        self._values: OrderedDict[StructuredOutputsParams, T] = OrderedDict()
        self._chars = 0

    def get(self, shape: StructuredOutputsParams) -> T | None:
        """Return the value of a shape, which is used now; None if it is not kept."""
        if (value := self._values.get(shape)) is not None:
            self._values.move_to_end(shape)
        return value

    def put(self, shape: StructuredOutputsParams, value: T) -> None:
        """Keep the value of a shape, which is not None, and drop the values used longest ago."""
        if shape not in self._values:
            self._chars += _chars(shape)
        self._values[shape] = value
        self._values.move_to_end(shape)
        while len(self._values) > MOST or self._chars > MOST_CHARS:
            self._chars -= _chars(self._values.popitem(last=False)[0])


def _chars(shape: StructuredOutputsParams) -> int:
    texts = (shape.regex, shape.grammar, None if shape.json is None else str(shape.json), *(shape.choice or ()))
    return sum(len(text) for text in texts if text is not None)
