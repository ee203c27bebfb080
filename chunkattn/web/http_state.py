"""`HttpState`: what all requests of one HTTP application share, and `HttpMetrics` of them."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chunkattn.web.bodies import Bodies, Note
from chunkattn.web.body_shares import BodyShares
from chunkattn.web.keys import Keys, Shares
from chunkattn.web.options import ServerConfig

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100, 500)


class HttpMetrics:
    """Metrics of the HTTP server, in a Prometheus registry of its own. Times are in seconds.

    Attributes:
        registry: the Prometheus registry.
        running: requests being answered.
        requests: counter of answered requests, by route and status.
        seconds: histogram of the time from a request to the end of its answer, by route.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = 0
        self._running = Gauge("chunkattn_http_requests_now", "Requests being answered", registry=self.registry)
        self._running.set_function(lambda: self.running)
        labels = ["route", "status"]
        self.requests = Counter("chunkattn_http_requests", "Requests answered", labels, registry=self.registry)
        self.seconds = Histogram(
            "chunkattn_http_seconds",
            "From a request to the end of its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )


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
        self.shares = Shares(places, BodyShares(config.max_body_bytes_per_client))
        self.bodies = Bodies(config, max_items, note)

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones, at most `drain_timeout_s`."""
        self.draining = True
        until = asyncio.get_running_loop().time() + self.config.drain_timeout_s
        while self.metrics.running and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
