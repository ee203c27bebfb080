"""`StatementCutter`: content of an answer in blocks of Anthropic's form, whose citations support the whole block."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chunkattn.calls.cited_text import last_gap, statement_ends
from chunkattn.parsers.markers import MARKER

_BEHIND_SPAN = re.compile(rf"(?:\s*{MARKER})*\s*")
"""Text behind a cited span that belongs to its block: white space, and markers that the answer keeps."""
_KEPT = re.compile(MARKER)
"""Marker that the answer keeps: it belongs to the statement before it."""

END = None
Piece = str | Mapping[str, Any] | None
"""Text of the open block, a citation of its text, or `END` of the block."""


class StatementCutter:
    """Cutter of content into blocks, as it arrives: one for each statement, with the white space behind it.

    Statements are those of `CitedText`, so a block has the span of its citations, and no more than white space beside it.

    Args:
        begin: code points of the content before the first block.
    """

    def __init__(self, begin: int) -> None:
        self._begin, self._text, self._sent = begin, "", 0
        self._from = 0  # place in the block before which no statement ends
        self._cited: int | None = None  # end of the last cited span in the block

    def take(self, text: str, citations: Sequence[Mapping[str, Any]] = ()) -> Iterator[Piece]:
        """Yield the pieces of further content.

        Args:
            text: the content.
            citations: citations whose spans end in it, or before it and in the open block.
        """
        self._text += text
        waiting = [*citations]
        while True:
            cut = self._cut()
            if waiting and (cut is None or waiting[0]["end"] - self._begin <= cut):
                end = waiting[0]["end"] - self._begin
                self._cited = end if end > 0 else self._cited  # a marker before any statement cites the next one
                yield from self._up_to(end)
                yield waiting.pop(0)
            elif cut is not None:
                yield from self._up_to(cut)
                yield END
                self._begin += cut
                self._text, self._sent, self._from, self._cited = self._text[cut:], 0, 0, None
            else:
                yield from self._up_to(len(self._text))
                return

    def _up_to(self, place: int) -> Iterator[str]:
        """Yield the text of the block up to a place that was not yielded before."""
        if place > self._sent:
            yield self._text[self._sent : place]
            self._sent = place

    def _cut(self) -> int | None:
        """Return where the open block ends; None if further text may belong to it."""
        if self._cited is not None:
            behind = _BEHIND_SPAN.match(self._text, self._cited)
            place = max(self._cited if behind is None else behind.end(), self._sent)
            return place if place < len(self._text) else None
        for place in statement_ends(self._text, self._from):
            if _KEPT.match(self._text, place) is None:
                return max(place, self._sent)
            self._from = place
        self._from = last_gap(self._text, self._from)
        return None
