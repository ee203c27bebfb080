"""Stored documents as the engine sees them, and their contents, which it computes, looks up and forgets."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chunkattn.calls.precompute import PrecomputeJob
from chunkattn.citations import Document
from chunkattn.documents.background import Background
from chunkattn.documents.records import DocumentRecord, DocumentRecords
from chunkattn.errors import ChunkAttnError, EngineDeadError, RequestError

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM
    from chunkattn.engine.messages import PrecomputeRequest
    from chunkattn.outputs import RequestOutput

logger = logging.getLogger(__name__)

_FORGET_RETRY_S = 1.0
_MAX_CONCURRENT_FORGETS = 4
"""Limit on concurrent forget calls to the engine, regardless of how many documents expire together."""
_LOOKUP_BATCH = 100
"""Documents per lookup message. The engine answers a message between two steps."""
_ID_BYTES = 4

Content = tuple[str | None, bytes, bytes]
"""Key of a document's K/V: salt, then the int32 token ids of prefix and document as bytes."""


@dataclass(eq=False)
class StoredDocument:
    """Stored document after its prefix.

    Attributes:
        record: record of the document.
        content: salt, prefix ids and document ids.
        pin: pin id, and the engine's restart count when the pin was made. A restart of the engine drops all pins.
    """

    record: DocumentRecord
    content: Content
    pin: tuple[str, int] | None = None

    @property
    def text(self) -> str | None:
        """Return the text without the document template; None for a document given as token ids."""
        return self.record.document if isinstance(self.record.document, str) else None

    @property
    def chunk(self) -> np.ndarray:
        """Return the int32 token ids of the document's chunk, with the document template."""
        return np.frombuffer(self.content[2], np.int32)

    @property
    def source(self) -> str | np.ndarray:
        """Return the document without the document template: its text, or the token ids it was given as."""
        return self.chunk if self.text is None else self.text

    def content_for(self, *, cited: bool) -> Any:
        """Return the document as a prompt takes it: its chunk, or what the parser makes the chunk of.

        Args:
            cited: whether the prompt's documents have markers.
        """
        record = self.record
        if cited:
            return Document(record.source, record.id if record.cite_as is None else record.cite_as)
        return self.chunk if record.cite_as is None else record.source

    def follows(self, output: RequestOutput) -> bool:
        """Return whether the prompt of an output has the prefix that the document was stored after."""
        prefix = self.content[1]
        return count_ids(prefix) == output.prefix_len and prefix == as_bytes(output.prompt_token_ids[: output.prefix_len])


class Contents:
    """Contents of stored documents, with the number of their users. The engine forgets an owed content with its last user.

    Args:
        llm: engine that computes and caches the K/V.
        records: records of the documents, which are settled when their contents are forgotten.
    """

    def __init__(self, llm: AsyncLLM, records: DocumentRecords) -> None:
        self.llm, self._records = llm, records
        self._users: Counter[Content] = Counter()  # stored documents and calls in flight
        self._owed: dict[Content, list[DocumentRecord]] = {}  # contents to forget when their last user leaves
        self._turn = asyncio.Semaphore(_MAX_CONCURRENT_FORGETS)
        self._background = Background()

    def __contains__(self, content: Content) -> bool:
        return content in self._users

    def use(self, contents: Iterable[Content]) -> None:
        """Add one user to each content."""
        self._users.update(contents)

    def keep(self, content: Content) -> None:
        """Cancel the pending forget of a content."""
        for record in self._owed.pop(content, ()):
            self._records.settle(record)

    def owe(self, content: Content, record: DocumentRecord | None = None) -> None:
        """Have the engine forget a content when its last user leaves; see `let_go`.

        Args:
            content: the content.
            record: removed document of the content.
        """
        self._owed.setdefault(content, []).extend([record] if record is not None else [])

    def let_go(self, content: Content) -> asyncio.Task[None] | None:
        """Remove one user of a content. Return the started forget if one was pending and the user was the last."""
        self._users[content] -= 1
        if self._users[content]:
            return None
        del self._users[content]
        if content not in self._owed:
            return None
        return self._background.start(self._forget(content))

    async def _forget(self, content: Content) -> None:
        """Have the engine forget a content, unless it has a new user. Without an engine, retry until there is one."""
        while content in self._owed and content not in self._users:
            try:
                async with self._turn:
                    requests = await self.llm.threads.run(self._requests, content)
                    if content in self._users or content not in self._owed:
                        return
                    # No await between this check and the sending, so a later request reaches the engine later.
                    settled = self._owed.pop(content)
                    try:
                        await self.llm.client.look_up(requests, forget=True)
                    except BaseException:
                        self._owed.setdefault(content, []).extend(settled)
                        raise
                    for record in settled:
                        self._records.settle(record)
            except RequestError as error:
                logger.warning("a document cannot be forgotten: %s", error)
                self.keep(content)
            except ChunkAttnError:  # the engine is not running
                await asyncio.sleep(_FORGET_RETRY_S)

    def _requests(self, content: Content) -> list[PrecomputeRequest]:
        """Return the engine requests of a document; the list is empty if document and prefix are empty."""
        return next(self.job([content]).stages(), [])

    def job(self, contents: Sequence[Content], **options: Any) -> PrecomputeJob:
        """Return the job of contents under one salt and prefix, whose ids need no parser.

        Args:
            contents: at least one content.
            **options: options of `PrecomputeJob`.
        """
        salt, prefix, _ = contents[0]
        documents = [as_ids(chunk) for _, _, chunk in contents]
        return PrecomputeJob(self.llm.frontend, as_ids(prefix), documents, cache_salt=salt, **options)

    async def cached(self, contents: Sequence[Content]) -> list[tuple[bool, bool]]:
        """Return for each content whether all of its K/V, and the state at its end, is in memory now."""
        cached: dict[Content, tuple[bool, bool]] = {}
        groups: dict[tuple[str | None, bytes], list[Content]] = {}
        for content in dict.fromkeys(contents):
            groups.setdefault(content[:2], []).append(content)
        parts = ((k, g[n : n + _LOOKUP_BATCH]) for k, g in groups.items() for n in range(0, len(g), _LOOKUP_BATCH))
        for (salt, prefix), group in parts:
            try:
                report = await self.llm.lookup(as_ids(prefix), [as_ids(chunk) for _, _, chunk in group], cache_salt=salt)
                pairs = [(one.was_cached, one.state_kept) for one in report.documents]
                cached |= dict(zip(group, pairs, strict=True))
            except (EngineDeadError, RequestError):  # a dead engine holds nothing; a new engine may refuse the ids
                cached |= dict.fromkeys(group, (False, False))
        return [cached[content] for content in contents]


def as_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes."""
    return np.asarray(ids, np.int32).tobytes()


def as_ids(content: bytes) -> list[int]:
    """Return the token ids of int32 bytes."""
    return np.frombuffer(content, np.int32).tolist()


def count_ids(content: bytes) -> int:
    """Return the number of token ids in int32 bytes."""
    return len(content) // _ID_BYTES
