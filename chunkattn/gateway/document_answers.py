"""Bodies of the requests and answers of `/v1/cache/documents` at a gateway."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from chunkattn.documents.records import DocumentRecord
from chunkattn.gateway.document_places import Answer
from chunkattn.web.errors import ApiError, api_error

_SHOWN_CHARS = 1024
"""Characters of a prefix that an entry shows while no replica can be asked."""

B = TypeVar("B", bound=BaseModel)


class RefusedError(Exception):
    """Refusal of a replica, which becomes the answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


async def settled(calls: Sequence[Any]) -> list[Any]:
    """Return results or errors of calls, all of which end, even if this call is cancelled."""
    return await asyncio.shield(asyncio.gather(*calls, return_exceptions=True))


def renumbered(answer: Answer, numbers: Sequence[int]) -> Answer:
    """Return a refusal whose text names documents by their places in the client's request."""

    def place(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"documents.{numbers[number]}" if number < len(numbers) else found[0]

    error = answer.body.get("error") if isinstance(answer.body, Mapping) else None
    if not isinstance(error, Mapping) or not isinstance(error.get("message"), str):
        return answer
    text = re.sub(r"documents\.(\d{1,9})", place, error["message"])
    return answer._replace(body={**answer.body, "error": {**error, "message": text}})


def entry(record: DocumentRecord, found: Mapping[str, Any], *, cached: bool, pinned: bool) -> dict[str, Any]:
    """Return the entry of a document.

    Args:
        record: record of the document.
        found: entry of the replica that stores it; empty if none can be asked.
        cached: whether the replica's cache holds it.
        pinned: whether it is pinned there.
    """
    content = record.prefix.content
    return {
        "id": record.id,
        "object": "cache.document",
        "created": int(record.created),
        "expires": record.expires,
        "tokens": record.tokens,
        "prefix": found.get("prefix", content[:_SHOWN_CHARS] if isinstance(content, str) else None),
        "prefix_tokens": record.prefix_tokens,
        "bytes": record.num_bytes,
        "cached": cached,
        "pinned": pinned,
    }


def unavailable(text: str) -> ApiError:
    """Return the answer to a request that no replica can serve now."""
    return ApiError(503, text, code="no_replica", **{"Retry-After": "1"})


def decoded(body: bytes) -> Any:
    """Return the value of a JSON body; None for an empty one.

    Raises:
        ApiError: 400, the body is malformed.
    """
    try:
        return json.loads(body or b"null")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def validated(kind: type[B], given: Any) -> B:
    """Return a validated body.

    Raises:
        ApiError: 400, a field is malformed.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise api_error(RequestValidationError(found), "") from None
