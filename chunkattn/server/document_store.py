"""Documents whose K/V clients have asked to keep: by id and salt, pinned or not, until they expire or are deleted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chunkattn.calls.precompute import precompute_job
from chunkattn.errors import ChunkAttnError, EngineDeadError, RequestError
from chunkattn.server.errors import ApiError
from chunkattn.server.options import ServerConfig

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM
    from chunkattn.engine.messages import PrecomputeRequest

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
_AT_ONCE = 4
"""Documents the engine is asked to forget side by side, however many expire together."""
_MOST_TOKENS = 1 << 21
"""Of one request, the prefix again for every document, as the engine is told them."""
_LOOKED_UP = 100
"""Documents of one question to the engine, which answers it between two steps."""

_ID_BYTES = 4

Content = tuple[str | None, bytes, bytes]
"""Salt, and int32 token ids of prefix and document: what K/V is kept by."""


@dataclass(eq=False)
class StoredDocument:
    """A document behind its prefix.

    Attributes:
        content: what it is.
        num_bytes: of the document's K/V pages.
        owner: name of the API key it belongs to; None where names do not count.
        created, expires: seconds since the epoch; `expires` is None for one that stays.
        pin: what holds its pages, and the engine's number of restarts when it did: with an engine its pins are gone.
        timer: of its expiry.
    """

    id: str
    content: Content
    num_bytes: int
    owner: str | None = None
    created: float = field(default_factory=time.time)
    expires: float | None = None
    pin: tuple[str, int] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def cache_salt(self) -> str | None:
        """Whom it is shared with."""
        return self.content[0]

    @property
    def lens(self) -> tuple[int, int]:
        """Tokens of the prefix and its own."""
        return len(self.content[1]) // _ID_BYTES, len(self.content[2]) // _ID_BYTES


class Documents:
    """All of a server's. Those of one salt are unknown under another.

    Their K/V lives in the engine's cache as any other and may be evicted, unless pinned; this remembers what they are, so that
    it can be told and undone.

    Args:
        llm: computes and keeps.
        config: how many there may be, and how many pages they may pin.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self._stored: dict[tuple[str | None, str], StoredDocument] = {}
        self._wanted: Counter[Content] = Counter()  # by how many documents, those on their way among them
        self._owed: set[Content] = set()  # to be forgotten once nobody wants it
        self._coming: Counter[str | None] = Counter()
        self._pinning: Counter[tuple[str | None, Content]] = Counter()  # with the owner, as long as they are computed
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, document_id: str, cache_salt: str | None) -> StoredDocument:
        """One of them.

        Raises:
            ApiError: 404, there is none.
        """
        found = self._stored.get((cache_salt, document_id))
        if found is None:
            raise _missing(document_id)
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
        priority: int,
        options: dict[str, Any],
        timeout: float,
        owner: str | None = None,
    ) -> list[tuple[StoredDocument, bool]]:
        """Compute documents and remember them, in place of others with their ids; and whether each was cached before.

        Args:
            prefix: text, token ids, or the messages before the first of the user's.
            texts: text or token ids each.
            ids: of each; None makes one of its content.
            cache_salt: whom they are shared with.
            pin: keep them in memory whatever else needs pages.
            ttl_s: seconds until they are deleted.
            priority: the lower goes first.
            options: for the chat template.
            timeout: seconds it may take.
            owner: name of the API key they belong to.

        Raises:
            ApiError: 400, one is empty, two have one id, or there are too many documents or pins.
            ChunkAttnError: as `AsyncLLM.precompute`; nothing is remembered then.
        """
        if self.llm.config.position_strategy != "shared":
            text = "documents are kept one by one under position_strategy 'shared' alone: else their K/V is of one prompt"
            raise ApiError(400, text, code="unsupported_parameter")
        if (count := len(texts)) > (most := self.llm.config.max_items_per_request):
            text = f"{count} documents exceed max_items_per_request {most}"
            raise ApiError(400, text, param="documents", code="invalid_value")
        names, contents = await asyncio.to_thread(self._prepare, prefix, texts, ids, cache_salt, options)
        new = sum((cache_salt, name) not in self._stored for name in names)
        self._check_count(owner, new)
        if pin:
            self._check_pins(owner, contents)
        pinning = [(owner, content) for content in contents] if pin else []
        self._pinning.update(pinning)
        self._coming[owner] += new
        self._wanted.update(contents)
        try:
            engine = self.llm.client.restarts
            report = await self.llm.precompute(
                _ids(contents[0][1]),
                [_ids(content[2]) for content in contents],
                pin=pin,
                cache_salt=cache_salt,
                priority=priority,
                timeout=timeout,
            )
        except BaseException:
            for content in contents:
                self._let_go(content)
            raise
        finally:
            self._coming[owner] -= new
            self._pinning -= Counter(pinning)
        # From here on nothing waits before all of it has happened.
        added, forgetting = [], list[asyncio.Task[None]]()
        for number, (name, content, told) in enumerate(zip(names, contents, report.documents, strict=True)):
            document = StoredDocument(name, content, told.num_bytes, owner)
            document.pin = (report.pin_ids[number], engine) if pin else None
            self._owed.discard(content)
            before = self._stored.pop((cache_salt, name), None)
            if before is not None and (task := self._dismiss(before)):
                forgetting.append(task)
            self._stored[cache_salt, name] = document
            self.expire(document, ttl_s)
            added.append((document, told.was_cached))
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
    ) -> tuple[list[str], list[Content]]:
        """Ids and contents, checked."""
        prefix_ids, chunks = self.llm.frontend.parser.parse_cache(prefix, texts, options)
        start, seen = _bytes(prefix_ids), dict[str, int]()
        digest = hashlib.blake2b(start, digest_size=12, person=b"prefix")
        contents: list[Content] = []
        size = 0
        for number, (given, chunk) in enumerate(zip(ids, chunks, strict=True)):
            if not chunk:
                raise ApiError(400, f"documents.{number} is empty", param="documents", code="invalid_value")
            contents.append((cache_salt, start, _bytes(chunk)))
            if (size := size + len(prefix_ids) + len(chunk)) > _MOST_TOKENS:
                text = f"documents, each with the prefix, have more than {_MOST_TOKENS} tokens; send fewer at once"
                raise ApiError(400, text, param="documents", code="too_many_documents")
            own = hashlib.blake2b(contents[-1][2], digest_size=12, key=digest.digest())
            name = given or f"doc-{own.hexdigest()}"
            if (first := seen.setdefault(name, number)) < number:
                text = f"documents.{number} has the id or the content of documents.{first}"
                raise ApiError(400, text, param="documents", code="invalid_value")
        return list(seen), contents

    def _check_count(self, owner: str | None, new: int) -> None:
        """Check that so many more documents may be remembered."""
        if owner is not None:
            own = sum(d.owner == owner for d in self._stored.values()) + self._coming[owner]
            if own + new > (most := self.config.max_cached_documents_per_key):
                text = f"{new} documents more would exceed max_cached_documents_per_key {most}; delete some first"
                raise ApiError(400, text, param="documents", code="too_many_documents")
        if len(self._stored) + self._coming.total() + new > (most := self.config.max_cached_documents):
            text = f"{new} documents more would exceed max_cached_documents {most}; delete some first"
            raise ApiError(400, text, param="documents", code="too_many_documents")

    def _check_pins(self, owner: str | None, contents: Sequence[Content]) -> None:
        """Check that contents may be pinned beside what is pinned already."""
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
        """KV pages of documents and their prefixes, each once."""
        prefixes = {content[:2] for content in contents}
        size = self.llm.config.block_size * _ID_BYTES
        return sum(-(-len(ids) // size) for _, ids in prefixes) + sum(-(-len(content[2]) // size) for content in contents)

    def is_pinned(self, document: StoredDocument) -> bool:
        """Whether the engine was told to hold its pages, and has not been replaced since."""
        return document.pin is not None and document.pin[1] == self.llm.client.restarts and self.llm.client.is_ready

    async def pin(self, document: StoredDocument, wanted: bool, timeout: float) -> None:
        """Hold its pages, computing what is missing, or let them be evicted.

        Raises:
            ApiError: 404, it was deleted meanwhile; 400, the pins would exceed their share of the pool.
            ChunkAttnError: as `AsyncLLM.precompute`.
        """
        if not wanted:
            self._unpin(document)
            return
        engine, (salt, prefix, chunk) = self.llm.client.restarts, document.content
        self._check_pins(document.owner, [document.content])
        pinning = document.owner, document.content
        self._pinning[pinning] += 1
        self._wanted[document.content] += 1
        try:
            report = await self.llm.precompute(_ids(prefix), [_ids(chunk)], pin=True, cache_salt=salt, timeout=timeout)
            self._unpin(document)
            document.pin = report.pin_ids[0], engine
            if not self._is_stored(document):
                self._unpin(document)
                raise _missing(document.id)
        finally:
            self._pinning -= Counter([pinning])
            self._let_go(document.content)

    def expire(self, document: StoredDocument, ttl_s: float | None) -> None:
        """Have a document deleted in so many seconds, or never.

        Raises:
            ApiError: 404, it was deleted meanwhile.
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
        """Forget a document here and in the engine: in memory when no request uses it any more, and on disk.

        Once begun, it goes on whatever becomes of the caller.
        """
        del self._stored[document.cache_salt, document.id]
        if forgetting := self._dismiss(document):
            await asyncio.shield(forgetting)

    async def cached(self, documents: Sequence[StoredDocument]) -> list[bool]:
        """Whether all of each one's K/V is in memory now."""
        found: dict[StoredDocument, bool] = {}
        groups: dict[tuple[str | None, bytes], list[StoredDocument]] = {}
        for document in documents:
            groups.setdefault(document.content[:2], []).append(document)
        parts = ((k, g[n : n + _LOOKED_UP]) for k, g in groups.items() for n in range(0, len(g), _LOOKED_UP))
        for (salt, prefix), group in parts:
            try:
                report = await self.llm.lookup(_ids(prefix), [_ids(d.content[2]) for d in group], cache_salt=salt)
                found |= {d: told.was_cached for d, told in zip(group, report.documents, strict=True)}
            except (EngineDeadError, RequestError):  # nothing is in an engine that is no more, or is another
                found |= dict.fromkeys(group, False)
        return [found[document] for document in documents]

    def _is_stored(self, document: StoredDocument) -> bool:
        return self._stored.get((document.cache_salt, document.id)) is document

    def _dismiss(self, document: StoredDocument) -> asyncio.Task[None] | None:
        """One that is no longer stored waits for nothing and holds nothing; its K/V is forgotten unless it is wanted."""
        self.expire(document, None)
        self._unpin(document)
        self._owed.add(document.content)
        return self._let_go(document.content)

    def _unpin(self, document: StoredDocument) -> None:
        if document.pin is not None and self.is_pinned(document):
            self.llm.client.unpin([document.pin[0]])
        document.pin = None

    def _let_go(self, content: Content) -> asyncio.Task[None] | None:
        """One less wants it; the last one has it forgotten if that is owed."""
        self._wanted[content] -= 1
        if self._wanted[content]:
            return None
        del self._wanted[content]
        if content not in self._owed:
            return None
        task = asyncio.ensure_future(self._forget(content))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _forget(self, content: Content) -> None:
        """Have the engine forget K/V, unless somebody wants it again; what is on disk waits for an engine."""
        while content in self._owed and content not in self._wanted:
            try:
                async with self._turn:
                    requests = await asyncio.to_thread(self._requests, content)
                    if content in self._wanted or content not in self._owed:
                        return
                    # Nothing waits between this decision and the sending: a request that comes later is sent later.
                    self._owed.discard(content)
                    await self.llm.client.look_up(requests, forget=True)
            except RequestError as error:
                logger.warning("a document cannot be forgotten: %s", error)
                self._owed.discard(content)
            except ChunkAttnError:  # no engine
                self._owed.add(content)
                await asyncio.sleep(_AGAIN_S)

    def _requests(self, content: Content) -> list[PrecomputeRequest]:
        """Return the request for a document, as a list that is empty if the document and its prefix are."""
        salt, prefix, chunk = content
        job = precompute_job(self.llm.frontend, _ids(prefix), [_ids(chunk)], cache_salt=salt)
        return next(job.stages(), [])


def _missing(document_id: str) -> ApiError:
    return ApiError(404, f"there is no document {document_id!r} under this salt", code="document_not_found")


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def _ids(content: bytes) -> list[int]:
    return np.frombuffer(content, np.int32).tolist()
