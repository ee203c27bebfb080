"""`Keeper`: what computes and holds the K/V of stored documents, on behalf of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fastapi import Request

from chunkattn.documents.records import DocumentRecord, Scope
from chunkattn.fair_threads import FairThreads
from chunkattn.schema.base import Body


class Kept(NamedTuple):
    """State of a document's K/V.

    Attributes:
        cached: whether all of it is in memory.
        pinned: whether it is protected from eviction.
        prefix: beginning of the document's prefix as text; None if unknown.
        was_cached: whether it was in memory before the document was stored.
        state_kept: whether the state at the document's end is in memory, too; False without recurrent layers.
    """

    cached: bool = False
    pinned: bool = False
    prefix: str | None = None
    was_cached: bool = False
    state_kept: bool = False


class Keeper(Protocol):
    """Holder of the K/V of documents: an engine, or the replicas behind a gateway."""

    @property
    def threads(self) -> FairThreads:
        """Return the threads for the CPU work of clients."""

    @property
    def is_ready(self) -> bool:
        """Return whether the keeper can restore the documents of an earlier process."""

    def scope(self, request: Request, cache_salt: str | None, model: str | None) -> Scope:
        """Return the namespace of a client's document ids.

        Args:
            request: request of the client.
            cache_salt: salt that it gives.
            model: name of a model that it gives; an adapter's documents have a namespace of their own.
        """

    def check(self, body: Body | None, /) -> None:
        """Check that a request can be served.

        Args:
            body: body of the request; None for a request without one.

        Raises:
            ApiError: no work is accepted now, or a field is not allowed.
        """

    async def restore(self) -> None:
        """Take the documents of the records, give unusable ones their `fault`, and forget what is owed."""

    async def store(self, records: Sequence[DocumentRecord], *, priority: int, model: str | None) -> list[Kept]:
        """Compute new documents of one scope and prefix, all or none, and set their sizes.

        Args:
            records: documents, whose pins are those that they shall have. None is in the records yet.
            priority: priority of the computation.
            model: name of the model in the request.

        Raises:
            ApiError: the documents cannot be stored.
            ChunkAttnError: as `ApiError`.
        """

    async def look_up(self, records: Sequence[DocumentRecord]) -> list[Kept]:
        """Return the state of documents."""

    async def pin(self, record: DocumentRecord) -> None:
        """Protect a document, computed again if it was evicted. The pin of one that is deleted meanwhile ends.

        Raises:
            ApiError: the document cannot be pinned.
            ChunkAttnError: as `ApiError`.
        """

    async def change(self, record: DocumentRecord) -> None:
        """Note that a document is no longer pinned, or that its lifetime has changed."""

    async def forget(self, records: Sequence[DocumentRecord]) -> None:
        """Forget documents that are not in the records any more, or were stored and never came there, and settle them.

        Returns when they are forgotten, or are to be forgotten later. Called whenever documents came into the records or left.
        """

    async def erase(self, request: Request, records: Sequence[DocumentRecord], *, joins: bool) -> Any:
        """Forget the K/V of documents that were sent in prompts, unless a stored document uses it. Return the answer's body.

        Args:
            request: request of the client.
            records: the documents, which are not stored.
            joins: whether the prompts had the documents as one chunk.

        Raises:
            ApiError: the K/V cannot be forgotten now.
            ChunkAttnError: as `ApiError`.
        """

    def close(self) -> None:
        """End the work in the background."""
