"""Documents whose K/V clients have asked to keep: by id and salt, pinned or not, until they expire or are deleted."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chunkattn.errors import EngineDeadError
from chunkattn.server.errors import ApiError

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

_AGAIN_S = 1.0


@dataclass(eq=False)
class StoredDocument:
    """A document behind its prefix.

    Attributes:
        prefix_ids, token_ids: of the model.
        num_bytes: of the document's K/V pages.
        created, expires: seconds since the epoch; `expires` is None for one that stays.
        pin: what holds its pages, and the engine's number of restarts when it did: with an engine its pins are gone.
        timer: of its expiry.
    """

    id: str
    cache_salt: str | None
    prefix_ids: list[int]
    token_ids: list[int]
    num_bytes: int
    created: float = field(default_factory=time.time)
    expires: float | None = None
    pin: tuple[str, int] | None = None
    timer: asyncio.TimerHandle | None = None

    def is_of(self, prefix_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether it has these tokens."""
        return self.prefix_ids == prefix_ids and self.token_ids == token_ids


class Documents:
    """All of a server's. Those of one salt are unknown under another.

    Their K/V lives in the engine's cache as any other and may be evicted, unless pinned; this remembers what they are, so that
    it can be told and undone.

    Args:
        llm: computes and keeps.
        limit: most of them.
    """

    def __init__(self, llm: AsyncLLM, limit: int) -> None:
        self.llm, self.limit = llm, limit
        self._stored: dict[tuple[str | None, str], StoredDocument] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, document_id: str, cache_salt: str | None) -> StoredDocument:
        """One of them.

        Raises:
            ApiError: 404, there is none.
        """
        found = self._stored.get((cache_salt, document_id))
        if found is None:
            raise ApiError(404, f"there is no document {document_id!r} under this salt", code="document_not_found")
        return found

    def page(self, cache_salt: str | None, after: str | None, limit: int) -> tuple[list[StoredDocument], bool]:
        """Up to `limit` of a salt's behind the one with the id `after`, oldest first; and whether there are more.

        Raises:
            ApiError: 404, there is no document `after`.
        """
        own = [d for d in self._stored.values() if d.cache_salt == cache_salt]
        first = 0 if after is None else own.index(self.get(after, cache_salt)) + 1
        return own[first : first + limit], first + limit < len(own)

    async def add(
        self,
        prefix: Any,
        texts: list[str] | list[list[int]],
        ids: Sequence[str | None],
        *,
        cache_salt: str | None,
        pin: bool,
        ttl_s: float | None,
        options: dict[str, Any],
        timeout: float,
    ) -> list[tuple[StoredDocument, bool]]:
        """Compute documents and remember them, in place of others with their ids; and whether each was cached before.

        Args:
            prefix: text, token ids, or the messages before the first of the user's.
            texts: text or token ids each.
            ids: of each; None makes one of its content.
            cache_salt: whom they are shared with.
            pin: keep them in memory whatever else needs pages.
            ttl_s: seconds until they are deleted.
            options: for the chat template.
            timeout: seconds it may take.

        Raises:
            ApiError: 400, two have one id, or there are too many.
            ChunkAttnError: as `AsyncLLM.precompute`; nothing is remembered then.
        """
        if self.llm.config.position_strategy != "shared":
            text = "documents are kept one by one under position_strategy 'shared' alone: else their K/V is of one prompt"
            raise ApiError(400, text, code="unsupported_parameter")
        parser = self.llm.frontend.parser
        prefix_ids, chunks = await asyncio.to_thread(parser.parse_cache, prefix, texts, options)
        names = [given or _content_id(prefix_ids, chunk) for given, chunk in zip(ids, chunks, strict=True)]
        for number, (name, chunk) in enumerate(zip(names, chunks, strict=True)):
            if not chunk:
                raise ApiError(400, f"documents.{number} is empty", param="documents", code="invalid_value")
            if (first := names.index(name)) < number:
                text = f"documents.{number} has the id or the content of documents.{first}"
                raise ApiError(400, text, param="documents", code="invalid_value")
        new = sum((cache_salt, name) not in self._stored for name in names)
        if len(self._stored) + new > self.limit:
            text = f"{new} documents more than {len(self._stored)} exceed max_cached_documents {self.limit}; delete some first"
            raise ApiError(400, text, param="documents", code="too_many_documents")
        engine = self.llm.client.restarts
        report = await self.llm.precompute(prefix_ids, chunks, pin=pin, cache_salt=cache_salt, timeout=timeout)
        added = []
        for number, (name, chunk, told) in enumerate(zip(names, chunks, report.documents, strict=True)):
            document = StoredDocument(name, cache_salt, prefix_ids, chunk, told.num_bytes)
            if pin:
                document.pin = report.pin_ids[number], engine
            before = self._stored.pop((cache_salt, name), None)
            self._stored[cache_salt, name] = document
            if before is not None:
                self._let_go(before)
                if not before.is_of(prefix_ids, chunk):
                    await self._forget(before)
            self.expire(document, ttl_s)
            added.append((document, told.was_cached))
        return added

    def is_pinned(self, document: StoredDocument) -> bool:
        """Whether its pages are held now."""
        return document.pin is not None and document.pin[1] == self.llm.client.restarts and self.llm.client.is_ready

    async def pin(self, document: StoredDocument, wanted: bool, timeout: float) -> None:
        """Hold its pages, computing what is missing, or let them be evicted.

        Raises:
            ChunkAttnError: as `AsyncLLM.precompute`.
        """
        if wanted and not self.is_pinned(document):
            engine = self.llm.client.restarts
            ids, chunks = document.prefix_ids, [document.token_ids]
            report = await self.llm.precompute(ids, chunks, pin=True, cache_salt=document.cache_salt, timeout=timeout)
            self._let_go(document)
            document.pin = report.pin_ids[0], engine
            if self._stored.get((document.cache_salt, document.id)) is not document:  # deleted meanwhile
                self._let_go(document)
        elif not wanted:
            self._let_go(document)

    def expire(self, document: StoredDocument, ttl_s: float | None) -> None:
        """Have a document deleted in so many seconds, or never."""
        if document.timer is not None:
            document.timer.cancel()
        document.expires = document.timer = None
        if ttl_s is not None:
            document.expires = time.time() + ttl_s
            document.timer = asyncio.get_running_loop().call_later(ttl_s, self._expired, document)

    def _expired(self, document: StoredDocument) -> None:
        task = asyncio.ensure_future(self._delete_expired(document))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete_expired(self, document: StoredDocument) -> None:
        while True:
            try:
                return await self.delete(document)
            except EngineDeadError:  # it may be on disk, so wait for the next one
                await asyncio.sleep(_AGAIN_S)

    async def delete(self, document: StoredDocument) -> None:
        """Forget a document here and in the engine: in memory when no request uses it any more, and on disk."""
        if self._stored.get((document.cache_salt, document.id)) is document:
            del self._stored[document.cache_salt, document.id]
        self.expire(document, None)
        self._let_go(document)
        await self._forget(document)

    async def cached(self, documents: Sequence[StoredDocument]) -> list[bool]:
        """Whether all of each one's K/V is in memory now."""
        found: dict[StoredDocument, bool] = {}
        groups: dict[tuple[str | None, bytes], list[StoredDocument]] = {}
        for document in documents:
            groups.setdefault((document.cache_salt, np.asarray(document.prefix_ids).tobytes()), []).append(document)
        for (salt, _), group in groups.items():
            try:
                report = await self.llm.lookup(group[0].prefix_ids, [d.token_ids for d in group], cache_salt=salt)
                found |= {d: told.was_cached for d, told in zip(group, report.documents, strict=True)}
            except EngineDeadError:  # nothing is in the memory of an engine that is no more
                found |= dict.fromkeys(group, False)
        return [found[document] for document in documents]

    def _let_go(self, document: StoredDocument) -> None:
        if document.pin is not None and self.is_pinned(document):
            self.llm.client.unpin([document.pin[0]])
        document.pin = None

    async def _forget(self, document: StoredDocument) -> None:
        """Have the engine forget its K/V, unless another document has the same."""
        salt, ids, chunk = document.cache_salt, document.prefix_ids, document.token_ids
        if any(d.cache_salt == salt and d.is_of(ids, chunk) for d in self._stored.values()):
            return
        await self.llm.forget(ids, [chunk], cache_salt=salt)


def _content_id(prefix_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """An id for who gives none: the same for the same tokens behind the same prefix."""
    digest = hashlib.blake2b(digest_size=12)
    for ids in (prefix_ids, token_ids):
        digest.update(np.asarray([len(ids), *ids], np.int64).tobytes())
    return f"doc-{digest.hexdigest()}"
