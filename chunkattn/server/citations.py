"""Citations in answers, as objects of Cohere's chats with an index in every source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chunkattn.outputs import Citation, CompletionOutput


def cited_fields(sample: CompletionOutput, shift: int) -> dict[str, Any]:
    """Return the field `citations` of a choice, a message or a delta; no field without citations.

    Args:
        sample: the sample, or what it has gained.
        shift: characters of the answer before the generated text.
    """
    return {} if sample.citations is None else {"citations": _objects(sample.citations, shift)}


def _objects(citations: Sequence[Citation], shift: int) -> list[dict[str, Any]]:
    """Return citations as JSON objects.

    Args:
        citations: citations of a generated text.
        shift: characters of the answer before the generated text.
    """
    return [
        {
            "start": citation.start + shift,
            "end": citation.end + shift,
            "text": citation.text,
            "sources": [{"type": "document", "id": source.id, "index": source.index} for source in citation.sources],
            "type": "TEXT_CONTENT",
        }
        for citation in citations
    ]
