"""Registry of cached documents: clients add them by id and salt, pin them, give them a lifetime and delete them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkattn.layout import Names
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.server.contents import Contents
from chunkattn.server.errors import ApiError
from chunkattn.server.options import ServerConfig
from chunkattn.server.stored_document import Content, StoredDocument, as_bytes, count_ids

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

_MAX_TOKENS_PER_POST = 1 << 21
"""Token limit of the documents that one POST adds, or that one request names by id. When documents are added, the prefix
counts once per document, because every engine message repeats it."""

_MAX_ID_CHARS = 128


class Documents:
    """Registry of all documents of a server. A document is visible under its own salt only.

    The K/V of a document lives in the engine's cache and may be evicted unless the document is pinned. The registry stores ids
    and contents, so the server can list documents and have the engine forget them.

    Args:
        llm: engine that computes and caches the K/V.
        config: options with the limits on documents and pinned pages.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self._stored: dict[tuple[str | None, str], StoredDocument] = {}
        self.contents = Contents(llm)
        self._coming: Counter[str | None] = Counter()  # documents in computation, by owner
        self._pinning: Counter[tuple[str | None, Content]] = Counter()  # pins in computation, by owner and content

    @property
    def _can_store(self) -> bool:
        """Return whether a document's K/V serves more than one prompt."""
        return self.llm.config.position_strategy == "shared"

    def get(self, document_id: str, cache_salt: str | None) -> StoredDocument:
        """Return a document.

        Args:
            document_id: id of the document.
            cache_salt: salt of the document.

        Raises:
            ApiError: 404, no document has this id under this salt.
        """
        found = self._stored.get((cache_salt, document_id))
        if found is None:
            raise _missing(document_id)
        return found

    def named(self, names: Mapping[int, str], cache_salt: str | None, *, field: str = "documents") -> dict[int, StoredDocument]:
        """Return the documents that a request names by id, by their place in the request.

        Args:
            names: ids by the place of the document in the request.
            cache_salt: salt of the request.
            field: place of the documents in the request's body, for error texts.

        Raises:
            ApiError: 404, no document has one of the ids under this salt; 400, the documents together are too long.
        """
        found, tokens = dict[int, StoredDocument](), 0
        for number, name in names.items():
            document = self._stored.get((cache_salt, name))
            if document is None:
                advice = "add it by POST /v1/cache/documents, or send its text"
                if not self._can_store:
                    strategy = self.llm.config.position_strategy
                    advice = f"under position_strategy {strategy!r} this server stores no documents, so send its text"
                text = (
                    f"{field}.{number} names the document {name[:_MAX_ID_CHARS]!r}, which is not stored under this salt: it "
                    f"was never added, was deleted or has expired; {advice}"
                )
                raise ApiError(404, text, param="documents", code="document_not_found")
            found[number] = document
            if (tokens := tokens + document.lens[1]) > _MAX_TOKENS_PER_POST:
                text = f"the documents named by id have more than {_MAX_TOKENS_PER_POST} tokens; send fewer at once"
                raise ApiError(400, text, param="documents", code="too_many_documents")
        return found

    def page(self, cache_salt: str | None, after: str | None, limit: int) -> tuple[list[StoredDocument], bool]:
        """Return up to `limit` documents of a salt, oldest first, and whether more follow.

        Args:
            cache_salt: salt of the documents.
            after: id of the document before the first returned document; None starts at the oldest document.
            limit: number of documents to return at most.

        Raises:
            ApiError: 404, no document has the id `after`.
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
        priority: int,
        options: dict[str, Any],
        timeout: float,
        names: Names = DOCUMENT_NAMES,
        owner: str | None = None,
        is_allowed: Callable[[], bool] = lambda: True,
    ) -> list[tuple[StoredDocument, bool]]:
        """Compute and store documents. A new document replaces the stored document with the same id.

        Args:
            prefix: text, token ids, or the chat messages before the first user message.
            texts: text or token ids of each document.
            ids: id of each document; None derives an id from the content.
            cache_salt: cache salt; requests with this salt share the documents.
            pin: whether to protect the K/V from eviction.
            ttl_s: lifetime in seconds; None keeps the document.
            priority: priority of the computation; a lower value is scheduled first.
            options: variables of the chat template.
            timeout: time limit of the computation in seconds.
            names: the request's names of prefix and documents.
            owner: holder of the API key that owns the documents.
            is_allowed: returns whether the owner's key is still valid; asked when the documents are computed.

        Returns:
            Each document, with whether its K/V was already cached.

        Raises:
            ApiError: 400, a document is empty, two share an id, or a limit on documents, tokens or pins is exceeded; 401,
                the owner's key was removed meanwhile.
            ChunkAttnError: the documents could not be computed; no document is stored.
        """
        if not self._can_store:
            text = "documents can be cached one by one only under position_strategy 'shared'; else their K/V is of one prompt"
            raise ApiError(400, text, param="documents", code="unsupported_parameter")
        self.llm.limits.check_count(len(texts), "documents", names.chunks)
        keys, contents = await self.llm.threads.run(self._prepare, prefix, texts, ids, cache_salt, options, names)
        new = sum((cache_salt, key) not in self._stored for key in keys)
        self._check_count(owner, new)
        if pin:
            self._check_pins(owner, contents)
        pinning = [(owner, content) for content in contents] if pin else []
        self._pinning.update(pinning)
        self._coming[owner] += new
        self.contents.use(contents)
        try:
            engine = self.llm.client.restarts
            make = partial(self.contents.job, contents, pin=pin, priority=priority, names=names)
            report = await self.llm.run(make, timeout)
            if not is_allowed():
                self.contents.forget_unused(contents)
                if self._is_engine(engine):
                    self.llm.client.unpin(report.pin_ids)
                raise ApiError(401, "the API key was removed while the documents were computed", code="invalid_api_key")
        except BaseException:
            for content in contents:
                self.contents.let_go(content)
            raise
        finally:
            self._coming[owner] -= new
            self._pinning -= Counter(pinning)
        # No await from here to the end of the loop: the registry changes as a whole.
        added, forgetting = [], list[asyncio.Task[None]]()
        for number, (key, content, cached) in enumerate(zip(keys, contents, report.documents, strict=True)):
            given = texts[number]
            document = StoredDocument(key, content, cached.num_bytes, given if isinstance(given, str) else None, owner)
            document.pin = (report.pin_ids[number], engine) if pin else None
            self.contents.keep(content)
            before = self._stored.pop((cache_salt, key), None)
            if before is not None and (task := self._dismiss(before)):
                forgetting.append(task)
            self._stored[cache_salt, key] = document
            self.expire(document, ttl_s)
            added.append((document, cached.was_cached))
        if forgetting:
            await asyncio.wait(forgetting, timeout=timeout)
        return added

    def _prepare(
        self,
        prefix: Any,
        texts: list[str] | list[list[int]],
        ids: Sequence[str | None],
        cache_salt: str | None,
        options: dict[str, Any],
        names: Names,
    ) -> tuple[list[str], list[Content]]:
        """Return the ids and contents of new documents.

        Raises:
            ApiError: 400, a document is empty, repeats an id or a content, or the token limit is exceeded.
        """
        prefix_ids, chunks = self.llm.frontend.parser.parse_cache(prefix, texts, options, names)
        start, seen = as_bytes(prefix_ids), dict[str, int]()
        digest = hashlib.blake2b(start, digest_size=12, person=b"prefix")
        contents: list[Content] = []
        size = 0
        for number, (given, chunk) in enumerate(zip(ids, chunks, strict=True)):
            if not chunk:
                raise ApiError(400, f"documents.{number} is empty", param="documents", code="invalid_value")
            contents.append((cache_salt, start, as_bytes(chunk)))
            if (size := size + len(prefix_ids) + len(chunk)) > _MAX_TOKENS_PER_POST:
                text = f"documents, each with the prefix, have more than {_MAX_TOKENS_PER_POST} tokens; send fewer at once"
                raise ApiError(400, text, param="documents", code="too_many_documents")
            own = hashlib.blake2b(contents[-1][2], digest_size=12, key=digest.digest())
            name = given or f"doc-{own.hexdigest()}"
            if (first := seen.setdefault(name, number)) < number:
                text = f"documents.{number} has the id or the content of documents.{first}"
                raise ApiError(400, text, param="documents", code="invalid_value")
        return list(seen), contents

    def _check_count(self, owner: str | None, new: int) -> None:
        """Check that `new` more documents fit the limits.

        Raises:
            ApiError: 400, a limit is exceeded.
        """
        if owner is not None:
            own = sum(d.owner == owner for d in self._stored.values()) + self._coming[owner]
            if own + new > (most := self.config.max_cached_documents_per_key):
                text = f"{new} documents more would exceed max_cached_documents_per_key {most}; delete some first"
                raise ApiError(400, text, param="documents", code="too_many_documents")
        if len(self._stored) + self._coming.total() + new > (most := self.config.max_cached_documents):
            text = f"{new} documents more would exceed max_cached_documents {most}; delete some first"
            raise ApiError(400, text, param="documents", code="too_many_documents")

    def _check_pins(self, owner: str | None, contents: Sequence[Content]) -> None:
        """Check that `contents` can be pinned beside the present pins.

        Raises:
            ApiError: 400, the pinned pages would exceed a share of the pool.
        """
        pinned = [(d.owner, d.content) for d in self._stored.values() if self.is_pinned(d)]
        held = {*pinned, *+self._pinning}
        limits = [("max_pinned_share", self.config.max_pinned_share, {content for _, content in held})]
        if owner is not None:
            own = {content for name, content in held if name == owner}
            limits.append(("max_pinned_share_per_key", self.config.max_pinned_share_per_key, own))
        for option, share, before in limits:
            most = int(share * self.llm.limits.num_pages)
            if self._pages({*before, *contents}) > most:
                text = (
                    f"the documents need {self._pages(set(contents))} KV pages with their prefix; pinned documents may hold "
                    f"{most} ({option} {share:g} of the pool), and too few are left; unpin documents, or do not pin these"
                )
                raise ApiError(400, text, param="documents", code="too_many_pins")

    def _pages(self, contents: set[Content]) -> int:
        """Return the KV pages of documents and their prefixes; a shared prefix counts once."""
        prefixes = {content[:2] for content in contents}
        size = self.llm.limits.block_size
        return sum(-(-count_ids(ids) // size) for _, ids in prefixes) + sum(
            -(-count_ids(content[2]) // size) for content in contents
        )

    def is_pinned(self, document: StoredDocument) -> bool:
        """Return whether the present engine process holds the document's pin."""
        return document.pin is not None and self._is_engine(document.pin[1])

    def _is_engine(self, restarts: int) -> bool:
        """Return whether the engine process after `restarts` restarts runs now."""
        return restarts == self.llm.client.restarts and self.llm.client.is_ready

    async def pin(self, document: StoredDocument, wanted: bool, timeout: float) -> None:
        """Pin a document, computing evicted K/V again, or unpin it.

        Args:
            document: stored document.
            wanted: True to pin, False to unpin.
            timeout: time limit in seconds.

        Raises:
            ApiError: 404, the document was deleted meanwhile; 400, the pins would exceed their share of the pool.
            ChunkAttnError: the documents could not be computed.
        """
        if not wanted:
            self._unpin(document)
            return
        engine = self.llm.client.restarts
        self._check_pins(document.owner, [document.content])
        pinning = document.owner, document.content
        self._pinning[pinning] += 1
        self.contents.use([document.content])
        try:
            report = await self.llm.run(partial(self.contents.job, [document.content], pin=True), timeout)
            self._unpin(document)
            document.pin = report.pin_ids[0], engine
            if not self._is_stored(document):
                self._unpin(document)
                raise _missing(document.id)
        finally:
            self._pinning -= Counter([pinning])
            self.contents.let_go(document.content)

    def expire(self, document: StoredDocument, ttl_s: float | None) -> None:
        """Set a document's lifetime, replacing an earlier one.

        Args:
            document: stored document.
            ttl_s: seconds from now until the document is deleted; None keeps the document.

        Raises:
            ApiError: 404, the document was deleted meanwhile.
        """
        if ttl_s is not None and not self._is_stored(document):
            raise _missing(document.id)
        if document.timer is not None:
            document.timer.cancel()
        document.expires = document.timer = None
        if ttl_s is not None:
            document.expires = time.time() + ttl_s
            document.timer = asyncio.get_running_loop().call_later(ttl_s, self._expired, document)

    def _expired(self, document: StoredDocument) -> None:
        del self._stored[document.cache_salt, document.id]
        self._dismiss(document)

    async def delete(self, document: StoredDocument) -> None:
        """Delete a document and have the engine forget its K/V.

        The engine frees the pages when no request uses them any more, and deletes the K/V on disk. The deletion continues if
        the caller is cancelled.
        """
        del self._stored[document.cache_salt, document.id]
        if forgetting := self._dismiss(document):
            await asyncio.shield(forgetting)

    def delete_owned(self, owners: Set[str]) -> int:
        """Delete the documents of owners, those in computation included. Return how many stored documents were deleted.

        Args:
            owners: holders of API keys that are no longer valid.
        """
        going = [document for document in self._stored.values() if document.owner in owners]
        for document in going:
            del self._stored[document.cache_salt, document.id]
            self._dismiss(document)
        return len(going)

    async def cached(self, documents: Sequence[StoredDocument]) -> list[bool]:
        """Return for each document whether all of its K/V is in memory now.

        Args:
            documents: stored documents.
        """
        return await self.contents.cached([document.content for document in documents])

    def _is_stored(self, document: StoredDocument) -> bool:
        return self._stored.get((document.cache_salt, document.id)) is document

    def _dismiss(self, document: StoredDocument) -> asyncio.Task[None] | None:
        """Cancel the timer and the pin of a removed document; forget its K/V when the last user leaves."""
        self.expire(document, None)
        self._unpin(document)
        self.contents.forget_unused([document.content])
        return self.contents.let_go(document.content)

    def _unpin(self, document: StoredDocument) -> None:
        if document.pin is not None and self.is_pinned(document):
            self.llm.client.unpin([document.pin[0]])
        document.pin = None


def _missing(document_id: str) -> ApiError:
    text = f"there is no document {document_id!r} under this salt"
    return ApiError(404, text, param="document_id", code="document_not_found")
