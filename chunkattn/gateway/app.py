"""`Gateway`: the ASGI application in front of replicas, with its own routes, its watch and its stored documents."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from chunkattn.documents.records import DocumentRecords
from chunkattn.documents.routes import DOCUMENTS, FORGET
from chunkattn.gateway.documents import GatewayDocuments
from chunkattn.gateway.metrics import GatewayMetrics, merge
from chunkattn.gateway.options import GatewayOptions
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.relay import Relay
from chunkattn.gateway.replica_answer import answer_of
from chunkattn.gateway.replica_metrics import ReplicaMetrics
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.text_measure import TextMeasure
from chunkattn.gateway.watch import Watch
from chunkattn.schema.parts import ROUTES
from chunkattn.web.cors import cors_options
from chunkattn.web.errors import ApiError
from chunkattn.web.http_state import HttpState
from chunkattn.web.middleware import METRICS_PATH, REPORT_PATH, Gate, route_path
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import OPEN_PATHS

_MOST_PLACES = 1 << 30
_MEASURE_S, _TOKENIZE_S = 300.0, 5.0
"""Seconds after which bytes per token are measured again, and that a replica has to count tokens."""
_KNOWN = (*ROUTES, "/v1/models", "/detokenize")
"""Routes with a label of their own in the metrics; clients choose paths freely, so all others share one."""


class Gateway:
    """Application in front of replicas. Call `open` before the first request and `close` after the last.

    Args:
        replicas: connection to the replicas.
        options: options of the gateway.
        config: options of the HTTP server: keys, limits, timeouts and the address, which decides on the accepted Host headers.
        records: records of stored documents; None opens the file of `document_store`.
        stores_documents: whether documents are stored by id; False where other gateways would not know them.

    Attributes:
        documents: stored documents over the replicas.
        app: ASGI application.
        state: options, keys and bounds of its HTTP server.
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
        self.state = HttpState(config, _MOST_PLACES)
        registry = self.state.metrics.registry
        ProcessCollector(registry=registry)
        self.metrics = GatewayMetrics(registry)
        self.policy = Policy()
        self.documents = GatewayDocuments(
            replicas,
            self.policy,
            DocumentRecords(options.document_store) if records is None else records,
            self.state,
            options.replica_wait_s,
        )
        self.watch = Watch(replicas, self.policy, options, replicas.drop)
        self.documents.keeper.takes = lambda name: name in self.watch.states and self.watch.states[name].is_ready
        self.documents.keeper.adapters = lambda: self.watch.adapters
        self._replica_metrics = ReplicaMetrics(replicas, options.report_timeout_s)
        self._measure = TextMeasure(self._count_tokens)
        self._measuring: asyncio.Task[None] | None = None
        self._relay = Relay(
            replicas,
            self.policy,
            self.watch,
            options,
            self.metrics,
            self.state,
            self.documents,
            self._measure,
        )
        self.app: ASGIApp = Gate(self._route, self.state)
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
        known = label in (*_KNOWN, *OPEN_PATHS, METRICS_PATH, DOCUMENTS)
        scope["route"] = SimpleNamespace(path=label if known else "other")
        pages = dict.fromkeys(OPEN_PATHS, self._health) | {"/livez": _livez, METRICS_PATH: self._show_metrics}
        if (page := pages.get(path)) is not None:
            if method not in ("GET", "HEAD") and (path, method) != ("/ping", "POST"):
                raise ApiError(405, f"{path} takes GET or HEAD, not {method}", code="method_not_allowed", Allow="GET, HEAD")
            response: Response = await page()
            if method == "HEAD":
                response.body = b""
            await response(scope, receive, send)
        elif self.state.draining:
            raise ApiError(503, "the gateway is draining; try another one", code="server_draining")
        elif path == REPORT_PATH or path.startswith(f"{METRICS_PATH}/"):
            raise ApiError(404, f"the gateway has no route {path}", code="not_found")
        elif (is_stored := path == DOCUMENTS or path.startswith(f"{DOCUMENTS}/")) and not self._stores_documents:
            text = "several gateways store no documents by id; send their texts, or run one gateway"
            raise ApiError(400, text, code="unsupported_parameter")
        elif is_stored or (path == FORGET and method == "POST"):
            await self.documents.app({**scope}, receive, send)  # a copy: the routes have one label in the metrics
        else:
            await self._relay(scope, receive, send)

    async def _health(self) -> Response:
        """Return 200 if a replica takes requests, with the state of each."""
        listed = {
            name: {
                "ready": state.is_ready,
                "responsive": state.is_responsive,
                "decide_method": state.decide_method,
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
        gateway_text = generate_latest(self.state.metrics.registry).decode()
        merged = await asyncio.to_thread(merge, gateway_text, texts)  # about 5 us a sample
        return Response(merged, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    # Bytes per token

    async def _count_tokens(self, text: str) -> int | None:
        """Return the number of tokens of a text, from `/tokenize` of a replica; None if none tells it."""
        if not (ready := self.watch.ready()):
            return None
        key = self.options.replica_key
        headers = [(b"content-type", b"application/json")] + [(b"authorization", f"Bearer {key}".encode())] * (key is not None)
        body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
        answer = await answer_of(
            self.replicas, ready[0], Outgoing("POST", "/tokenize", headers=headers, body=body), _TOKENIZE_S
        )
        count = answer.body.get("count") if answer.status == 200 and isinstance(answer.body, dict) else None
        return count if isinstance(count, int) else None

    async def _keep_measuring(self) -> None:
        """Measure bytes per token once there are samples, and again from time to time."""
        while True:
            await asyncio.sleep(self.options.report_period_s)
            if self._measure.num_samples < 4:
                continue
            with suppress(ReplicaGoneError):
                if (measured := await self._measure.bytes_per_token()) is not None:
                    self.watch.bytes_per_token = measured
                    await asyncio.sleep(_MEASURE_S)


async def _livez() -> Response:
    return JSONResponse({"status": "alive"})
