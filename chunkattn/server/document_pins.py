"""Pins of stored documents: the engine does not evict their K/V, which may hold a share of its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from chunkattn.server.contents import Contents
from chunkattn.server.stored_document import Content, StoredDocument, count_ids
from chunkattn.web.errors import ApiError
from chunkattn.web.options import ServerConfig

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM


class Pins:
    """Pins of the documents of a registry.

    Args:
        llm: engine that holds the pins.
        config: options with the limits on pinned pages.
        contents: contents that the engine computes.
        stored: the stored documents of the registry, pinned or not; read at every check.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig, contents: Contents, stored: Iterable[StoredDocument]) -> None:
        self._llm, self._config, self._contents, self._stored = llm, config, contents, stored
        self._coming: Counter[tuple[str | None, Content]] = Counter()  # pins in computation, by owner and content

    @contextmanager
    def coming(self, owner: str | None, contents: Sequence[Content]) -> Iterator[None]:
        """Count contents as pinned while they are computed.

        Args:
            owner: holder of the API key that owns the documents.
            contents: contents to pin.

        Raises:
            ApiError: 400, the pinned pages would exceed a share of the pool.
        """
        self._check(owner, contents)
        own = Counter((owner, content) for content in contents)
        self._coming += own
        try:
            yield
        finally:
            self._coming -= own

    def _check(self, owner: str | None, contents: Sequence[Content]) -> None:
        """Check that `contents` can be pinned beside the present pins.

        Raises:
            ApiError: 400, the pinned pages would exceed a share of the pool.
        """
        held = {*((d.owner, d.content) for d in self._stored if self.has(d)), *self._coming}
        limits = [("max_pinned_share", self._config.max_pinned_share, {content for _, content in held})]
        if owner is not None:
            own = {content for name, content in held if name == owner}
            limits.append(("max_pinned_share_per_key", self._config.max_pinned_share_per_key, own))
        for option, share, before in limits:
            most = int(share * self._llm.limits.num_pages)
            if self._pages({*before, *contents}) > most:
                text = (
                    f"the documents need {self._pages(set(contents))} KV pages with their prefix; pinned documents may hold "
                    f"{most} ({option} {share:g} of the pool), and too few are left; unpin documents, or do not pin these"
                )
                raise ApiError(400, text, param="documents", code="too_many_pins")

    def _pages(self, contents: set[Content]) -> int:
        """Return the KV pages of documents and their prefixes; a shared prefix counts once."""
        prefixes = {content[:2] for content in contents}
        size = self._llm.limits.block_size
        return sum(-(-count_ids(ids) // size) for _, ids in prefixes) + sum(
            -(-count_ids(content[2]) // size) for content in contents
        )

    def has(self, document: StoredDocument) -> bool:
        """Return whether the present engine process holds the document's pin."""
        return document.pin is not None and self.is_engine(document.pin[1])

    def is_engine(self, restarts: int) -> bool:
        """Return whether the engine process after `restarts` restarts runs now."""
        return restarts == self._llm.client.restarts and self._llm.client.is_ready

    async def compute(self, document: StoredDocument, timeout: float) -> None:
        """Pin a document in the engine, computing evicted K/V again, and leave its record as it is.

        Args:
            document: stored document, which may be deleted meanwhile.
            timeout: time limit in seconds.

        Raises:
            ApiError: 400, the pins would exceed their share of the pool.
            ChunkAttnError: the document could not be computed.
        """
        engine = self._llm.client.restarts
        with self.coming(document.owner, [document.content]):
            self._contents.use([document.content])
            try:
                report = await self._llm.run(partial(self._contents.job, [document.content], pin=True), timeout)
                self.drop(document)
                document.pin = report.pin_ids[0], engine
            finally:
                self._contents.let_go(document.content)

    def drop(self, document: StoredDocument) -> None:
        """Let the engine evict a document, and leave its record as it is."""
        if document.pin is not None and self.has(document):
            self._llm.client.unpin([document.pin[0]])
        document.pin = None
