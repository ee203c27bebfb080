"""Ids of stored documents in request bodies, and the texts that take their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from chunkattn.adapter_salt import salted
from chunkattn.documents.records import DocumentRecord
from chunkattn.schema.parts import MALFORMED, Route, route_of, stored_id
from chunkattn.web.errors import ApiError

_BYTES_PER_ID = 6
"""Bytes of a token id in JSON, about."""

Find = Callable[[str, str], DocumentRecord]
"""Function that returns the record of an id at a place in the body, or raises `ApiError`."""


def salt_of(path: str, body: Mapping[str, Any], adapters: Collection[str]) -> str | None:
    """Return the cache salt that a request gives, with the adapter that it names, or None.

    Args:
        path: path of the request.
        body: decoded JSON body.
        adapters: names of the replicas' adapters.
    """
    route, model = route_of(path), body.get("model")
    salt = None if route is None else route.salt(body)
    return salted(model if isinstance(model, str) and model in adapters else None, salt)


def bytes_of_ids(path: str, body: Mapping[str, Any], find: Find) -> int:
    """Return the bytes that `with_texts` adds to a body, about. Nothing is built for that.

    Args:
        path: path of the request.
        body: decoded JSON body.
        find: returns the record of an id.

    Raises:
        ApiError: 404, no document has an id.
    """
    route, ids = _ids_of(path, body)
    places = {name: _place(route, number) for number, name in reversed(ids.items())}
    return sum(count * _num_bytes(find(name, places[name])) for name, count in Counter(ids.values()).items())


def _num_bytes(record: DocumentRecord) -> int:
    return len(record.document) * (1 if isinstance(record.document, str) else _BYTES_PER_ID)


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
    route, ids = _ids_of(path, body)
    if route is None or not ids:
        return body
    documents, cites = [*route.documents(body)], _cites(route, body)
    for number, name in ids.items():
        place = _place(route, number)
        documents[number] = _content(find(name, place), place, route, body, cites=cites)
    return route.with_documents(body, documents)


def _ids_of(path: str, body: Mapping[str, Any]) -> tuple[Route | None, dict[int, str]]:
    """Return the route of a path, and the ids of the documents that a body names by id, by their place."""
    route = route_of(path)
    if route is None or route.named is None or (route.named == "ranked" and "id" in _rank_fields(body)):
        return route, {}
    ids = {number: name for number, document in enumerate(route.documents(body)) if (name := stored_id(document)) is not None}
    return route, ids


def _place(route: Route | None, number: int) -> str:
    return ".".join([*(route.place if route else ()), str(number)])


def _cites(route: Route, body: Mapping[str, Any]) -> bool:
    """Return whether the answer to a body cites documents. The replica refuses a malformed body."""
    try:
        return route.chat(body).get("citations") not in (None, False)
    except MALFORMED:
        return False


def _rank_fields(body: Mapping[str, Any]) -> list[Any]:
    names = body.get("rank_fields")
    return names if isinstance(names, list) else []


def _content(record: DocumentRecord, place: str, route: Route, body: Mapping[str, Any], *, cites: bool) -> Any:
    """Return what takes the place of an id.

    Raises:
        ApiError: 400, the route cannot take the document in this form.
    """
    source = record.source
    if route.named == "content" and not cites:
        return source
    if not isinstance(source, str):
        taker = "an answer with citations" if cites else "this route"
        text = f"{place}: the document {record.id!r} is stored as token ids, and behind a gateway {taker} takes texts alone"
        raise ApiError(400, text, param="documents", code="invalid_value")
    if route.named == "content":
        return {"id": record.id if record.cite_as is None else record.cite_as, "text": source}
    if route.named == "text":
        return source
    match _rank_fields(body):
        case []:
            return {"id": record.id, "text": source}
        case [str(field)]:
            return {"id": record.id, field: source}
    text = f"{place} names a stored document, which has no fields; with several rank_fields send the document itself"
    raise ApiError(400, text, param="documents", code="invalid_value")
