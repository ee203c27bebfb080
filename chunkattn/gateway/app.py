"""`Gateway`: the ASGI application in front of replicas, with its own routes, its watch and its stored documents."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from chunkattn.documents.records import DocumentRecords
from chunkattn.documents.routes import DOCUMENTS, FORGET
from chunkattn.gateway.documents import GatewayDocuments
from chunkattn.gateway.metrics import GatewayMetrics, merge
from chunkattn.gateway.options import GatewayOptions
from chunkattn.gateway.policy import POLICIES
from chunkattn.gateway.relay import CutError, Relay
from chunkattn.gateway.replica_metrics import ReplicaMetrics
from chunkattn.gateway.replicas import ReplicaGoneError, Replicas
from chunkattn.gateway.text_measure import TextMeasure
from chunkattn.gateway.watch import Watch
from chunkattn.web.body_shares import BodyShares
from chunkattn.web.cors import cors_options
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys, Shares
from chunkattn.web.middleware import METRICS_PATH, OPEN_PATHS, REPORT_PATH, Gate, HttpMetrics, route_path
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import RERANK_PATHS

_MOST_PLACES = 1 << 30
_MEASURE_S = 300.0
"""Seconds after which bytes per token are measured again."""
_KNOWN = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/score",
    "/score",
    "/generative_scoring",
    *RERANK_PATHS,
    FORGET,
    "/v1/decisions",
    "/v1/systemone",
    "/v1/models",
    "/tokenize",
    "/detokenize",
)
"""Routes with a label of their own in the metrics; clients choose paths freely, so all others share one."""


@dataclass
class GatewayState:
    """State that the HTTP server of the gateway drains by.

    Attributes:
        config: options of the HTTP server.
        metrics: its metrics.
        draining: True after SIGTERM: running requests finish, new ones are refused.
    """

    config: ServerConfig
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    draining: bool = False


class Gateway:
    """Application in front of replicas. Call `open` before the first request and `close` after the last.

    Args:
        replicas: connection to the replicas.
        options: options of the gateway.
        config: options of the HTTP server: keys, limits, timeouts and the address, which decides on the accepted Host headers.
        records: records of stored documents; None opens the file of `document_store`.
        stores_documents: whether documents are stored by id; False where other gateways would not know them.

    Attributes:
        keys: API keys that the gateway checks.
        documents: stored documents over the replicas.
        app: ASGI application.
        state: state that drains.
        watch: states of the replicas.
        policy: policy that ranks them.

    Raises:
        ConfigError: the key file is invalid.
    """

    def __init__(
        self,
        replicas: Replicas,
        options: GatewayOptions,
        config: ServerConfig,
        records: DocumentRecords | None = None,
        *,
        stores_documents: bool = True,
    ) -> None:
        self.replicas, self.options, self._stores_documents = replicas, options, stores_documents
        self.state = GatewayState(config)
        self.keys = Keys(config.api_key, config.api_key_file, config.metrics_key)
        registry = self.state.metrics.registry
        ProcessCollector(registry=registry)
        self.metrics = GatewayMetrics(registry)
        self.policy = POLICIES[options.policy]()
        self.documents = GatewayDocuments(
            replicas,
            self.policy,
            DocumentRecords(options.document_store) if records is None else records,
            config,
            self.keys,
            options.replica_wait_s,
        )
        self.watch = Watch(replicas, self.policy, options, getattr(replicas, "drop", lambda name: None))
        self.documents.keeper.takes = lambda name: name in self.watch.states and self.watch.states[name].is_ready
        self._replica_metrics = ReplicaMetrics(replicas, options.report_timeout_s)
        self._measure = TextMeasure(self._count_tokens)
        self._measuring: asyncio.Task[None] | None = None
        self._relay = Relay(
            replicas,
            self.policy,
            self.watch,
            options,
            self.metrics,
            timeout_s=config.request_timeout_s,
            max_body_bytes=config.max_body_bytes,
            documents=self.documents,
            measure=self._measure,
            relays_cors=not config.allowed_origins,
        )
        shares = Shares(_MOST_PLACES, BodyShares(config.max_body_bytes_per_client))
        self.app: ASGIApp = Gate(self._route, config, self.state.metrics, self.keys, shares)
        if cors := cors_options(config):
            self.app = CORSMiddleware(self.app, **cors)

    async def open(self) -> None:
        """Connect to the replicas and start to watch them."""
        await self.replicas.open()
        await self.watch.open()
        self.watch.on_change.append(self.documents.on_change)
        await self.documents.open()
        self._measuring = asyncio.create_task(self._keep_measuring())

    async def close(self) -> None:
        """Disconnect."""
        if self._measuring is not None:
            self._measuring.cancel()
        await self._replica_metrics.close()
        await self.documents.close()
        await self.watch.close()
        await self.replicas.close()

    # Routes

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        path, method = route_path(scope), scope["method"]
        label = DOCUMENTS if path.startswith(DOCUMENTS) else path
        known = path in (*_KNOWN, *OPEN_PATHS, METRICS_PATH) or label == DOCUMENTS
        scope["route"] = SimpleNamespace(path=label if known else "other")
        own = dict.fromkeys(OPEN_PATHS, self._health) | {"/livez": _livez, METRICS_PATH: self._show_metrics}
        try:
            if (answer := own.get(path)) is not None:
                if method not in ("GET", "HEAD") and (path, method) != ("/ping", "POST"):
                    raise ApiError(405, f"{path} takes GET or HEAD, not {method}", code="method_not_allowed", Allow="GET, HEAD")
                response: Response = await answer()
                if method == "HEAD":
                    response.body = b""
                await response(scope, receive, send)
                return
            if self.state.draining:
                raise ApiError(503, "the gateway is draining; try another one", code="server_draining", **{"Retry-After": "1"})
            if path == REPORT_PATH or path.startswith(f"{METRICS_PATH}/"):
                raise ApiError(404, f"the gateway has no route {path}", code="not_found")
            is_stored = path == DOCUMENTS or path.startswith(f"{DOCUMENTS}/")
            if is_stored and not self._stores_documents:
                text = "several gateways store no documents by id; send their texts, or run one gateway"
                raise ApiError(400, text, code="unsupported_parameter")
            if is_stored or (path == FORGET and method == "POST"):
                await self.documents.app({**scope}, receive, send)  # a copy: the routes have one label in the metrics
                return
            await self._relay(scope, receive, send)
        except ApiError as error:
            if error.status == 499 or isinstance(error, CutError):
                raise
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    async def _health(self) -> Response:
        """Return 200 if a replica takes requests, with the state of each."""
        listed = {
            name: {
                "ready": state.is_ready,
                "responsive": state.is_responsive,
                "generation": None if state.report is None else state.report.generation,
            }
            for name, state in self.watch.states.items()
        }
        ready = any(state["ready"] for state in listed.values())
        status = "draining" if self.state.draining else "ready" if ready else "no replica is ready"
        return JSONResponse({"status": status, "replicas": listed}, 200 if status == "ready" else 503)

    async def _show_metrics(self) -> Response:
        """Return the gateway's metrics and those of every replica, with a label for each."""
        texts = await self._replica_metrics.read([name for name, state in self.watch.states.items() if not state.down])
        for gauge in (self.metrics.ready, self.metrics.queued, self.metrics.pieces):
            gauge.clear()  # of replicas that have left
        for name, state in self.watch.states.items():
            self.metrics.ready.labels(name).set(state.is_ready)
            self.metrics.queued.labels(name).set(self.policy.queued(name))
            self.metrics.pieces.labels(name).set(self.policy.num_pieces(name))
        self.metrics.bytes_per_token.set(self.watch.bytes_per_token)
        own = generate_latest(self.state.metrics.registry).decode()
        merged = await asyncio.to_thread(merge, own, texts)  # about 5 us a sample
        return Response(merged, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    # Bytes per token

    async def _count_tokens(self, text: str) -> int | None:
        count = getattr(self.replicas, "count_tokens", None)
        ready = self.watch.ready()
        return None if count is None or not ready else await count(ready[0], text)

    async def _keep_measuring(self) -> None:
        """Measure bytes per token once there are samples, and again from time to time."""
        while True:
            await asyncio.sleep(self.options.report_period_s)
            if self._measure.num_samples < 4:
                continue
            with suppress(ReplicaGoneError):
                if (found := await self._measure.bytes_per_token()) is not None:
                    self.watch.bytes_per_token = found
                    await asyncio.sleep(_MEASURE_S)


async def _livez() -> Response:
    return JSONResponse({"status": "alive"})
