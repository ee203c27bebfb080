"""Middleware around every request: request id, API key, Host check, size limit, access log and metrics."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkattn.addresses import is_host, is_loopback, names_this_machine
from chunkattn.fair_shares import OWNER
from chunkattn.request_record import RECORD, RequestRecord
from chunkattn.web.errors import ApiError, api_error, error_body, too_large
from chunkattn.web.http_state import HttpState
from chunkattn.web.keys import API_KEY_HEADER, Caller, with_bearer
from chunkattn.web.paths import ANTHROPIC_PATHS, OPEN_PATHS
from chunkattn.web.request_log import TIMING_HEADER, TOKENS_HEADER, fields_of, text_of, timing_header, tokens_header
from chunkattn.web.tracing import RequestSpan

logger = logging.getLogger("chunkattn.server.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
METRICS_PATH, REPORT_PATH = "/metrics", "/v1/cache/report"
"""Routes about all clients; `metrics_key` alone opens them if it is set."""
REPLICA_HEADER = "x-chunkattn-replica"
"""Header in which a gateway names the server that answered."""
_TYPESAFE_PATHS = ("/v1/systemone", "/v1/models")
"""Routes of TypeSafe's clients, which read the request id from a header of their own."""
_SINGLE = ("host", "authorization", API_KEY_HEADER)
"""Headers of which two would be read differently by two servers."""


