"""Registry of cached documents: clients add them by id and salt, pin them, give them a lifetime and delete them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkattn.documents.records import DocumentRecord, DocumentRecords, RecordsError, Scope
from chunkattn.layout import Names
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.server.contents import Contents
from chunkattn.server.document_pins import Pins
from chunkattn.server.document_restore import pin_again, prefix_of, restore
from chunkattn.server.stored_document import Content, StoredDocument, as_bytes
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.options import ServerConfig

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_MAX_TOKENS_PER_POST = 1 << 21
"""Token limit of the documents that one POST adds, or that one request names by id. When documents are added, the prefix
counts once per document, because every engine message repeats it."""

_MAX_ID_CHARS = 128
_RETRY_S = 5.0


class Documents:
    """Registry of all documents of a server. A document is visible under its own salt only.

    The K/V of a document lives in the engine's cache and may be evicted unless the document is pinned. The registry stores ids
    and contents, so the server can list documents and have the engine forget them.

    Args:
        llm: engine that computes and caches the K/V.
        config: options with the limits on documents and pinned pages.
        records: records that survive the process; None keeps documents in memory alone. The documents of records are restored
            when the engine is ready; until then every call that needs a document is refused.
        keys: API keys, whose holders own documents.

    Attributes:
        contents: contents that the engine computes and forgets.
        pins: pins of the documents.
        unusable: records that this engine cannot use, with the reasons, by salt and id. They stay in the file.
    """

    def __init__(
        self, llm: AsyncLLM, config: ServerConfig, records: DocumentRecords | None = None, keys: Keys | None = None
    ) -> None:
        self.llm, self.config, self.records, self.keys = llm, config, records, keys
        self.unusable: dict[tuple[str | None, str], tuple[DocumentRecord, str]] = {}
        self._restored = records is None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stored: dict[tuple[str | None, str], StoredDocument] = {}
        self.contents = Contents(llm)
        self._coming: Counter[str | None] = Counter()  # documents in computation, by owner
        self.pins = Pins(llm, config, self.contents, self._stored.values())

    @property
    def _can_store(self) -> bool:
        """Return whether a document's K/V serves more than one prompt."""
        return self.llm.config.position_strategy == "shared"

    @property
    def restored(self) -> bool:
        """Return whether all documents of the records are restored; start the restoring as soon as the engine is ready."""
        if not self._restored and not self._tasks and self.llm.is_ready:
            self._tasks["restore"] = asyncio.ensure_future(self._restore())
        return self._restored

    async def restore(self) -> None:
        """Restore the documents of the records, once the engine is ready."""
        if not self.restored and self._tasks:
            await asyncio.wait([self._tasks["restore"]])

    def close(self) -> None:
        """Close the records. Restoring and pinning end."""
        for task in self._tasks.values():
            task.cancel()
        if self.records is not None:
            self.records.close()

    async def _restore(self) -> None:
        assert self.records is not None
        while not self._restored:
            try:
                await restore(self, self.records, self.keys)
                self._restored = True
            except Exception:
                logger.exception("the documents cannot be restored")
                await asyncio.sleep(_RETRY_S)
        if wanted := [d for d in self._stored.values() if d.record is not None and d.record.pinned]:
            self._tasks["pin"] = asyncio.ensure_future(pin_again(self, wanted))

    def _check_restored(self) -> None:
        if not self.restored:
            text = "the server restores its documents; try again"
            raise ApiError(503, text, code="server_starting", **{"Retry-After": "1"})

    def take(self, document: StoredDocument) -> None:
        """Add a document of the records."""
        self.contents.use([document.content])
        self._stored[document.cache_salt, document.id] = document
        if document.record is not None and document.record.expires is not None:
            self._set_expiry(document, document.record.expires)

    def get(self, document_id: str, cache_salt: str | None) -> StoredDocument:
        """Return a document.

        Args:
            document_id: id of the document.
            cache_salt: salt of the document.

        Raises:
            ApiError: 404, no document has this id under this salt.
        """
        self._check_restored()
        found = self._stored.get((cache_salt, document_id))
        if found is None:
            raise _missing(document_id, self.unusable.get((cache_salt, document_id)))
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
        if names:
            self._check_restored()
        found, tokens = dict[int, StoredDocument](), 0
        for number, name in names.items():
            document = self._stored.get((cache_salt, name))
            if document is None:
                if (cache_salt, name) in self.unusable:
                    raise _missing(name, self.unusable[cache_salt, name], "documents")
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
        self._check_restored()
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
                the owner's key was removed meanwhile; 503, the document store did not take the documents.
            ChunkAttnError: the documents could not be computed; no document is stored.
        """
        if not self._can_store:
            text = "documents can be cached one by one only under position_strategy 'shared'; else their K/V is of one prompt"
            raise ApiError(400, text, param="documents", code="unsupported_parameter")
        self._check_restored()
        self.llm.limits.check_count(len(texts), "documents", names.chunks)
        keys, contents = await self.llm.threads.run(self._prepare, prefix, texts, ids, cache_salt, options, names)
        new = sum((cache_salt, key) not in self._stored for key in keys)
        self._check_count(owner, new)
        coming = ExitStack()
        if pin:
            coming.enter_context(self.pins.coming(owner, contents))
        self._coming[owner] += new
        self.contents.use(contents)
        try:
            engine = self.llm.client.restarts
            make = partial(self.contents.job, contents, pin=pin, priority=priority, names=names)
            report = await self.llm.run(make, timeout)
            try:
                if not is_allowed():
                    raise ApiError(401, "the API key was removed while the documents were computed", code="invalid_api_key")
                until = None if ttl_s is None else time.time() + ttl_s
                start, scope = prefix_of(prefix, texts, options), Scope(owner, cache_salt)
                made = [DocumentRecord(scope, k, start, texts[n], expires=until, pinned=pin) for n, k in enumerate(keys)]
                records = self._record(made)
            except ApiError:
                self.contents.forget_unused(contents)
                if self.pins.is_engine(engine):
                    self.llm.client.unpin(report.pin_ids)
                raise
        except BaseException:
            for content in contents:
                self.contents.let_go(content)
            raise
        finally:
            self._coming[owner] -= new
            coming.close()
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
            self.unusable.pop((cache_salt, key), None)
            self._stored[cache_salt, key] = document
            document.record = records[number]
            self._set_expiry(document, until)
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
        if wanted:
            await self.pins.compute(document, timeout)
            if not self.is_stored(document):
                self.pins.drop(document)
                raise _missing(document.id)
        try:
            self._change(document, pinned=wanted)
        except ApiError:
            if wanted:
                self.pins.drop(document)
            raise
        if not wanted:
            self.pins.drop(document)

    def expire(self, document: StoredDocument, ttl_s: float | None) -> None:
        """Set a document's lifetime, replacing an earlier one.

        Args:
            document: stored document.
            ttl_s: seconds from now until the document is deleted; None keeps the document.

        Raises:
            ApiError: 404, the document was deleted meanwhile.
        """
        until = None if ttl_s is None else time.time() + ttl_s
        if ttl_s is not None and not self.is_stored(document):
            raise _missing(document.id)
        self._change(document, expires=until)
        self._set_expiry(document, until)

    def _set_expiry(self, document: StoredDocument, until: float | None) -> None:
        if document.timer is not None:
            document.timer.cancel()
        document.expires, document.timer = until, None
        if until is not None:
            left = max(0.0, until - time.time())
            document.timer = asyncio.get_running_loop().call_later(left, self._expired, document)

    def _expired(self, document: StoredDocument) -> None:
        del self._stored[document.cache_salt, document.id]
        self._dismiss(document)
        self._remove([document.record])

    async def delete(self, document: StoredDocument) -> None:
        """Delete a document and have the engine forget its K/V.

        The engine frees the pages when no request uses them any more, and deletes the K/V on disk. The deletion continues if
        the caller is cancelled.

        Raises:
            ApiError: 503, the document store did not take the change; the document stays.
        """
        if self.records is not None and document.record is not None:
            try:
                self.records.remove([document.record])
            except RecordsError as error:
                raise _not_taken(error) from None
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
        if self.records is not None:
            self._remove(self.records.owned(owners))
        return len(going)

    def delete_unusable(self, document_id: str, cache_salt: str | None) -> bool:
        """Delete the record of a document that this engine cannot use. Return whether there was one.

        Args:
            document_id: id of the document.
            cache_salt: salt of the document.

        Raises:
            ApiError: 503, the document store did not take the change.
        """
        if self.records is None or (cache_salt, document_id) not in self.unusable:
            return False
        try:
            self.records.remove([self.unusable[cache_salt, document_id][0]])
        except RecordsError as error:
            raise _not_taken(error) from None
        del self.unusable[cache_salt, document_id]
        return True

    async def forget(
        self,
        prefix: Any,
        texts: list[str] | list[list[int]],
        *,
        cache_salt: str | None,
        options: dict[str, Any],
        names: Names = DOCUMENT_NAMES,
    ) -> list[tuple[Content, bool]]:
        """Have the engine forget the K/V of documents, in memory and on disk, unless a stored document or a call uses it.

        The forgetting continues if the caller is cancelled.

        Args:
            prefix: see `add`.
            texts: text or token ids of each document.
            cache_salt: see `add`.
            options: see `add`.
            names: see `add`.

        Returns:
            Content of each document, and whether it was forgotten.

        Raises:
            ApiError: 400, a document is empty or repeated, or the documents are too long.
            RequestError: a part cannot be tokenized.
        """
        self._check_restored()
        self.llm.limits.check_count(len(texts), "documents", names.chunks)
        given = [None] * len(texts)
        _, contents = await self.llm.threads.run(self._prepare, prefix, texts, given, cache_salt, options, names)
        unused = [content for content in contents if content not in self.contents]
        self.contents.use(unused)
        self.contents.forget_unused(unused)
        if tasks := [task for content in unused if (task := self.contents.let_go(content))]:
            await asyncio.wait(tasks)
        return [(content, content in unused) for content in contents]

    async def cached(self, documents: Sequence[StoredDocument]) -> list[bool]:
        """Return for each document whether all of its K/V is in memory now.

        Args:
            documents: stored documents.
        """
        return await self.contents.cached([document.content for document in documents])

    def _record(self, records: list[DocumentRecord]) -> Sequence[DocumentRecord | None]:
        """Write new records, and return them as they are kept.

        Raises:
            ApiError: 503, the document store did not take them.
        """
        if self.records is None:
            return [None] * len(records)
        try:
            return self.records.put(records)
        except RecordsError as error:
            raise _not_taken(error) from None

    def _change(self, document: StoredDocument, **fields: Any) -> None:
        """Change the record of a document.

        Raises:
            ApiError: 503, the document store did not take the change; 404, the document was deleted meanwhile.
        """
        if self.records is None or document.record is None:
            return
        try:
            document.record = self.records.change(document.record, **fields)
        except KeyError:
            raise _missing(document.id) from None
        except RecordsError as error:
            raise _not_taken(error) from None

    def _remove(self, records: Sequence[DocumentRecord | None]) -> None:
        """Remove the records of documents that are gone; a record that stays is dropped at the next start."""
        try:
            if self.records is not None:
                self.records.remove([record for record in records if record is not None])
        except RecordsError as error:
            logger.error("%s", error)

    def is_stored(self, document: StoredDocument) -> bool:
        """Return whether a document is still stored."""
        return self._stored.get((document.cache_salt, document.id)) is document

    def _dismiss(self, document: StoredDocument) -> asyncio.Task[None] | None:
        """Cancel the timer and the pin of a removed document; forget its K/V when the last user leaves."""
        self._set_expiry(document, None)
        self.pins.drop(document)
        self.contents.forget_unused([document.content])
        return self.contents.let_go(document.content)


def _missing(document_id: str, unusable: tuple[DocumentRecord, str] | None = None, param: str = "document_id") -> ApiError:
    text = f"there is no document {document_id[:_MAX_ID_CHARS]!r} under this salt"
    if unusable is not None:
        text = (
            f"the document {document_id!r} is in the document store, but this server cannot use it: {unusable[1]}; add it "
            "again, or delete it"
        )
    return ApiError(404, text, param=param, code="document_not_found")


def _not_taken(error: RecordsError) -> ApiError:
    return ApiError(503, str(error), code="document_store_failed")
