"""`CitedText`: an answer as it grows, without the markers of documents, and the citations in it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from chunkattn.outputs import Citation, CitationSource
from chunkattn.parsers.markers import MARKER, OPEN, Cited, name_of

_MARKER = re.compile(MARKER)
_SPACES = " \t"
"""White space before a marker that belongs to it."""
_GAP = re.compile(r"""(?P<end>[.!?]["')\]]*+(?=\s)|[\u3002\uff01\uff1f])\s*+|\s++""")
"""End of a sentence, if any, and the whole run of white space behind it: a search passes each run once."""


def statement_ends(text: str, begin: int) -> Iterator[int]:
    """Yield the places where a statement follows the end of a sentence or line, in time linear in the text.

    Args:
        text: the text.
        begin: place from which it is read.
    """
    for gap in _GAP.finditer(text, begin):
        if gap.end() < len(text) and (gap["end"] or "\n" in gap[0]):
            yield gap.end()


def last_gap(text: str, begin: int) -> int:
    """Return where the end of a text begins that further text may make the end of a statement.

    Args:
        text: the text.
        begin: place from which it is read.
    """
    words = text[begin:].rstrip()
    sentence = words.rstrip("\"')]")
    if sentence.endswith((".", "!", "?")):
        words = sentence[:-1]
    elif words.endswith(("\u3002", "\uff01", "\uff1f")):
        words = words[:-1]
    return begin + len(words)


class CitedText:
    """Text and citations of one answer, which is read as it grows.

    The end of an unfinished text is held back while it may become a marker, or may be the space before one. A marker that the
    end of the text cuts is left out.

    Args:
        cited: documents of the prompt.
        shown: numbers of the documents that the prompt shows; None for all.

    Attributes:
        text: characters of the answer that are settled, without markers unless they are kept.
        citations: citations that no later text changes.
    """

    def __init__(self, cited: Cited, shown: Iterable[int] | None = None) -> None:
        self._numbers, self._keep = cited.numbers(shown), cited.options.keep_markers
        self._names = {marker: cited.ids[number] or name_of(marker) for marker, number in self._numbers.items()}
        self._sorted = sorted(self._numbers)
        self._begin()

    def _begin(self) -> None:
        self.text, self.citations = "", list[Citation]()
        self._done, self._after = 0, 0  # characters of the answer that were read; end of the last marker's statement in `text`
        self._open: Citation | None = None  # another marker may follow

    def read(self, answer: str, *, ended: bool) -> None:
        """Read an answer that has grown. A stop string may have cut its end.

        Args:
            answer: the answer so far, with markers.
            ended: whether it is complete.
        """
        if len(answer) < self._done:
            self._begin()
        rest = answer[self._done :]
        held = len(rest) - self._held(rest)
        place = 0
        for match in _MARKER.finditer(rest, 0, held if not ended else len(rest)):
            if (number := self._numbers.get(match[0])) is None:
                continue
            before = rest[place : match.start()].rstrip(_SPACES)
            self._add(before)
            self._cite(match[0], number)
            if self._keep:
                self.text += rest[place + len(before) : match.end()]
                self._after = len(self.text)
            place = match.end()
        end = held
        if ended and not rest[held:].lstrip(_SPACES).startswith(OPEN):
            end = len(rest)
        self._add(rest[place:end])
        self._done += end
        if ended:
            self._close()

    def _held(self, rest: str) -> int:
        """Return the number of characters at the end that may become a marker, with the spaces before it."""
        begin = rest.rfind(OPEN[0])
        if begin < 0 or not self._may_become_marker(rest[begin:]):
            begin = len(rest)
        return len(rest) - len(rest[:begin].rstrip(_SPACES))

    def _may_become_marker(self, text: str) -> bool:
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text) and self._sorted[place] != text

    def _add(self, text: str) -> None:
        """Add text that holds no marker."""
        if text:
            self._close()
            self.text += text

    def _cite(self, marker: str, number: int) -> None:
        source = CitationSource(self._names[marker], number)
        if self._open is not None:
            if source not in self._open.sources:
                last = self._open
                self._open = Citation(last.start, last.end, last.text, (*last.sources, source))
            return
        begin, end = self._after, len(self.text)
        for place in statement_ends(self.text, begin):
            begin = place
        begin += len(self.text[begin:]) - len(self.text[begin:].lstrip())
        end = max(begin, len(self.text.rstrip()))
        if begin == end and self.citations:  # markers on a line of their own
            begin, end = self.citations[-1].start, self.citations[-1].end
        self._open = Citation(begin, end, self.text[begin:end], (source,))
        self._after = len(self.text)

    def _close(self) -> None:
        if self._open is not None:
            self.citations.append(self._open)
            self._open = None
