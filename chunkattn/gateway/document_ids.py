"""Ids of stored documents in request bodies, and the texts that take their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chunkattn.documents.records import DocumentRecord
from chunkattn.web.errors import ApiError
from chunkattn.web.paths import RERANK_PATHS

_CHUNKS = ("/v1/completions", "/inspect")
_DOCUMENTS = ("/v1/chat/completions", "/v1/decisions", "/v1/systemone")
_PAIRS = ("/v1/score", "/score")

Find = Callable[[str, str], DocumentRecord]
"""Function that returns the record of an id at a place in the body, or raises `ApiError`."""


def salt_of(path: str, body: Mapping[str, Any]) -> str | None:
    """Return the cache salt that a request gives, or None.

    Args:
        path: path of the request.
        body: decoded JSON body.
    """
    names = ("cache_salt", "prompt_cache_key") if path.endswith("/v1/decisions") else ("cache_salt",)
    found = next((body[name] for name in names if body.get(name) is not None), None)
    return found if isinstance(found, str) else None


def with_texts(path: str, body: Mapping[str, Any], find: Find) -> Mapping[str, Any]:
    """Return a body in which the contents of stored documents have taken the places of their ids.

    A body without ids is returned as it is, and so is a malformed one: the replica answers with the proper error.

    Args:
        path: path of the request.
        body: decoded JSON body.
        find: returns the record of an id.

    Raises:
        ApiError: 404, no document has an id; 400, the route cannot take the document in this form.
    """
    if path.endswith(_CHUNKS):
        chunks = body.get("chunks")
        if not isinstance(chunks, Mapping):
            return body
        documents = _replaced(chunks.get("documents"), find, "chunks.documents", _content)
        return body if documents is None else {**body, "chunks": {**chunks, "documents": documents}}
    if path.endswith(_DOCUMENTS):
        make = _content
    elif path.endswith(RERANK_PATHS):
        fields = body.get("rank_fields")
        if isinstance(fields, list) and "id" in fields:
            return body

        def make(record: DocumentRecord, place: str) -> Any:
            return _ranked(record, place, fields)

    elif path.endswith(_PAIRS):
        make = _text
    else:
        return body
    documents = _replaced(body.get("documents"), find, "documents", make)
    return body if documents is None else {**body, "documents": documents}


def _replaced(given: Any, find: Find, field: str, make: Callable[[DocumentRecord, str], Any]) -> Sequence[Any] | None:
    """Return documents without ids, or None if there is no id among them."""
    if not isinstance(given, list):
        return None
    named = {number: name for number, document in enumerate(given) if (name := _id_of(document)) is not None}
    if not named:
        return None
    documents = list(given)
    for number, name in named.items():
        place = f"{field}.{number}"
        record = find(name, place)
        documents[number] = make(record, place)
    return documents


def _id_of(document: Any) -> str | None:
    """Return the id of an object that holds an id alone."""
    if not isinstance(document, Mapping):
        return None
    given = {name for name, value in document.items() if value is not None}
    name = document.get("id")
    return name if given == {"id"} and isinstance(name, str) else None


def _content(record: DocumentRecord, place: str) -> Any:
    return record.source


def _text(record: DocumentRecord, place: str) -> str:
    source = record.source
    if isinstance(source, str):
        return source
    text = f"{place}: the document {record.id!r} is stored as token ids, and behind a gateway this route takes texts alone"
    raise ApiError(400, text, param="documents", code="invalid_value")


def _ranked(record: DocumentRecord, place: str, fields: Any) -> Any:
    text = _text(record, place)
    if not isinstance(fields, list) or not fields:
        return {"id": record.id, "text": text}
    if len(fields) == 1 and isinstance(fields[0], str):
        return {"id": record.id, fields[0]: text}
    text = f"{place} names a stored document, which has no fields; with several rank_fields send the document itself"
    raise ApiError(400, text, param="documents", code="invalid_value")
