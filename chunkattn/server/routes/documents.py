"""Routes of `/v1/cache`: documents computed ahead of use, by id and salt, and contents that are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from chunkattn.layout import Names
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.schema.documents import CacheBody, ChangeBody, ForgetBody
from chunkattn.server.state import CallerOf, ServerState, State
from chunkattn.server.stored_document import StoredDocument, count_ids
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.errors import ApiError
from chunkattn.web.time_limit import unless_gone

_SHOWN_TOKENS = 256
"""Tokens of a prefix that an entry shows as text."""

router = APIRouter(route_class=JsonRoute, tags=["cache"], prefix="/v1/cache")

Salt = Annotated[str | None, Query(description="Salt of the document.")]


@router.post("/documents")
async def add(body: CacheBody, request: Request, state: State, caller: CallerOf) -> dict[str, Any]:
    """Compute and store the K/V of documents after a prefix. A new document replaces the stored document with the same id."""
    state.check_model(body.model)
    state.check_ready()
    state.check_priority(body.priority, CacheBody.model_fields["priority"].default)
    caller.take(1)

    def is_allowed() -> bool:
        return not state.keys.needed or state.keys.holder(request.headers.get("authorization", "")) is not None

    added = await unless_gone(
        request,
        state.documents.add(
            body.start(),
            body.texts(),
            body.ids(),
            cache_salt=caller.salt(body.cache_salt),
            owner=caller.salt(None),
            pin=body.pin,
            ttl_s=body.ttl_s,
            priority=body.priority,
            options=body.chat_template_kwargs,
            timeout=state.config.request_timeout_s,
            names=_names(body),
            is_allowed=is_allowed,
        ),
    )
    shown = _shown_prefixes(state, [document for document, _ in added])
    entries = [{**_entry(d, shown, cached=True, pinned=body.pin), "was_cached": before} for d, before in added]
    prompt = entries[0]["prefix_tokens"] + sum(entry["tokens"] for entry in entries)
    return {
        "object": "list",
        "data": entries,
        "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
    }


@router.get("/documents")
async def listed(
    state: State,
    caller: CallerOf,
    cache_salt: Salt = None,
    after: Annotated[str | None, Query(description="Id of the document before the first returned document.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
) -> dict[str, Any]:
    """List the documents of a salt, oldest first."""
    caller.take(1)
    documents, more = state.documents.page(caller.salt(cache_salt), after, limit)
    return {"object": "list", "data": await _entries(state, documents), "has_more": more}


@router.get("/documents/{document_id}")
async def one(document_id: str, state: State, caller: CallerOf, cache_salt: Salt = None) -> dict[str, Any]:
    """Return one document."""
    caller.take(1)
    return (await _entries(state, [state.documents.get(document_id, caller.salt(cache_salt))]))[0]


@router.patch("/documents/{document_id}")
async def change(document_id: str, body: ChangeBody, request: Request, state: State, caller: CallerOf) -> dict[str, Any]:
    """Pin a document, computing evicted K/V again, or unpin it; set its lifetime."""
    state.check_model(body.model)
    state.check_ready()
    document = state.documents.get(document_id, caller.salt(body.cache_salt))
    caller.take(1)
    if body.pinned is not None:
        await unless_gone(request, state.documents.pin(document, body.pinned, state.config.request_timeout_s))
    if body.ttl_s is not None:
        state.documents.expire(document, None if body.ttl_s == "never" else body.ttl_s)
    return (await _entries(state, [document]))[0]


@router.delete("/documents/{document_id}")
async def delete(document_id: str, state: State, caller: CallerOf, cache_salt: Salt = None) -> dict[str, Any]:
    """Delete a document: its K/V leaves memory when no request uses it any more, and the disk."""
    state.check_ready()
    salt = caller.salt(cache_salt)
    caller.take(1)
    if state.documents.delete_unusable(document_id, salt):
        return {"id": document_id, "object": "cache.document.deleted", "deleted": True}
    document = state.documents.get(document_id, salt)
    try:
        async with asyncio.timeout(state.config.request_timeout_s):
            await state.documents.delete(document)
    except TimeoutError:
        text = "the document is no longer listed; its K/V is forgotten as soon as the engine answers"
        raise ApiError(504, text, code="timeout") from None
    return {"id": document_id, "object": "cache.document.deleted", "deleted": True}


@router.post("/forget")
async def forget(body: ForgetBody, request: Request, state: State, caller: CallerOf) -> dict[str, Any]:
    """Forget the K/V of documents that were sent in prompts, in memory and on disk, unless a stored document uses it."""
    state.check_model(body.model)
    state.check_ready()
    caller.take(1)
    salt, options = caller.salt(body.cache_salt), body.chat_template_kwargs
    forgetting = state.documents.forget(body.start(), body.texts(), cache_salt=salt, options=options, names=_names(body))
    try:
        async with asyncio.timeout(state.config.request_timeout_s):
            found = await unless_gone(request, forgetting)
    except TimeoutError:
        raise ApiError(504, "the K/V is forgotten as soon as the engine answers", code="timeout") from None
    entries = [
        {"object": "cache.document.forgotten", "index": number, "tokens": count_ids(content[2]), "forgotten": done}
        for number, (content, done) in enumerate(found)
    ]
    return {"object": "list", "data": entries}


def _names(body: CacheBody | ForgetBody) -> Names:
    """Return the request's own names of prefix and documents."""
    return DOCUMENT_NAMES if body.messages is None else DOCUMENT_NAMES._replace(prefix="messages")


async def _entries(state: ServerState, documents: Sequence[StoredDocument]) -> list[dict[str, Any]]:
    cached = await state.documents.cached(documents)
    # A failed step drops cached K/V, pinned documents included.
    pinned = [is_cached and state.documents.pins.has(d) for d, is_cached in zip(documents, cached, strict=True)]
    shown = _shown_prefixes(state, documents)
    return [_entry(d, shown, cached=c, pinned=p) for d, c, p in zip(documents, cached, pinned, strict=True)]


def _shown_prefixes(state: ServerState, documents: Sequence[StoredDocument]) -> dict[bytes, str | None]:
    """Return the beginning of each prefix as text, by the bytes of its token ids; None without a tokenizer."""
    prefixes = {d.content[1]: d.prefix[:_SHOWN_TOKENS].tolist() for d in documents}
    texts = state.texts
    return {content: None if texts.tokenizer is None else texts.whole(ids) for content, ids in prefixes.items()}


def _entry(document: StoredDocument, shown: Mapping[bytes, str | None], *, cached: bool, pinned: bool) -> dict[str, Any]:
    prefix, tokens = document.lens
    return {
        "id": document.id,
        "object": "cache.document",
        "created": int(document.created),
        "expires": document.expires,
        "tokens": tokens,
        "prefix": shown[document.content[1]],
        "prefix_tokens": prefix,
        "bytes": document.num_bytes,
        "cached": cached,
        "pinned": pinned,
    }
