"""Routes of `/v1/cache`: documents stored ahead of use, by id and salt, and contents that are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.routing import APIRoute

from chunkattn.documents.keeper import Kept
from chunkattn.documents.records import DocumentRecord, Scope
from chunkattn.documents.registry import Registry
from chunkattn.schema.documents import CacheBody, ChangeBody, ForgetBody
from chunkattn.web.errors import ApiError
from chunkattn.web.time_limit import unless_gone

DOCUMENTS = "/v1/cache/documents"
FORGET = "/v1/cache/forget"


async def _registry(request: Request) -> Registry:  # async: FastAPI runs synchronous dependencies in a thread
    return request.app.state.documents


Documents = Annotated[Registry, Depends(_registry)]
Salt = Annotated[str | None, Query(description="Salt of the document.")]
Model = Annotated[str | None, Query(description="Name of the model, if the document is stored under an adapter.")]


async def add(body: CacheBody, request: Request, documents: Documents) -> dict[str, Any]:
    """Compute and store the K/V of documents after a prefix. A new document replaces the stored document with the same id."""
    documents.keeper.check(body)
    stored = await unless_gone(request, documents.add(_enter(request, documents, body.cache_salt, body.model), body))
    entries = [{**_entry(record, kept), "was_cached": kept.was_cached} for record, kept in stored]
    prompt = (entries[0]["prefix_tokens"] or 0) + sum(entry["tokens"] or 0 for entry in entries)
    usage = {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt}
    return {"object": "list", "data": entries, "usage": usage}


async def listed(
    request: Request,
    documents: Documents,
    cache_salt: Salt = None,
    model: Model = None,
    after: Annotated[str | None, Query(description="Id of the document before the first returned document.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
) -> dict[str, Any]:
    """List the documents of a salt, oldest first."""
    page, more = documents.page(_enter(request, documents, cache_salt, model), after, limit)
    return {"object": "list", "data": await _entries(documents, page), "has_more": more}


async def one(
    document_id: str, request: Request, documents: Documents, cache_salt: Salt = None, model: Model = None
) -> dict[str, Any]:
    """Return one document."""
    record = documents.get(_enter(request, documents, cache_salt, model), document_id)
    return (await _entries(documents, [record]))[0]


async def change(document_id: str, body: ChangeBody, request: Request, documents: Documents) -> dict[str, Any]:
    """Pin a document, computing evicted K/V again, or unpin it; set its lifetime."""
    documents.keeper.check(body)
    record = documents.get(_enter(request, documents, body.cache_salt, body.model), document_id)
    await unless_gone(request, documents.change(record, pinned=body.pinned, ttl_s=body.ttl_s))
    return (await _entries(documents, [record]))[0]


async def delete(
    document_id: str, request: Request, documents: Documents, cache_salt: Salt = None, model: Model = None
) -> dict[str, Any]:
    """Delete a document: its K/V leaves memory when no request uses it any more, and the disk."""
    documents.keeper.check(None)
    scope = _enter(request, documents, cache_salt, model)
    try:
        async with asyncio.timeout(documents.config.request_timeout_s):
            await documents.delete(scope, document_id)
    except TimeoutError:
        text = "the document is no longer listed; its K/V is forgotten as soon as the engine answers"
        raise ApiError(504, text, code="timeout") from None
    return {"id": document_id, "object": "cache.document.deleted", "deleted": True}


async def forget(body: ForgetBody, request: Request, documents: Documents) -> Any:
    """Forget the K/V of documents that were sent in prompts, in memory and on disk, unless a stored document uses it."""
    documents.keeper.check(body)
    return await unless_gone(request, documents.erase(_enter(request, documents, body.cache_salt, body.model), body, request))


def documents_router(route_class: type[APIRoute]) -> APIRouter:
    """Return the routes of an app whose `state.documents` is its registry.

    Args:
        route_class: class of the routes, which reads the bodies.
    """
    router = APIRouter(route_class=route_class, tags=["cache"])
    for method, path, endpoint in (
        ("POST", DOCUMENTS, add),
        ("GET", DOCUMENTS, listed),
        ("GET", f"{DOCUMENTS}/{{document_id}}", one),
        ("PATCH", f"{DOCUMENTS}/{{document_id}}", change),
        ("DELETE", f"{DOCUMENTS}/{{document_id}}", delete),
        ("POST", FORGET, forget),
    ):
        router.add_api_route(path, endpoint, methods=[method])
    return router


def _enter(request: Request, documents: Registry, cache_salt: str | None, model: str | None) -> Scope:
    """Take a place in the queue, and return the scope of a request."""
    request.state.caller.take(1)
    return documents.keeper.scope(request, cache_salt, model)


async def _entries(documents: Registry, records: Sequence[DocumentRecord]) -> list[dict[str, Any]]:
    return [_entry(*pair) for pair in zip(records, await documents.keeper.look_up(records), strict=True)]


def _entry(record: DocumentRecord, kept: Kept) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "cache.document",
        "created": int(record.created),
        "expires": record.expires,
        "tokens": record.tokens,
        "prefix": kept.prefix,
        "prefix_tokens": record.prefix_tokens,
        "bytes": record.num_bytes,
        "cached": kept.cached,
        "pinned": kept.pinned,
        "keep_states": record.keep_states,
        "state_kept": kept.state_kept,
    }
