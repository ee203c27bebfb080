"""Citations in answers, as objects of Cohere's chats with an index in every source, and the documents that they name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from chunkattn.answer_parsers.events import Content, Event
from chunkattn.documents.record import DocumentRecord
from chunkattn.outputs import Citation
from chunkattn.schema.generation import DocumentOrId
from chunkattn.server.texts import TokenTexts

Place = Callable[[Citation], tuple[int, str] | None]
"""Function that returns where the span of a citation begins in the answer, and its text there; None if it has none there."""


class ContentPlaces:
    """Places in the content of an answer whose text also has reasoning and calls.

    Args:
        before: characters of the content before the generated text.
    """

    def __init__(self, before: int) -> None:
        self._size, self._end = before, 0
        self._begins, self._pieces = list[int](), list[tuple[str, int]]()  # in the text; each with its place in the content
        self._waiting: list[Citation] = []

    def add(self, events: Iterable[Event]) -> None:
        """Add events of the answer."""
        for event in events:
            if isinstance(event, Content):
                self._begins.append(event.begin)
                self._pieces.append((event.text, self._size))
                self._size += len(event.text)
                self._end = event.begin + len(event.text)

    def settled(self, citations: Sequence[Citation] | None, *, ended: bool) -> list[Citation]:
        """Return the citations, new and pending, whose spans are complete.

        Args:
            citations: further citations of the text.
            ended: whether the content is complete.
        """
        self._waiting += citations or ()
        count = 0
        while count < len(self._waiting) and (ended or (self._begins and self._waiting[count].end <= self._end)):
            count += 1
        found, self._waiting = self._waiting[:count], self._waiting[count:]
        return found

    def place(self, citation: Citation) -> tuple[int, str] | None:
        """Return where the span of a citation begins in the content, and its text there; see `Place`.

        Reasoning and calls within the span are left out. None for a span without any content.
        """
        first = bisect_right(self._begins, citation.start) - 1
        if citation.start == citation.end:  # a marker before any statement
            return (self._pieces[first][1] + citation.start - self._begins[first], "") if first >= 0 else None
        first, place, texts = max(first, 0), 0, list[str]()
        for begin, (text, at) in zip(self._begins[first:], self._pieces[first:]):
            if begin >= citation.end:
                break
            if part := text[max(citation.start - begin, 0) : citation.end - begin]:
                place = place if texts else at + max(citation.start - begin, 0)
                texts.append(part)
        return (place, "".join(texts)) if texts else None


def citation_objects(citations: Iterable[Citation], place: Place) -> list[dict[str, Any]]:
    """Return citations as JSON objects.

    Args:
        citations: citations of the generated text.
        place: place of each in the answer. Those without a place are left out.
    """
    return [
        {
            "start": found[0],
            "end": found[0] + len(found[1]),
            "text": found[1],
            "sources": [{"type": "document", "id": source.id, "index": source.index} for source in citation.sources],
            "type": "TEXT_CONTENT",
        }
        for citation in citations
        if (found := place(citation)) is not None
    ]


class CitedDocument(NamedTuple):
    """Document as citations of other APIs show it.

    Attributes:
        text: its text.
        id: its id; None without one.
        title: its title; None without one.
        num_blocks: number of content blocks that it was given as; None for one text.
    """

    text: str
    id: str | None = None
    title: str | None = None
    num_blocks: int | None = None


Documents = Callable[[int], CitedDocument]
"""Function from the number of a document in a request to the document."""


def documents_of(given: Sequence[Any], stored: Mapping[int, DocumentRecord], texts: TokenTexts) -> Documents:
    """Return the function from the number of a document to what citations show. It decodes each document once.

    Args:
        given: documents of a request.
        stored: records of those that it names by id.
        texts: texts of token ids.
    """

    @cache
    def document(number: int) -> CitedDocument:
        one = given[number]
        if (record := stored.get(number)) is not None:
            name = record.id if record.cite_as is None else record.cite_as
            return CitedDocument(record.source if isinstance(record.source, str) else texts.whole(record.source), name)
        if isinstance(one, DocumentOrId):
            return CitedDocument(one.text or "", one.id, one.title)
        return CitedDocument(one if isinstance(one, str) else texts.whole(one))

    return document
