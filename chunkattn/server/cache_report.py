"""Report of the documents that the KV cache holds, for gateways in front of several servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from chunkattn.documents.records import Prefix
from chunkattn.errors import ChunkAttnError
from chunkattn.schema.documents import CacheBody
from chunkattn.schema.generation import ChatBody, CompletionBody, DocumentOrId
from chunkattn.schema.ledger import Ledger
from chunkattn.schema.piece_keys import keys_of
from chunkattn.server.contents import Contents
from chunkattn.server.stored_document import Content, as_bytes

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_BATCH = 100
"""Documents that one report asks the engine for."""
_WAIT_S = 0.15
"""Seconds that a report waits for the engine."""
_LEDGER_BYTES = 64 << 20
_STORED = "/v1/cache/documents"


@dataclass(eq=False)
class _Source:
    """Document that the engine can be asked for.

    Attributes:
        salt: cache salt of the engine.
        prefix: prefix of the document.
        document: text or token ids; None once `content` is known.
        content: token ids; None before the first question, b"" of a document that cannot be cached.
    """

    salt: str | None
    prefix: Prefix
    document: str | list[int] | None
    content: Content | None = None


Noted = tuple[list[tuple[int, int]], list[_Source]]
"""Keys and sizes of a request's documents, with their sources."""


class CacheReports:
    """Ledger of the documents that requests hold, and its comparison with the engine.

    Documents of completions, chats and `/v1/cache/documents` are noted. Each report asks the engine for the next documents in
    turn, so that its cost does not grow with the cache. A document is tokenized once.

    Args:
        llm: engine whose cache is reported.
        contents: contents of stored documents, which asks the engine.
    """

    def __init__(self, llm: AsyncLLM, contents: Contents) -> None:
        self.llm, self._contents = llm, contents
        self._started, self._restarts = time.time_ns(), llm.client.restarts
        self._ledger: Ledger[_Source] = Ledger(_LEDGER_BYTES)
        self._sources: WeakValueDictionary[int, _Source] = WeakValueDictionary()
        self._prefixes: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()
        self._asking: asyncio.Task[None] | None = None

    def find(self, given: Mapping[str, Any], body: Any, authorization: str, salt: str | None) -> Noted:
        """Return the documents of a request with their routing keys. May run in a thread.

        Args:
            given: decoded JSON body.
            body: the body, validated.
            authorization: Authorization header.
            salt: cache salt of the engine.
        """
        if isinstance(body, CompletionBody):
            if body.chunks is None or not body.add_special_tokens:
                return [], []
            raw, listed = given["chunks"], body.chunks.documents
            start = {"prefix": raw.get("prefix") or ("" if isinstance(body.chunks.question, str) else [])}
            prefix = Prefix(start["prefix"])
        elif isinstance(body, ChatBody) and body.documents:
            first = next((n for n, message in enumerate(body.messages) if message.role == "user"), 0)
            start, listed = {"messages": given["messages"][:first]}, body.documents
            prefix = Prefix([m.plain() for m in body.messages[:first]], is_chat=True, template_options=body.variables)
        elif isinstance(body, CacheBody):
            is_chat = body.messages is not None
            start = {"messages": given["messages"]} if is_chat else {"prefix": body.start()}
            prefix, listed = Prefix(body.start(), is_chat, body.chat_template_kwargs), body.texts()
        else:
            return [], []
        documents = _distinct(listed)
        asked = {**start, "documents": documents, "cache_salt": given.get("cache_salt")}
        asked["chat_template_kwargs"] = prefix.template_options
        pieces = list(keys_of(_STORED, asked, authorization).pieces)[-len(documents) :] if documents else []
        if len(pieces) < len(documents):
            return [], []
        return pieces, [_Source(salt, prefix, document) for document in documents]

    def note(self, noted: Noted) -> None:
        """Record the documents of a request.

        Args:
            noted: result of `find`.
        """
        pieces, sources = noted
        if not sources:
            return
        digest = blake2b(sources[0].prefix.encode(), digest_size=16).digest()
        prefix = self._prefixes.setdefault(digest, sources[0].prefix)
        kept = []
        for (key, _), source in zip(pieces, sources, strict=True):
            source.prefix = prefix
            kept.append(self._sources.setdefault(key, source))
        self._ledger.note(pieces, kept)

    async def report(self, since: int) -> dict[str, Any]:
        """Return generation, capacity in tokens and the documents in memory; see `chunkattn.gateway.replicas.Report`.

        An engine that is busy does not delay the report: what it answers later is in a later report.

        Args:
            since: version of an earlier report; only what was asked after it is returned. 0 returns all.
        """
        if self._restarts != self.llm.client.restarts:
            self._restarts = self.llm.client.restarts
            self._ledger.clear()
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        await asyncio.wait({self._asking}, timeout=_WAIT_S)
        held, gone = self._ledger.snapshot(since)
        limits = self.llm.client.limits
        return {
            "object": "cache.report",
            "generation": f"{self._started:x}-{self._restarts}",
            "capacity": None if limits is None else limits.kv_tokens,
            "version": self._ledger.version,
            "held": [[key, size] for key, size in held.items()],
            "gone": sorted(gone),
            "age_s": 0.0,
        }

    def _asked(self, asking: asyncio.Task[None]) -> None:
        self._asking = None
        if not asking.cancelled() and (error := asking.exception()) and not isinstance(error, ChunkAttnError):
            logger.error("the cache cannot be reported", exc_info=error)

    async def _ask(self) -> None:
        """Ask the engine for the next documents."""
        if not self.llm.is_ready:
            return
        batch = self._ledger.batch(_BATCH)
        if new := [source for _, source in batch if source.content is None]:
            await self.llm.threads.run(self._read, new)
        restarts = self._restarts
        known = [(key, source.content) for key, source in batch if source.content is not None]
        held = await self._contents.cached([content for _, content in known])
        if restarts == self.llm.client.restarts and self.llm.is_ready:
            for (key, _), is_held in zip(known, held, strict=True):
                self._ledger.found(key, is_held)

    def _read(self, sources: Sequence[_Source]) -> None:
        """Tokenize documents, those of one prefix together."""
        groups: dict[tuple[str | None, int], list[_Source]] = {}
        for source in sources:
            groups.setdefault((source.salt, id(source.prefix)), []).append(source)
        for group in groups.values():
            try:
                self._parse(group)
            except ChunkAttnError:
                for source in group:
                    try:
                        self._parse([source])
                    except ChunkAttnError:  # the engine refused it, so it holds nothing of it
                        source.content, source.document = (source.salt, b"", b""), None

    def _parse(self, sources: Sequence[_Source]) -> None:
        prefix, documents = sources[0].prefix, [source.document for source in sources]
        given: list[Any] = [*documents, "?"] if prefix.is_chat else documents  # a text tells messages from ids
        first, chunks = self.llm.frontend.parser.parse_cache(prefix.source, given, prefix.template_options)
        for source, chunk in zip(sources, chunks, strict=False):
            source.content, source.document = (source.salt, as_bytes(first), as_bytes(chunk)), None


def _distinct(listed: Iterable[Any]) -> list[Any]:
    """Return each text and each list of token ids once; documents named by id and empty ones are left out."""
    found: dict[Any, Any] = {}
    for document in listed:
        if isinstance(document, DocumentOrId):
            if document.text is None:
                continue
            document = document.plain()
        if document:
            found.setdefault(document if isinstance(document, str) else tuple(document), document)
    return list(found.values())
