"""Restoring of stored documents from their records when a server starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

from chunkattn.calls.precompute import PrecomputeJob
from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, RecordsError
from chunkattn.errors import ChunkAttnError, EngineError, QueueFullError, RequestError
from chunkattn.server.document_pins import Pins
from chunkattn.server.stored_document import StoredDocument, as_bytes
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.options import ServerConfig

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_BATCH = 100
"""Documents that are parsed in one turn of a thread."""
_CONCURRENT_PINS = 4
_PIN_RETRY_S = 1.0


class Registry(Protocol):
    """Registry that takes the restored documents; see `Documents`."""

    llm: AsyncLLM
    config: ServerConfig
    unusable: dict[tuple[str | None, str], tuple[DocumentRecord, str]]
    pins: Pins

    def take(self, document: StoredDocument) -> None:
        """Add a document of the records."""

    def is_stored(self, document: StoredDocument) -> bool:
        """Return whether a document is still stored."""


def prefix_of(given: Any, documents: Sequence[Any], options: Mapping[str, Any]) -> Prefix:
    """Return the prefix of a record.

    Args:
        given: prefix of `PromptParser.parse_cache`.
        documents: documents of the same call.
        options: variables of the chat template.
    """
    has_texts = any(isinstance(document, str) for document in documents)
    is_chat = not isinstance(given, str) and (isinstance(given[0], Mapping) if len(given) else has_texts)
    return Prefix(given, is_chat, dict(options))


async def restore(registry: Registry, records: DocumentRecords, keys: Keys | None) -> None:
    """Parse the records and add their documents to a registry. Nothing is computed.

    Expired records and those of removed API keys are deleted. A record that this engine cannot use, because its tokenizer,
    its template or its limits have changed, stays in the file and among the `unusable` of the registry.

    Args:
        registry: registry of the documents.
        records: records of an earlier process.
        keys: API keys of the server; None for a server without keys.
    """
    began = time.monotonic()
    gone, owned = _drop(records, keys), keys is not None and keys.file is not None
    left = [record for record in records if record not in gone]
    wanted = [record for record in left if (record.scope.owner is not None) == owned]
    if others := len(left) - len(wanted):
        text = "%d documents of the document store belong to %s; they stay in the file and are not served"
        logger.warning(text, others, "no API key" if owned else "API keys, and this server has no api_key_file")
    groups: dict[tuple[str | None, int], list[DocumentRecord]] = {}
    for record in wanted:
        groups.setdefault((record.scope.cache_salt, id(record.prefix)), []).append(record)
    found = dict[DocumentRecord, StoredDocument | str]()
    for group in groups.values():
        for start in range(0, len(group), _BATCH):
            found |= await registry.llm.threads.run(_read, registry.llm, group[start : start + _BATCH])
    for record in wanted:
        if records.get(record.scope, record.id) is not record:  # its key was removed meanwhile
            continue
        document = found[record]
        if isinstance(document, str):
            registry.unusable[record.scope.cache_salt, record.id] = record, document
            text = "document %r of the document store cannot be used by this server, and stays in the file: %s"
            logger.warning(text, record.id, document)
        else:
            registry.take(document)
    count = len(wanted) - len(registry.unusable)
    logger.info("%d documents restored in %.1f s", count, time.monotonic() - began)


def _drop(records: DocumentRecords, keys: Keys | None) -> Set[DocumentRecord]:
    """Delete expired records and the records of removed keys, and return them."""
    gone = records.expired(time.time())
    if keys is not None and keys.file is not None:
        removed = {record.scope.owner for record in records} - keys.salts - {None}
        if own := records.owned(removed):
            logger.warning("%d documents of %d removed API keys are deleted", len(own), len(removed))
            gone += own
    try:
        records.remove(set(gone))
    except RecordsError as error:  # the next start tries again
        logger.error("%s", error)
    return set(gone)


def _read(llm: AsyncLLM, records: Sequence[DocumentRecord]) -> dict[DocumentRecord, StoredDocument | str]:
    """Return the documents of records of one scope and prefix, or why a record cannot be used."""
    first = records[0]
    try:
        if llm.config.position_strategy != "shared":
            raise RequestError("documents are stored only under position_strategy 'shared'")
        texts: list[Any] = [record.source for record in records]
        # A text tells the parser that an empty list is one of messages.
        parsed = [*texts, "?"] if first.prefix.is_chat else texts
        prefix, chunks = llm.frontend.parser.parse_cache(first.prefix.source, parsed, first.prefix.template_options)
        chunks = chunks[: len(records)]
        if not all(chunks):
            raise RequestError("the document is empty")
        salt = first.scope.cache_salt
        report = PrecomputeJob(llm.frontend, prefix, chunks, cache_salt=salt).result()
    except (ChunkAttnError, OverflowError) as error:
        if len(records) == 1:
            return {first: str(error)}
        return {record: found for one in records for record, found in _read(llm, [one]).items()}
    made = dict[DocumentRecord, StoredDocument | str]()
    for record, chunk, sizes in zip(records, chunks, report.documents, strict=True):
        content = salt, as_bytes(prefix), as_bytes(chunk)
        text = record.document if isinstance(record.document, str) else None
        owner = record.scope.owner
        made[record] = StoredDocument(record.id, content, sizes.num_bytes, text, owner, record.created, record=record)
    return made


async def pin_again(registry: Registry, documents: Sequence[StoredDocument]) -> None:
    """Compute and pin restored documents, a few at a time, until each is pinned, deleted, unpinned or refused.

    Args:
        registry: registry of the documents.
        documents: documents whose records are pinned.
    """
    turn = asyncio.Semaphore(_CONCURRENT_PINS)

    def is_wanted(document: StoredDocument) -> bool:
        return registry.is_stored(document) and document.record is not None and document.record.pinned

    async def pin(document: StoredDocument) -> None:
        while is_wanted(document) and not registry.pins.has(document):
            try:
                async with turn:
                    await registry.pins.compute(document, registry.config.request_timeout_s)
                if not is_wanted(document):
                    registry.pins.drop(document)
            except (EngineError, QueueFullError, TimeoutError):
                await asyncio.sleep(_PIN_RETRY_S)
            except (ApiError, ChunkAttnError) as error:
                if registry.is_stored(document):
                    logger.warning("document %r cannot be pinned again: %s", document.id, error)
                return

    async with asyncio.TaskGroup() as group:
        for document in documents:
            group.create_task(pin(document))
