"""`ConnectionLimits`: who may connect to an HTTP server, and whose requests are refused by their heads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from chunkattn.web.bodies import SMALL_BODY
from chunkattn.web.errors import ApiError
from chunkattn.web.heads import Header
from chunkattn.web.keys import Keys, Shares, authorization_of
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import OPEN_PATHS

logger = logging.getLogger(__name__)

_CHECK_S = 0.25
_LOG_EVERY_S = 10.0
_MOST_EXTRA = 64
"""Strangers that are accepted at most while all connections are taken."""
_ABANDONED_PER_S, _MOST_ABANDONED = 16.0, 32.0
"""Large bodies that the clients of a key may abandon: a second, and at once. Reading one costs the event loop a millisecond."""


class Connection(Protocol):
    """Connection, as far as the limits know it.

    Attributes:
        is_known: whether it counts among the known connections.
    """

    is_known: bool

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being answered."""

    def refuse(self) -> None:
        """Answer 503, and close."""


def too_many() -> ApiError:
    """Return the refusal of a connection over `max_connections`."""
    return ApiError(503, "the server has too many connections; try again", code="too_many_connections")


def too_many_abandoned() -> ApiError:
    """Return the refusal of a large body of a key whose clients leave too many behind. The rest of the body is left unread."""
    text = (
        f"clients of this API key left more than {_ABANDONED_PER_S:g} large requests a second before they were read; "
        "wait for the answers, and try again"
    )
    return ApiError(429, text, code="requests_abandoned")


@dataclass
class ConnectionLimits:
    """State shared by all connections of a server.

    A connection is a stranger until a request on it brings a valid key, or any request where no key is needed. Health probes
    make no difference. Strangers have three quarters of the connections, and a few places more while all are taken. A new one
    takes the place of the oldest idle one, so those who send nothing keep nobody out.

    Attributes:
        config: options of the server.
        most: limit on open connections; lower than `max_connections` if the operating system allows fewer files.
        keys: API keys; None if no key is needed.
        shares: what each client holds; None refuses no request for it.
        draining: whether every answer ends its connection, because the server stops soon.
        strangers: the strangers, oldest first.
        known: number of other connections.
        abandoned: for each key's name, when its clients last left a large body behind, in seconds of the monotonic clock, and
            how many count then.
        refused: connections and requests refused since the start.
        logged: time of the last log line about refusals, in seconds of the monotonic clock.
    """

    config: ServerConfig
    most: int
    keys: Keys | None = None
    shares: Shares | None = None
    draining: bool = False
    strangers: dict[Connection, None] = field(default_factory=dict)
    known: int = 0
    abandoned: dict[str, tuple[float, float]] = field(default_factory=dict)
    refused: int = 0
    logged: float = float("-inf")

    def admit(self, connection: Connection) -> None:
        """Count a new connection; over the limit, refuse the oldest idle stranger, or else the new one."""
        self.strangers[connection] = None
        room = max(min(self.most - self.most // 4, self.most - self.known), min(self.most // 32, _MOST_EXTRA))
        if len(self.strangers) > room:
            oldest = next((stranger for stranger in self.strangers if stranger.is_idle), connection)
            del self.strangers[oldest]
            self._note("connections over max_connections %d", self.most)
            oldest.refuse()

    def meet(self, connection: Connection, path: bytes, headers: Iterable[Header]) -> None:
        """Count a stranger among the known connections if its request shows who it is.

        Raises:
            ApiError: 503, there are `most` connections.
        """
        if connection not in self.strangers or path.rstrip(b"/").decode("latin-1").endswith(OPEN_PATHS):
            return
        if self.keys is None or not self.keys.needed or self.keys.holder(authorization_of(headers)) is not None:
            if self.known >= self.most:
                self._note("connections over max_connections %d", self.most)
                raise too_many()
            del self.strangers[connection]
            connection.is_known = True
            self.known += 1

    def check_room(self, headers: Iterable[Header]) -> None:
        """Refuse a large body while as many of its key's wait as may, or while its key's clients leave too many of them behind.

        By its head a request is refused at the least cost.

        Raises:
            ApiError: 429, the key's bodies take its room, or are not waited for.
        """
        if self.shares is None or not (self.shares.bodies.waiting or self.abandoned):
            return
        name = self._sender(headers)
        if name is None:
            return
        if self.shares.bodies.is_full(name):
            self._note("large bodies of a key over max_body_bytes_per_client %d", self.shares.bodies.most_each)
            raise self.shares.no_room()
        if self._count_abandoned(name) > _MOST_ABANDONED:
            self._note("large bodies of a key whose clients leave more than %d a second behind", int(_ABANDONED_PER_S))
            raise too_many_abandoned()

    def abandon(self, headers: Iterable[Header]) -> None:
        """Count a request whose client left before its body was used. A second without more forgives any number."""
        if (name := self._sender(headers)) is not None:
            count = min(self._count_abandoned(name) + 1, _MOST_ABANDONED + _ABANDONED_PER_S)
            self.abandoned[name] = time.monotonic(), count

    def _count_abandoned(self, name: str) -> float:
        """Return how many abandoned bodies of a key count now; forget a key for which none does."""
        since, count = self.abandoned.get(name, (0.0, 0.0))
        count -= _ABANDONED_PER_S * (time.monotonic() - since)
        if count <= 0:
            self.abandoned.pop(name, None)
        return max(count, 0.0)

    def _sender(self, headers: Iterable[Header]) -> str | None:
        """Return the name of the key of a body that may be large; None without, and where no key file tells clients apart."""
        if self.keys is None or self.keys.file is None:
            return None
        sent = dict(headers)
        length = sent.get(b"content-length", b"")
        if b"transfer-encoding" not in sent and (not length.isdigit() or int(length) <= SMALL_BODY):
            return None
        holder = self.keys.holder(authorization_of(sent.items()))
        return None if holder is None else holder.name

    def leave(self, connection: Connection) -> None:
        """Count a connection that has ended."""
        self.strangers.pop(connection, None)
        self.known -= connection.is_known

    def _note(self, text: str, limit: int) -> None:
        """Count a refusal; log one line per 10 s."""
        self.refused += 1
        if (now := time.monotonic()) - self.logged >= _LOG_EVERY_S:
            logger.warning(f"{text} are refused: %d refusals so far", limit, self.refused)
            self.logged = now

    async def watch(self, connections: Iterable[Any]) -> None:
        """Check the time limits of all connections every 0.25 s; run until cancelled.

        Args:
            connections: live view of the server's open connections.
        """
        while True:
            await asyncio.sleep(_CHECK_S)
            for connection in list(connections):
                connection.check_time(time.monotonic())