class Gate:
    """ASGI middleware around the whole app.

    The gate gives every request an id (the client's own `X-Request-Id` if it is printable), checks the API key, and cuts off
    long bodies. It serves a path with a slash at its end as the path without it. It answers an uncaught exception with a 500
    that holds the request id alone.
    """

    def __init__(self, app: ASGIApp, state: HttpState) -> None:
        self.app, self.config, self.metrics, self.keys, self.shares = app, state.config, state.metrics, state.keys, state.shares
        self._local_only = not state.keys.needed and is_loopback(state.config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to the app."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        _drop_last_slash(scope)
        if scope["path"].endswith(ANTHROPIC_PATHS):
            scope["headers"] = with_bearer(scope["headers"])
        headers, record, status, replica = Headers(scope=scope), RequestRecord(time.perf_counter()), 0, None
        span = RequestSpan(headers, scope["method"])
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else secrets.token_hex(16)
        holder = self.keys.holder(headers.get("authorization", "")) if self.keys.needed else None
        # Names separate clients only if a file defines several.
        named = holder if self.config.api_key_file is not None else None
        caller = Caller(None if named is None else named.name, self.shares, tag="" if named is None else named.tag)
        caller.owner = caller.name or (scope.get("client") or ("",))[0]
        OWNER.set(caller.owner)
        RECORD.set(record)
        scope.setdefault("state", {}).update(request_id=request_id, caller=caller, trace_headers=span.outgoing())
        received, more = 0, True

        async def limited() -> Message:
            nonlocal received, more
            try:
                message = await receive()
            finally:
                if more:
                    record.upload_s = time.perf_counter() - record.began
            more = more and message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self.config.max_body_bytes:
                raise too_large(self.config.max_body_bytes)
            return message

        async def noted(message: Message) -> None:
            nonlocal status, replica
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                replica = answered.get(REPLICA_HEADER)
                answered["X-Request-Id"], answered["X-Content-Type-Options"] = request_id, "nosniff"
                if self.config.timing_headers and (summary := record.summary()) is not None:
                    answered[TIMING_HEADER] = timing_header(summary, time.perf_counter() - record.began)
                    answered[TOKENS_HEADER] = tokens_header(summary)
                if scope["path"].endswith(ANTHROPIC_PATHS):
                    answered["Request-Id"] = request_id
                if route_path(scope) in _TYPESAFE_PATHS:
                    answered["X-Typesafe-Request-Id"] = request_id
            await send(message)

        self.metrics.running += 1
        try:
            if refusal := self._refuse(scope, headers, holder is not None):
                await _error(refusal, scope, request_id)(scope, receive, noted)
            elif (root := scope.get("root_path")) and scope["path"] == root:  # the page's links are relative to the slash
                await Response(None, 307, {"Location": f"{root}/"})(scope, receive, noted)
            else:
                await self.app(scope, limited, noted)
        except Exception as error:
            answer = api_error(error, request_id)
            if not status:
                await _error(answer, scope, request_id)(scope, receive, noted)
        finally:
            caller.leave()
            self.metrics.running -= 1
            key = None if holder is None else holder.name
            about = {"id": request_id, "key": key, "salt": caller.salt_mark, "replica": replica}
            self._note(scope, status or 499, {name: text for name, text in about.items() if text is not None}, record, span)

    def _refuse(self, scope: Scope, headers: Headers, known: bool) -> ApiError | None:
        """Return the refusal of a request before routing, or None. `known` tells whether it brings an API key."""
        for name in _SINGLE:
            if len(headers.getlist(name)) > 1:
                code = "invalid_host" if name == "host" else "invalid_header"
                return ApiError(400, f"the request has several {name.title()} headers; send one", param=None, code=code)
        host = headers.get("host")
        if (host is None and scope.get("http_version", "1.1") == "1.1") or not is_host(host or ""):
            text = "the Host header must be a name or an address, and perhaps a port"
            return ApiError(400, f"{text}, got {'none' if host is None else ascii(host[:100])}", code="invalid_host")
        path = route_path(scope)
        shows_all_clients = path in (METRICS_PATH, REPORT_PATH)
        if not path.startswith("/"):
            return ApiError(400, f"the target of a request must be a path, got {path[:100]!a}", code="invalid_path")
        if shows_all_clients:
            known = self.keys.open_metrics(headers.get("authorization", ""))
        if not known and path not in OPEN_PATHS and (self.keys.needed or shows_all_clients):
            kind = "metrics key" if shows_all_clients and self.config.metrics_key is not None else "API key"
            text = f"a valid {kind} is needed: send 'Authorization: Bearer KEY'"
            return ApiError(401, text, code="invalid_api_key", **{"WWW-Authenticate": 'Basic realm="chunkattn"'})
        if self._local_only and not names_this_machine(host or ""):
            text = "this server answers to localhost alone; start it with another host, or with an API key"
            return ApiError(403, text, code="host_not_allowed")
        if scope["method"] == "GET" and _offers_websocket(headers):
            text = "websockets are not served; send the request without an upgrade, and with stream=true for a stream of events"
            return ApiError(400, text, code="websocket_not_supported")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.config.max_body_bytes:
            return too_large(self.config.max_body_bytes)
        return None

    def _note(self, scope: Scope, status: int, named: dict[str, str], record: RequestRecord, span: RequestSpan) -> None:
        """Count a request that has ended, write its line and end its span. Status 499 is a client that left."""
        seconds = time.perf_counter() - record.began
        # Label by route: clients choose paths freely, and the number of routes is bounded.
        route, summary = getattr(scope.get("route"), "path", "other"), record.summary()
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        path = ascii(scope["path"])[1:-1]  # escapes newlines, so a client cannot forge a log line
        about = fields_of(record, summary, seconds, self.config.slow_request_s)
        whole = {"method": scope["method"], "path": path, "route": route, "status": status, "seconds": seconds}
        fields = {**named, **whole, **about}
        text = "%(method)s %(path)s %(status)d in %(seconds).3f s (%(id)s)" + " from %(replica)s" * ("replica" in named)
        shown = {name: named[name] for name in ("key", "salt") if name in named} | about
        if shown:
            text += " " + text_of(shown).replace("%", "%%")
        # A gateway asks for reports every second.
        level = logging.DEBUG if (route_path(scope), status) == (REPORT_PATH, 200) else logging.INFO
        logger.log(level, text, fields, extra={"request": fields})
        span.end(fields, summary, record.model)


def _error(error: ApiError, scope: Scope, request_id: str) -> JSONResponse:
    """Return the answer to an error in the format of the route's API."""
    return JSONResponse(error_body(error, scope["path"], request_id), error.status, error.headers)


def _offers_websocket(headers: Headers) -> bool:
    """Return whether a request opens a websocket (RFC 6455, 4.1). Offers of other protocols are ignored."""
    offered = {part.partition("/")[0].strip().lower() for value in headers.getlist("upgrade") for part in value.split(",")}
    options = {part.strip().lower() for value in headers.getlist("connection") for part in value.split(",")}
    return "websocket" in offered and "upgrade" in options


def _drop_last_slash(scope: Scope) -> None:
    """Take slashes off the end of a path; encoded ones stay, because they belong to a name."""
    raw = scope.get("raw_path") or scope["path"].encode()
    if raw.endswith(b"/") and route_path(scope) != "/":
        count = len(raw) - len(raw.rstrip(b"/"))
        scope["path"], scope["raw_path"] = scope["path"][:-count] or "/", raw[:-count] or b"/"


class HeadAsGet:
    """ASGI middleware that answers HEAD with the status and headers of GET, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to the app."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def headers_alone(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        as_get = {**scope, "method": "GET"}
        try:
            await self.app(as_get, receive, headers_alone)
        finally:
            if "route" in as_get:  # the outer middleware labels its metrics by route
                scope["route"] = as_get["route"]


def route_path(scope: Scope) -> str:
    """Return the path of a request below `root_path`, as the router sees it.

    Args:
        scope: ASGI scope of the request.
    """
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
