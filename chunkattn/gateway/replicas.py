"""Replicas behind the gateway, whatever connects them: how they are named, asked and watched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""ASGI message of an answer: one `http.response.start`, then `http.response.body` messages."""


class ReplicaGoneError(Exception):
    """The replica cannot be reached, or has died before the end of its answer."""


class BadStatusError(ReplicaGoneError):
    """The replica has answered with a status that ends no request, and is not taken for an answer."""


class NotSentError(ReplicaGoneError):
    """The replica cannot be reached, and nothing of the request has come to it."""


@dataclass(frozen=True)
class Outgoing:
    """Request to a replica, with its whole body.

    Attributes:
        method: HTTP method.
        path: path with its leading slash, undecoded, without the query.
        query: query string without the question mark.
        headers: names in lower case and values, without those of one hop (host, connection, content-length, ...).
        body: body of the request.
    """

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""


@dataclass(frozen=True)
class Report:
    """State of a replica, as it tells it.

    Attributes:
        generation: text that changes whenever the replica's cache was emptied by a restart.
        ready: whether the replica accepts requests.
        capacity: tokens that its KV cache holds; None if unknown.
        held: sizes by key of the pieces that it was sent since the last report, by all gateways, the last one last.
        responsive: False while its engine gives no sign of life, or is in an unusually long step.
        adapters: names of the adapters that requests may name as their model.
        decide_method: method of its decisions by default; None if unknown.
    """

    generation: str
    ready: bool
    capacity: int | None = None
    held: Mapping[int, int] = field(default_factory=dict)
    responsive: bool = True
    adapters: tuple[str, ...] = ()
    decide_method: str | None = None


class Replicas(Protocol):
    """Connection to all replicas. The policy is not its matter: the gateway names the replica."""

    async def open(self) -> None:
        """Connect. Replicas may come and go afterwards."""

    async def close(self) -> None:
        """Disconnect; running answers end with `ReplicaGoneError`."""

    def names(self) -> Sequence[str]:
        """Return the names of the replicas that exist now, ready or not."""

    def drop(self, name: str) -> None:
        """End the running requests of a replica with `ReplicaGoneError`."""

    def send(self, name: str, request: Outgoing) -> AsyncIterator[Message]:
        """Send a request and return its answer, message by message as they come. Closing the iterator aborts the request.

        Args:
            name: one of `names()`.
            request: the request.

        Raises:
            ReplicaGoneError: while iterating: the replica is gone; `NotSentError` before it had anything of the request.
        """

    async def report(self, name: str) -> Report:
        """Return the state of a replica.

        Raises:
            ReplicaGoneError: the replica cannot be asked.
        """

    async def metrics(self, name: str) -> str:
        """Return the metrics of a replica in Prometheus's text format.

        Raises:
            ReplicaGoneError: the replica cannot be asked.
        """
