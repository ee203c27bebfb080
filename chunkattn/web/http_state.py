"""`HttpState`: what all requests of one HTTP application share, and `HttpMetrics` of them."""

from __future__ import annotations

import asyncio

from chunkattn.described_metrics import DescribedMetrics
from chunkattn.fair_shares import FairShares
from chunkattn.web.bodies import Bodies, Note
from chunkattn.web.keys import Keys, Shares
from chunkattn.web.options import ServerConfig

_MOST_WAITING = 128
"""Requests of one client that wait at once for room. Each has up to 128 KiB of its body in the connection's buffer."""
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100, 500)


class HttpMetrics(DescribedMetrics):
    """Metrics of the HTTP server, in a Prometheus registry of their own. Times are in seconds.

    Attributes:
        running: number of requests being answered.

    Metrics:
        requests_now: requests being answered.
        requests: requests answered.
        seconds: from a request to the end of its answer.
    """

    def __init__(self) -> None:
        super().__init__("chunkattn_http_", _SECONDS)
        self.running = 0
        self._running = self.gauge("requests_now")
        self._running.set_function(lambda: self.running)
        self.requests = self.counter("requests", "route", "status")
        self.seconds = self.histogram("seconds", "route")


class HttpState:
    """Options, keys, metrics and bounds of one HTTP application.

    Args:
        config: options of the server.
        places: queue places that one client may hold at once.
        max_items: see `Bodies`.
        note: see `Bodies`.

    Attributes:
        config: options of the server.
        metrics: metrics of the HTTP server.
        draining: True after SIGTERM: running requests finish, new ones are refused.
        keys: API keys.
        shares: queue places and bytes of bodies that each client holds.
        bodies: reader of bodies.

    Raises:
        ConfigError: the key file is invalid.
    """

    def __init__(self, config: ServerConfig, places: int, max_items: int | None = None, note: Note | None = None) -> None:
        self.config, self.metrics, self.draining = config, HttpMetrics(), False
        self.keys = Keys(config.api_key, config.api_key_file, config.metrics_key)
        self.shares = Shares(places, FairShares(config.max_body_bytes_per_client, most_waiting=_MOST_WAITING))
        self.bodies = Bodies(config, max_items, note)

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones, at most `drain_timeout_s`."""
        self.draining = True
        until = asyncio.get_running_loop().time() + self.config.drain_timeout_s
        while self.metrics.running and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
