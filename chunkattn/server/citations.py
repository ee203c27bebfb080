"""Citations in answers, as objects of Cohere's chats with an index in every source."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chunkattn.answer_parsers.events import Content, Event
from chunkattn.outputs import Citation, CompletionOutput


class ContentPlaces:
    """Places in the content of an answer whose text also has reasoning and calls.

    Args:
        before: characters of the content before the generated text.
    """

    def __init__(self, before: int) -> None:
        self._size = before
        self._begins, self._shifts = list[int](), list[int]()

    def add(self, events: Iterable[Event]) -> None:
        """Add events of the answer."""
        for event in events:
            if isinstance(event, Content):
                self._begins.append(event.begin)
                self._shifts.append(self._size - event.begin)
                self._size += len(event.text)

    def shift(self, place: int) -> int | None:
        """Return what is added to a place in the text; None for a place before the content, such as in the reasoning."""
        found = bisect_right(self._begins, place) - 1
        return self._shifts[found] if found >= 0 else None


def cited_fields(sample: CompletionOutput, shift: Callable[[int], int | None]) -> dict[str, Any]:
    """Return the field `citations` of a choice, a message or a delta; no field without citations.

    Args:
        sample: the sample, or what it has gained.
        shift: function from a place in the generated text to what is added to it in the answer; None for a place that the
            answer does not have, whose citation is left out.
    """
    return {} if sample.citations is None else {"citations": _objects(sample.citations, shift)}


def _objects(citations: Sequence[Citation], shift: Callable[[int], int | None]) -> list[dict[str, Any]]:
    """Return citations as JSON objects; see `cited_fields`."""
    return [
        {
            "start": citation.start + added,
            "end": citation.end + added,
            "text": citation.text,
            "sources": [{"type": "document", "id": source.id, "index": source.index} for source in citation.sources],
            "type": "TEXT_CONTENT",
        }
        for citation in citations
        if (added := shift(citation.start)) is not None
    ]
