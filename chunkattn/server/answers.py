"""JSON responses. Large bodies are encoded in a thread, so the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Response

_LARGE = 4096
"""Number of values above which an answer is encoded in a thread."""
_PIECE = 16_384
"""Values encoded per call. The encoder holds the GIL for one call, and the event loop waits for the GIL."""


class JsonResponse(Response):
    """JSON response encoded by msgspec, several times as fast as `json`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body as UTF-8 JSON."""
        return msgspec.json.encode(content)


async def json_answer(body: dict[str, Any], values: int) -> Response:
    """Return a JSON response; encode a large body in a thread.

    Args:
        body: content of the answer.
        values: approximate count of numbers in `body`; more than 4096 select the thread.
    """
    if values <= _LARGE:
        return JsonResponse(body)

    def build() -> Response:
        return JsonResponse({name: _in_pieces(v) if isinstance(v, list) else v for name, v in body.items()})

    return await asyncio.to_thread(build)


def _in_pieces(rows: Sequence[Any]) -> msgspec.Raw:
    """Encode a list in pieces of at most `_PIECE` values each."""
    width = max(1, len(rows[0])) if rows and isinstance(rows[0], list) else 1
    step = max(1, _PIECE // width)
    parts = [msgspec.json.encode(rows[n : n + step])[1:-1] for n in range(0, len(rows), step)]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
