"""`EngineKeeper`: keeper of the stored documents of a server, over its engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request

from chunkattn.calls.precompute import PrecomputeJob
from chunkattn.documents.keeper import Kept
from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, Scope
from chunkattn.documents.registry import ADVICE, Registry
from chunkattn.errors import ChunkAttnError, EngineError, QueueFullError, RequestError
from chunkattn.fair_threads import FairThreads
from chunkattn.layout import Names
from chunkattn.parsers.joined import joined_ids
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.schema.base import Body
from chunkattn.server.contents import Content, Contents, StoredDocument, as_bytes, as_ids, count_ids
from chunkattn.web.errors import ApiError
from chunkattn.web.options import ServerConfig

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_MAX_TOKENS_PER_POST = 1 << 21
"""Token limit of the documents that one POST adds, or that one request names by id. When documents are added, the prefix
counts once per document, because every engine message repeats it."""
_SHOWN_TOKENS = 256
"""Tokens of a prefix that an entry shows as text."""
_BATCH = 100
"""Records that are parsed in one turn of a thread."""
Pinned = tuple[Content, bool]
"""Content that is pinned, and whether the state at its end is."""
_CONCURRENT_PINS = 4
_PIN_RETRY_S = 1.0


class EngineKeeper:
    """Keeper of documents over an engine; see `chunkattn.documents.keeper.Keeper`.

    Args:
        llm: the engine.
        config: options of the server.
        records: records of the documents.
        check: see `Keeper.check`.
        adapter_of: function that returns the adapter of a model's name, or raises `ApiError`.

    Attributes:
        contents: contents that the engine computes and forgets.
        documents: usable documents of the records, and those in computation, as the engine sees them.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        records: DocumentRecords,
        check: Callable[[Body | None], None],
        adapter_of: Callable[[str | None], str | None],
    ) -> None:
        self.llm, self.config, self.records, self.check, self._adapter_of = llm, config, records, check, adapter_of
        self.contents = Contents(self.llm, records)
        self.documents: dict[DocumentRecord, StoredDocument] = {}
        self._users: Counter[Content] = Counter()  # stored documents of a content
        self._coming: Counter[tuple[str | None, Content, bool]] = Counter()  # pins in computation, see `_room`
        self._pinning: asyncio.Task[None] | None = None

    @property
    def threads(self) -> FairThreads:
        """Return the engine's threads for the CPU work of clients."""
        return self.llm.threads

    @property
    def is_ready(self) -> bool:
        """Return whether documents can be parsed."""
        return self.llm.is_ready

    @property
    def _can_store(self) -> bool:
        """Return whether a document's K/V serves more than one prompt."""
        return self.llm.config.position_strategy == "shared"

    def close(self) -> None:
        """End the pinning of restored documents."""
        if self._pinning is not None:
            self._pinning.cancel()

    def scope(self, request: Request, cache_salt: str | None, model: str | None) -> Scope:
        """Return the namespace of a client's document ids."""
        caller = request.state.caller
        caller.adapter = self._adapter_of(model)
        return Scope(caller.document_owner, caller.salt(cache_salt))

    def named(self, registry: Registry, names: Mapping[int, str], scope: Scope, field: str) -> dict[int, StoredDocument]:
        """Return the documents that a request names by id, by their place in the request.

        Args:
            registry: registry of the documents.
            names: ids by the place of the document in the request.
            scope: scope of the request.
            field: place of the documents in the request's body, for error texts.

        Raises:
            ApiError: 404, no document has one of the ids in this scope; 400, the documents together are too long.
        """
        advice = ADVICE
        if not self._can_store:
            strategy = self.llm.config.position_strategy
            advice = f"under position_strategy {strategy!r} this server stores no documents, so send its text"
        named, tokens = dict[int, StoredDocument](), 0
        for number, name in names.items():
            record = registry.get(scope, name, f"{field}.{number}", advice)
            named[number] = self.documents[record]
            if (tokens := tokens + (record.tokens or 0)) > _MAX_TOKENS_PER_POST:
                text = f"the documents named by id have more than {_MAX_TOKENS_PER_POST} tokens; send fewer at once"
                raise ApiError(400, text, param="documents", code="too_many_documents")
        return named

    async def store(self, records: Sequence[DocumentRecord], *, priority: int, model: str | None) -> list[Kept]:
        """Compute new documents, and set their sizes; see `Keeper.store`."""
        first, names = records[0], _names(records[0].prefix)
        if not self._can_store:
            text = "documents can be cached one by one only under position_strategy 'shared'; else their K/V is of one prompt"
            raise ApiError(400, text, param="documents", code="unsupported_parameter")
        contents = await self._parse(records)
        with self._room(first, contents) if first.pinned else nullcontext():
            self.contents.use(contents)
            try:
                engine = self.llm.client.restarts
                options = {"pin": first.pinned, "priority": priority, "keep_states": first.keep_states, "names": names}
                make = partial(self.contents.job, contents, **options)
                report = await self.llm.run(make, self.config.request_timeout_s)
            except BaseException:
                for content in contents:
                    self.contents.let_go(content)
                raise
        for number, (record, content, cached) in enumerate(zip(records, contents, report.documents, strict=True)):
            record.num_bytes = cached.num_bytes
            self._take(record, content).pin = (report.pin_ids[number], engine) if first.pinned else None
        shown = self._shown([content[1] for content in contents])
        return [
            Kept(True, first.pinned, shown[content[1]], cached.was_cached, cached.state_kept)
            for content, cached in zip(contents, report.documents, strict=True)
        ]

    async def _parse(self, records: Sequence[DocumentRecord]) -> list[Content]:
        """Return the contents of new documents of one scope and prefix.

        Raises:
            ApiError: 400, a document is empty, or the documents together are too long.
            RequestError: a part cannot be tokenized.
        """
        prefix, salt, names = records[0].prefix, records[0].scope.cache_salt, _names(records[0].prefix)

        def parse() -> list[Content]:
            sources: list[Any] = [record.marked for record in records]
            prefix_ids, chunks = self.llm.frontend.parser.parse_cache(prefix.source, sources, prefix.template_options, names)
            if not all(chunks):
                text = f"documents.{next(n for n, chunk in enumerate(chunks) if not chunk)} is empty"
                raise ApiError(400, text, param="documents", code="invalid_value")
            if len(prefix_ids) * len(chunks) + sum(map(len, chunks)) > _MAX_TOKENS_PER_POST:
                text = f"documents, each with the prefix, have more than {_MAX_TOKENS_PER_POST} tokens; send fewer at once"
                raise ApiError(400, text, param="documents", code="too_many_documents")
            start = as_bytes(prefix_ids)
            return [(salt, start, as_bytes(chunk)) for chunk in chunks]

        return await self.threads.run(parse)

    def _take(self, record: DocumentRecord, content: Content) -> StoredDocument:
        """Return a new document, whose content has one more stored user."""
        record.prefix_tokens, record.tokens = count_ids(content[1]), count_ids(content[2])
        self.contents.keep(content)
        self._users[content] += 1
        document = self.documents[record] = StoredDocument(record, content)
        return document

    async def look_up(self, records: Sequence[DocumentRecord]) -> list[Kept]:
        """Return the state of documents."""
        documents = [self.documents[record] for record in records]
        cached = await self.contents.cached([document.content for document in documents])
        shown = self._shown([document.content[1] for document in documents])
        needs_state, kept = self.llm.limits.recurrent if self.llm.is_ready else False, list[Kept]()
        for document, (is_cached, state_kept) in zip(documents, cached, strict=True):
            is_cached &= state_kept or not (needs_state and document.record.keep_states)
            # A failed step drops cached K/V, pinned documents included.
            has_pin = is_cached and self.has_pin(document)
            kept.append(Kept(is_cached, has_pin, shown[document.content[1]], state_kept=state_kept))
        return kept

    def _shown(self, prefixes: Iterable[bytes]) -> dict[bytes, str | None]:
        """Return the beginning of each prefix as text; None without a tokenizer."""
        tokenizer = self.llm.frontend.tokenizer
        return {p: None if tokenizer is None else str(tokenizer.decode(as_ids(p)[:_SHOWN_TOKENS])) for p in set(prefixes)}

    async def forget(self, records: Sequence[DocumentRecord]) -> None:
        """Forget documents. Without an engine, wait until there is one."""
        tasks = []
        for record in records:
            if (document := self.documents.pop(record, None)) is None:
                self.records.settle(record)
                continue
            self._unpin(document)
            content = document.content
            self._users[content] -= 1
            if self._users[content]:
                self.records.settle(record)
            else:
                del self._users[content]
                self.contents.owe(content, record)
            if task := self.contents.let_go(content):
                tasks.append(task)
        if tasks:
            await asyncio.wait(tasks)

    async def erase(self, request: Request, records: Sequence[DocumentRecord], *, joins: bool) -> dict[str, Any]:
        """Forget contents, in memory and on disk, unless a stored document or a call uses them."""
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                contents = await self._parse(records)
                if joins:
                    (chunk,) = joined_ids([as_ids(own) for _, _, own in contents])
                    contents = [(*contents[0][:2], as_bytes(chunk))]
                unused = [content for content in dict.fromkeys(contents) if content not in self.contents]
                self.contents.use(unused)
                for content in unused:
                    self.contents.owe(content)
                if tasks := [task for content in unused if (task := self.contents.let_go(content))]:
                    await asyncio.wait(tasks)
        except TimeoutError:
            raise ApiError(504, "the K/V is forgotten as soon as the engine answers", code="timeout") from None
        done = set(unused)
        entries = [
            {"object": "cache.document.forgotten", "index": n, "tokens": count_ids(content[2]), "forgotten": content in done}
            for n, content in enumerate(contents)
        ]
        return {"object": "list", "data": entries}

    # Pins

    async def pin(self, record: DocumentRecord) -> None:
        """Pin a document, computing evicted K/V again."""
        document, engine = self.documents[record], self.llm.client.restarts
        with self._room(record, [document.content]):
            self.contents.use([document.content])
            try:
                make = partial(self.contents.job, [document.content], pin=True, keep_states=record.keep_states)
                report = await self.llm.run(make, self.config.request_timeout_s)
                self._unpin(document)
                document.pin = report.pin_ids[0], engine
                if record not in self.documents:
                    self._unpin(document)
            finally:
                self.contents.let_go(document.content)

    async def change(self, record: DocumentRecord) -> None:
        """Let the engine evict a document that is not pinned any more."""
        if not record.pinned:
            self._unpin(self.documents[record])

    def has_pin(self, document: StoredDocument) -> bool:
        """Return whether the present engine process holds the document's pin."""
        client = self.llm.client
        return document.pin is not None and document.pin[1] == client.restarts and client.is_ready

    def _unpin(self, document: StoredDocument) -> None:
        if document.pin is not None and self.has_pin(document):
            self.llm.client.unpin([document.pin[0]])
        document.pin = None

    @contextmanager
    def _room(self, record: DocumentRecord, contents: Sequence[Content]) -> Iterator[None]:
        """Count contents as pinned while they are computed, each by its owner and with whether its state is pinned.

        Args:
            record: record with the owner of the documents, and whether their states are kept.
            contents: contents to pin.

        Raises:
            ApiError: 400, the pinned pages or states would exceed a share of all.
        """
        owner, keeps = record.scope.owner, record.keep_states
        pinned = {(r.scope.owner, d.content, r.keep_states) for r, d in self.documents.items() if self.has_pin(d)}
        pinned |= self._coming.keys()
        config, new = self.config, {(content, keeps) for content in contents}
        shares = [("max_pinned_share", config.max_pinned_share, {(content, kept) for _, content, kept in pinned})]
        if owner is not None:
            others = {(content, kept) for holder, content, kept in pinned if holder == owner}
            shares.append(("max_pinned_share_per_key", config.max_pinned_share_per_key, others))
        for option, share, before in shares:
            self._check_share(option, share, before, new)
        coming = Counter((owner, content, keeps) for content in contents)
        self._coming += coming
        try:
            yield
        finally:
            self._coming -= coming

    def _check_share(self, option: str, share: float, before: set[Pinned], new: set[Pinned]) -> None:
        """Check that contents can be pinned beside others; see `_room`.

        Args:
            option: name of the option that limits the share.
            share: its value.
            before: contents that are pinned.
            new: contents to pin.

        Raises:
            ApiError: as `_room`.
        """
        limits = self.llm.limits
        for unit, all_of_them, count in (("KV pages", limits.num_pages, self._pages), ("states", limits.state_slots, _states)):
            most = int(share * all_of_them)
            if all_of_them and count(before | new) > most:
                text = (
                    f"the documents need {count(new)} {unit} with their prefix; pinned documents may hold {most} ({option} "
                    f"{share:g} of all), and too few are left; unpin documents, or do not pin these"
                )
                text += ", or raise state_cache_memory_bytes" if unit == "states" else ""
                raise ApiError(400, text, param="documents", code="too_many_pins")

    def _pages(self, pinned: set[Pinned]) -> int:
        """Return the KV pages of documents and their prefixes; a shared prefix counts once."""
        contents = {content for content, _ in pinned}
        parts = [prefix for _, prefix in {content[:2] for content in contents}] + [content[2] for content in contents]
        return sum(-(-count_ids(part) // self.llm.limits.block_size) for part in parts)

    # Documents of an earlier process

    async def restore(self) -> None:
        """Parse the records, and pin the pinned documents in the background. Nothing else is computed.

        A record that this engine cannot use, because its tokenizer, its template or its limits have changed, stays in the file.
        """
        began, has_keys = time.monotonic(), self.config.api_key_file is not None
        records = []
        for record in self.records:
            if (record.scope.owner is not None) == has_keys:
                records.append(record)
            else:
                record.fault = "it belongs to no API key" if has_keys else "it belongs to an API key"
        if others := len(self.records) - len(records):
            text = "%d documents of the document store belong to %s; they stay in the file and are not served"
            logger.warning(text, others, "no API key" if has_keys else "API keys, and this server has no api_key_file")
        parsed = await self._parse_records([*records, *self.records.owed])
        for record in records:
            if self.records.get(record.scope, record.id) is not record or record in self.documents:
                continue  # its key was removed meanwhile, or restoring is repeated
            if record in parsed:
                content, record.num_bytes = parsed[record]
                self._take(record, content)
            else:
                text = "document %r of the document store cannot be used by this server, and stays in the file: %s"
                logger.warning(text, record.id, record.fault)
        for record in list(self.records.owed):
            if record not in parsed or parsed[record][0] in self._users:
                self.records.settle(record)
            else:
                content, _ = parsed[record]
                self.contents.use([content])
                self.contents.owe(content, record)
                self.contents.let_go(content)
        logger.info("%d documents restored in %.1f s", len(self.documents), time.monotonic() - began)
        if pinned := [record for record in self.documents if record.pinned]:
            self._pinning = asyncio.ensure_future(self._pin_again(pinned))

    async def _parse_records(self, records: Sequence[DocumentRecord]) -> dict[DocumentRecord, tuple[Content, int]]:
        """Return content and bytes of the K/V of the records that the engine can use; give the others their `fault`."""
        groups: dict[tuple[str | None, int], list[DocumentRecord]] = {}
        for record in records:
            groups.setdefault((record.scope.cache_salt, id(record.prefix)), []).append(record)
        parsed = dict[DocumentRecord, tuple[Content, int]]()
        for group in groups.values():
            for start in range(0, len(group), _BATCH):
                parsed |= await self.threads.run(self._read, group[start : start + _BATCH])
        return parsed

    def _read(self, records: Sequence[DocumentRecord]) -> dict[DocumentRecord, tuple[Content, int]]:
        """Parse records of one scope and prefix; see `_parse_records`."""
        prefix, salt = records[0].prefix, records[0].scope.cache_salt
        try:
            if not self._can_store:
                raise RequestError("documents are stored only under position_strategy 'shared'")
            texts: list[Any] = [record.marked for record in records]
            # A text tells the parser that an empty list is one of messages.
            sources = [*texts, "?"] if prefix.is_chat else texts
            prefix_ids, chunks = self.llm.frontend.parser.parse_cache(prefix.source, sources, prefix.template_options)
            chunks = chunks[: len(records)]
            if not all(chunks):
                raise RequestError("the document is empty")
            sizes = PrecomputeJob(self.llm.frontend, prefix_ids, chunks, cache_salt=salt).result().documents
        except (ChunkAttnError, OverflowError) as error:
            if len(records) == 1:
                records[0].fault = str(error)
                return {}
            return {record: read for one in records for record, read in self._read([one]).items()}
        start = as_bytes(prefix_ids)
        return {
            record: ((salt, start, as_bytes(chunk)), size.num_bytes)
            for record, chunk, size in zip(records, chunks, sizes, strict=True)
        }

    async def _pin_again(self, records: Sequence[DocumentRecord]) -> None:
        """Compute and pin restored documents, a few at a time, until each is pinned, deleted, unpinned or refused."""
        turn = asyncio.Semaphore(_CONCURRENT_PINS)

        async def pin(record: DocumentRecord) -> None:
            while (document := self.documents.get(record)) is not None and record.pinned and not self.has_pin(document):
                try:
                    async with turn:
                        await self.pin(record)
                    if not record.pinned:
                        self._unpin(document)
                except (EngineError, QueueFullError, TimeoutError):
                    await asyncio.sleep(_PIN_RETRY_S)
                except (ApiError, ChunkAttnError) as error:
                    if record in self.documents:
                        logger.warning("document %r cannot be pinned again: %s", record.id, error)
                    return

        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(pin(record))


def _states(pinned: set[Pinned]) -> int:
    """Return the states that pins hold in a model with recurrent layers; a shared prefix counts once."""
    return len({content[:2] for content, _ in pinned if content[1]}) + len({content for content, keeps in pinned if keeps})


def _names(prefix: Prefix) -> Names:
    """Return the names that a request has for prefix and documents."""
    return DOCUMENT_NAMES._replace(prefix="messages") if prefix.is_chat else DOCUMENT_NAMES
