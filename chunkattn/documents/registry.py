"""`Registry`: documents that clients store by id, pin, give a lifetime and delete."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal

from fastapi import Request

from chunkattn.documents.background import Background
from chunkattn.documents.keeper import Keeper, Kept
from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, RecordsError, Scope
from chunkattn.schema.documents import CacheBody, ForgetBody
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.options import ServerConfig

logger = logging.getLogger(__name__)

_MAX_ID_CHARS = 128
_RETRY_S = 5.0
ADVICE = "add it by POST /v1/cache/documents, or send its text"


class Registry:
    """Registry of the documents of a server or a gateway. A document is visible in its own scope only.

    The registry holds ids and contents; a keeper holds the K/V, which may be evicted unless a document is pinned. A document
    exists from the answer to its POST until it is deleted or expires, whatever becomes of its K/V.

    Args:
        records: records of the documents.
        keeper: holder of their K/V.
        config: options with the limits on documents.
        keys: API keys, whose holders own documents; None without keys.
    """

    def __init__(self, records: DocumentRecords, keeper: Keeper, config: ServerConfig, keys: Keys | None = None) -> None:
        self.records, self.keeper, self.config = records, keeper, config
        self._keys = keys if keys is not None and keys.file is not None else None
        self._restored = not len(records) and not records.owed
        self._restoring: asyncio.Task[None] | None = None
        self._coming: Counter[str | None] = Counter()  # documents in computation, by owner
        self._timers: dict[DocumentRecord, asyncio.TimerHandle] = {}
        self._background = Background()

    # Start and end

    @property
    def restored(self) -> bool:
        """Return whether the documents of an earlier process are restored; start that as soon as the keeper is ready."""
        if not self._restored and self._restoring is None and self.keeper.is_ready:
            self._restoring = self._background.start(self._restore())
        return self._restored

    async def restore(self) -> None:
        """Restore the documents of an earlier process, once the keeper is ready."""
        if not self.restored and self._restoring is not None:
            await asyncio.wait([self._restoring])

    async def _restore(self) -> None:
        while not self._restored:
            try:
                self._remove_gone()
                await self.keeper.restore()
                for record in self.records:
                    self._set_timer(record)
                self._restored = True
            except Exception:
                logger.exception("the documents cannot be restored")
                await asyncio.sleep(_RETRY_S)

    def _remove_gone(self) -> None:
        """Remove expired records and those of removed keys."""
        gone = self.records.expired(time.time())
        if self._keys is not None:
            removed = {record.scope.owner for record in self.records} - self._keys.salts - {None}
            if orphans := self.records.owned(removed):
                logger.warning("%d documents of %d removed API keys are deleted", len(orphans), len(removed))
                gone += orphans
        self._remove(gone)

    def close(self) -> None:
        """Close the records, and end the work in the background."""
        self.keeper.close()
        self._background.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self.records.close()

    def check_restored(self) -> None:
        """Check that the documents of an earlier process are known.

        Raises:
            ApiError: 503, they are not restored yet.
        """
        if not self.restored:
            text = "the server restores its documents; try again"
            raise ApiError(503, text, code="server_starting")

    # Reading

    def get(self, scope: Scope, document_id: str, place: str | None = None, advice: str = ADVICE) -> DocumentRecord:
        """Return the record of a document.

        Args:
            scope: scope of the request.
            document_id: id of the document.
            place: place in the request's body that names the document, for the error; None for a document of the path.
            advice: what the client can do instead, for the error.

        Raises:
            ApiError: 404, there is no usable document of this id.
        """
        self.check_restored()
        record = self.records.get(scope, document_id)
        if record is None or not record.is_live:
            raise _missing(document_id, record, place, advice)
        return record

    def page(self, scope: Scope, after: str | None, limit: int) -> tuple[list[DocumentRecord], bool]:
        """Return up to `limit` documents of a scope, oldest first, and whether more follow.

        Args:
            scope: scope of the documents.
            after: id of the document before the first returned document; None starts at the oldest document.
            limit: number of documents to return at most.

        Raises:
            ApiError: 404, no document has the id `after`.
        """
        self.check_restored()
        if after is not None:
            self.get(scope, after)
        return self.records.page(scope, after, limit)

    # Changes

    async def add(self, scope: Scope, body: CacheBody) -> list[tuple[DocumentRecord, Kept]]:
        """Store documents. A new document replaces the stored document of the same id.

        Args:
            scope: scope of the documents.
            body: body of the request.

        Raises:
            ApiError: 400, a document is empty, two share an id, or there are too many; 401, the owner's key was removed
                meanwhile; 503, the document store did not take the documents. Also as `Keeper.store`; nothing is stored.
            ChunkAttnError: the documents could not be computed; nothing is stored.
        """
        self.check_restored()
        records = await self.keeper.threads.run(_records_of, scope, body)
        owner, new = scope.owner, sum(self.records.get(scope, record.id) is None for record in records)
        self._check_count(owner, new)
        self._coming[owner] += new
        try:
            kept = await self.keeper.store(records, priority=body.priority, model=body.model)
        finally:
            self._coming[owner] -= new
            if not self._coming[owner]:
                del self._coming[owner]
        # No await from here to the end of the loop: the registry changes as a whole.
        replaced = [former for record in records if (former := self.records.get(scope, record.id)) is not None]
        try:
            if self._keys is not None and owner not in self._keys.salts:
                raise ApiError(401, "the API key was removed while the documents were computed", code="invalid_api_key")
            for record in records:
                record.expires = None if body.ttl_s is None else time.time() + body.ttl_s
            with _written():
                self.records.put(records)
        except ApiError:
            await self._forget(records)
            raise
        for record in records:
            self._set_timer(record)
        await self._forget(replaced)
        return list(zip(records, kept, strict=True))

    def _check_count(self, owner: str | None, new: int) -> None:
        """Check that `new` more documents fit the limits.

        Raises:
            ApiError: 400, a limit is exceeded.
        """
        limits = []
        if self._keys is not None:
            most = self.config.max_cached_documents_per_key
            limits.append(("max_cached_documents_per_key", most, self.records.count(owner) + self._coming[owner]))
        stored = sum(record.fault is None for record in self.records) + self._coming.total()
        limits.append(("max_cached_documents", self.config.max_cached_documents, stored))
        for option, most, before in limits:
            if before + new > most:
                text = f"{new} documents more would exceed {option} {most}; delete some first"
                raise ApiError(400, text, param="documents", code="too_many_documents")

    async def change(self, record: DocumentRecord, *, pinned: bool | None, ttl_s: float | Literal["never"] | None) -> None:
        """Pin a document, computing evicted K/V again, or unpin it; set its lifetime.

        Args:
            record: stored document.
            pinned: True to pin, False to unpin; None changes nothing.
            ttl_s: seconds from now until the document is deleted, or "never"; None changes nothing.

        Raises:
            ApiError: 404, the document was deleted or replaced meanwhile; 503, the document store did not take the change. Also
                as `Keeper.pin`.
            ChunkAttnError: as `Keeper.pin`.
        """
        if pinned:
            await self.keeper.pin(record)
        if self.records.get(record.scope, record.id) is not record:
            raise _missing(record.id)
        fields: dict[str, Any] = {} if pinned is None else {"pinned": pinned}
        if ttl_s is not None:
            fields["expires"] = None if ttl_s == "never" else time.time() + ttl_s
        try:
            with _written():
                self.records.change(record, **fields)
        except ApiError:
            if pinned and not record.pinned:
                await self.keeper.change(record)
            raise
        self._set_timer(record)
        if pinned is False or ttl_s is not None:
            await self.keeper.change(record)

    async def delete(self, scope: Scope, document_id: str) -> None:
        """Delete a document, and have its K/V forgotten even if the caller is cancelled.

        Raises:
            ApiError: 404, there is no document of this id; 503, the document store did not take the change.
        """
        self.check_restored()
        record = self.records.get(scope, document_id)
        if record is None or (record.fault is None and not record.is_live):
            raise _missing(document_id)
        with _written():
            self.records.remove([record])
        await self._forget([record])

    async def erase(self, scope: Scope, body: ForgetBody, request: Request) -> Any:
        """Forget the K/V of documents that were sent in prompts; see `Keeper.erase`.

        Args:
            scope: scope of the request.
            body: body of the request.
            request: the request.
        """
        records = await self.keeper.threads.run(_records_of, scope, body)
        return await self.keeper.erase(request, records, joins=body.chunk_mode == "joined")

    def delete_owned(self, owners: Set[str]) -> int:
        """Delete the documents of owners whose keys are no longer valid. Return their number.

        Args:
            owners: holders of API keys.
        """
        records = self.records.owned(owners)
        self._remove(records)
        self._background.start(self.keeper.forget(records))
        return len(records)

    # Lifetimes

    def _set_timer(self, record: DocumentRecord) -> None:
        """Have a document deleted at the end of its lifetime."""
        self._stop_timer(record)
        if record.expires is not None and record.fault is None:
            left = max(0.0, record.expires - time.time())
            self._timers[record] = asyncio.get_running_loop().call_later(left, self._expire, record)

    def _expire(self, record: DocumentRecord) -> None:
        self._remove([record])
        self._background.start(self.keeper.forget([record]))

    def _remove(self, records: Sequence[DocumentRecord]) -> None:
        """Remove records that no client may see again. One that the file does not take is removed at the next start."""
        try:
            self.records.remove(records)
        except RecordsError as error:
            logger.error("%s", error)
        for record in records:
            self._stop_timer(record)
            record.fault = "it is deleted"

    def _stop_timer(self, record: DocumentRecord) -> None:
        if (timer := self._timers.pop(record, None)) is not None:
            timer.cancel()

    async def _forget(self, records: Sequence[DocumentRecord]) -> None:
        """Have the keeper forget documents, even if the caller is cancelled."""
        for record in records:
            self._stop_timer(record)
        await asyncio.shield(self._background.start(self.keeper.forget(records)))


def _records_of(scope: Scope, body: CacheBody | ForgetBody) -> list[DocumentRecord]:
    """Return the records of new documents. A document without an id gets one from its content and prefix as they were sent.

    Raises:
        ApiError: 400, a document is empty, or two share an id and are not joined.
    """
    may_repeat = isinstance(body, ForgetBody) and body.chunk_mode == "joined"
    prefix = Prefix(body.start(), body.messages is not None, body.template_options())
    digest, numbers = blake2b(prefix.encode(), digest_size=16).digest(), dict[str, int]()
    records = []
    for number, (name, cite_as, source) in enumerate(zip(body.ids(), body.cited_ids(), body.texts(), strict=True)):
        if not source:
            raise ApiError(400, f"documents.{number} is empty", param="documents", code="invalid_value")
        content = blake2b(json.dumps(source).encode(), digest_size=12, key=digest)
        record = DocumentRecord(scope, name or f"doc-{content.hexdigest()}", prefix, source)
        if body.citations:
            record.cite_as = record.id if cite_as is None else cite_as
        if isinstance(body, CacheBody):
            record.pinned, record.keep_states = body.pin, body.keep_states
        if (first := numbers.setdefault(record.id, number)) < number and not may_repeat:
            text = f"documents.{number} has the id or the content of documents.{first}"
            raise ApiError(400, text, param="documents", code="invalid_value")
        records.append(record)
    return records


def _missing(
    document_id: str, record: DocumentRecord | None = None, place: str | None = None, advice: str = ADVICE
) -> ApiError:
    name = repr(document_id[:_MAX_ID_CHARS])
    if record is not None and record.fault is not None:
        text = f"the document {name} is in the document store, but this server cannot use it: {record.fault}"
        text += "; add it again, or delete it"
    elif place is not None:
        text = f"{place} names the document {name}, which is not stored under this salt: it was never added, was deleted or has"
        text += f" expired; {advice}"
    else:
        text = f"there is no document {name} under this salt"
    return ApiError(404, text, param="document_id" if place is None else "documents", code="document_not_found")


@contextmanager
def _written() -> Iterator[None]:
    """Answer 503 if the document store does not take a change."""
    try:
        yield
    except RecordsError as error:
        raise ApiError(503, str(error), code="document_store_failed") from None
