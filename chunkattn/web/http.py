"""HTTP/1.1 connections parsed by httptools, with limits on size, time and rate."""

from __future__ import annotations

import asyncio
import http
import logging
import time
import urllib.parse
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chunkattn.web.connection_limits import ConnectionLimits, too_many
from chunkattn.web.errors import ApiError
from chunkattn.web.exchange import Exchange, HeldFlow, LingeringTransport
from chunkattn.web.heads import Header, check_framing, read_target

logger = logging.getLogger(__name__)

LONGEST_HEAD = 1 << 16
"""Size limit in bytes of a request line with its headers, and of a body's trailers; longer input is answered with 400."""
LOWEST_RATE = 256
"""Lowest rate in bytes per second at which a client must send a body, and read an answer."""
_H2_PREFACE = (b"PRI", b"*")
_LINGER_S, _LAST_LINGER_S = 2.0, 0.25
"""Seconds for which a closed connection is read, while the server runs and while it stops."""
_LATE_S, _LATEST_S = 0.1, 0.5
"""Seconds for which a stopping server waits for requests on an idle connection; longer if some bytes of one have come."""
_MOST_WAITING = 16
"""Requests that may wait on a connection for the answers before theirs; then the connection is not read."""
_PROBE_S, _LONGEST_PROBE_S = 0.1, 5.0


def head_too_long() -> ApiError:
    """Return the refusal of a head over `LONGEST_HEAD`."""
    return ApiError(400, f"The request line and headers exceed {LONGEST_HEAD} bytes.", code="invalid_http")


class BoundedHttp(HttpToolsProtocol):
    """HTTP connection with limits, whose requests are answered in order, each exactly once.

    httptools has no size limit for headers, and uvicorn no time limit. llhttp takes an offer to upgrade for the end of HTTP.
    This class ignores the offer (RFC 9110, 7.8), so the body of such a request is read as a body.
    """

    transport: Any
    flow: Any
    cycle: Exchange

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits, self.is_known = limits, False
        self.timeout_keep_alive = limits.config.timeout_keep_alive  # type: ignore[assignment]
        self._keep_alive_header = b"keep-alive", b"timeout=%d" % int(limits.config.timeout_keep_alive)
        self.url = b""
        self._moved = False
        self._fed = self._header_bytes = 0
        self._phase: str | None = "headers"  # awaited from the client: "headers", "body" or nothing
        self._since, self._received = time.monotonic(), 0
        self._writing: tuple[float, int, int] | None = None  # start of the wait, buffered bytes then, bytes read since
        self._half_closed = False
        self._running: Exchange | None = None  # the request that is being answered; later ones wait in `pipeline`
        self._offered: list[Header] | None = None  # headers of a request that offers an upgrade, while it is read again
        self._fault: ApiError | None = None  # raised in a callback of the parser, which loses the exception
        self._is_deaf = False  # further bytes are no requests
        self._last_words = b""  # answer to the bytes behind the last request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it with 503 over the limit."""
        lingering = LingeringTransport(transport, self.loop, lambda: _LAST_LINGER_S if self._limits.draining else _LINGER_S)
        super().connection_made(lingering)  # type: ignore[arg-type]
        self.flow = HeldFlow(lingering)
        self._limits.admit(self)

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self._running is None

    def refuse(self) -> None:
        """Answer 503, and close."""
        self._refuse(too_many(), linger=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the work of all requests of the connection."""
        self._limits.leave(self)
        for waiting in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(waiting, Exchange):
                waiting.drop()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; answer 400 if a head exceeds `LONGEST_HEAD`."""
        if self._is_deaf or self.transport.is_closing():
            return
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        if self._phase is None:
            self._await("headers")
        self._moved = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._is_deaf:
                self._refuse_bytes()
            return
        self._fed = 0 if self._moved else self._fed + len(data)
        if self._fed > LONGEST_HEAD and not self.transport.is_closing():
            self._refuse(head_too_long())

    def _parse(self, data: bytes) -> None:
        """Parse bytes.

        Raises:
            HttpParserError: they are no HTTP.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            self._read_again()

    def _read_again(self) -> None:
        """Parse a head again without its offer to upgrade, after which llhttp would read no body."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%s %s HTTP/%s\r\n" % (method, self.url, version.encode())]
        lines += [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self._offered = self.headers
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"".join([*lines, b"\r\n"]))

    def _refuse_bytes(self) -> None:
        """Answer bytes that the parser has refused."""
        if self._fault is not None:
            self._refuse(self._fault)
        elif (self.parser.get_method(), self.url) == _H2_PREFACE:
            self._refuse(ApiError(505, "HTTP/2 is not served; send HTTP/1.1", code="http_version_not_supported"))
        else:
            self.send_400_response("the bytes that were sent are not an HTTP/1.1 request")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the client's end of sending. The client may have left, or may wait for its answers.

        Returns:
            True to keep the connection open.
        """
        if self.transport.is_closing() or self._running is None or self._half_closed:
            return False
        if self._phase == "body":  # the last request has no end
            if self.cycle is self._running:
                return False
            self.pipeline.popleft()
        self._half_closed = self._is_deaf = self.transport.client_ended = True
        last = self.pipeline[0][0] if self.pipeline else self._running
        last.keep_alive = bool(self._last_words)
        self._probe(_PROBE_S)
        return True

    def _probe(self, pause: float) -> None:
        """Send an interim response: the connection of a client that left is reset, a waiting client skips it."""
        running = self._running
        if self.transport.is_closing() or running is None:
            return
        if not running.response_started and running.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(pause, self._probe, min(2 * pause, _LONGEST_PROBE_S))

    def shutdown(self) -> None:
        """Close the connection after its last answer; an idle one unless a request is already on its way."""
        self._limits.draining = True
        self.loop.call_later(_LATEST_S if self._fed else _LATE_S, self._close_unless_running)

    def _close_unless_running(self) -> None:
        if self._running is None and self.transport.has_input():
            self.loop.call_later(_LATE_S, self._close_unless_running)
        elif self._running is None:
            self.transport.close_now()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless bytes have arrived that the event loop has not read: its timers may run first."""
        if self.transport.has_input():
            self.timeout_keep_alive_task = self.loop.call_later(_LATE_S, self.timeout_keep_alive_handler)
        else:
            self.transport.close()

    # Time

    def _await(self, phase: str | None) -> None:
        self._phase, self._since, self._received = phase, time.monotonic(), 0

    def check_time(self, now: float) -> None:
        """Close the connection if the client exceeds a time limit.

        Args:
            now: time in seconds of the monotonic clock.
        """
        config, waiting = self._limits.config, self.transport.get_write_buffer_size()
        if not waiting:
            self._writing = None
        elif self._writing is None:
            self._writing = now, waiting, 0
        else:
            since, before, read = self._writing
            read += max(before - waiting, 0)  # approximate: the answer refills the buffer meanwhile
            if now - since <= config.write_timeout_s:
                self._writing = since, waiting, read
            elif read < LOWEST_RATE * config.write_timeout_s:
                logger.info("a client that does not read its answer is cut off after %g s", config.write_timeout_s)
                self.transport.abort()
                return
            else:
                self._writing = now, waiting, 0
        if self.transport.is_closing() or self._is_deaf or self._phase is None:
            return
        if self._phase == "headers":
            if self._running is not None:  # the header timeout of the next request starts after this answer
                self._since = now
            elif now - self._since > config.header_timeout_s:
                text = f"the request's headers took longer than header_timeout_s {config.header_timeout_s:g}"
                self._refuse(ApiError(408, text, code="timeout"))
        elif self.flow.read_paused:  # the server paused reading, so the client's timeout restarts
            self._await("body")
        elif now - self._since > config.body_timeout_s:
            if self._received < LOWEST_RATE * config.body_timeout_s:
                text = f"less than {LOWEST_RATE} bytes a second of the body came in body_timeout_s {config.body_timeout_s:g}"
                self._refuse(ApiError(408, text, code="timeout"))
            else:
                self._await("body")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not an HTTP request, and close."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError, *, linger: bool = True) -> None:
        """Answer what is being received with an error, after the answers before it, and close; cut an answer that has begun."""
        self._is_deaf = True
        answer, running = _error_answer(error), self._running
        if self._phase == "body":
            if self.cycle is not running and not self.cycle.response_complete:
                self.pipeline.popleft()  # the newest
            elif running is None or running.response_started:
                answer = b""
            if self.cycle is running:
                running.drop(refused=True)
                running = None
        if running is not None:
            self._last_words = answer
            return
        self.transport.write(answer)
        (self.transport.close if linger else self.transport.close_now)()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begin a request.

        Raises:
            ValueError: the connection ends with the answer to the request before.
        """
        if self.cycle is not None and not self.cycle.keep_alive:
            self._is_deaf = True
            raise ValueError("data after the last request")
        super().on_message_begin()
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; drop a trailer after the body, which must not pass for a header (RFC 9110, 6.5.1).

        Raises:
            ApiError: the headers exceed `LONGEST_HEAD`.
        """
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > LONGEST_HEAD:
            self._fault = head_too_long()
            raise self._fault
        if self._phase != "body":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request once its headers are complete.

        Raises:
            ApiError: the head breaks a rule of HTTP.
        """
        self._moved = True
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self.parser.should_upgrade() and method != b"CONNECT":
            return  # `_parse` reads the head again
        if self._offered is not None:
            self.headers[:], self._offered = self._offered, None
        try:
            check_framing(method, version, self.headers)
            target = read_target(self.url)
            self._limits.check_room(self.headers)
            self._limits.meet(self, target.path, self.headers)
        except ApiError as error:
            self._fault = error
            raise
        if target.authority is not None:  # replaces the Host header (RFC 9112, 3.2.2)
            self.headers[:] = [(b"host", target.authority), *(h for h in self.headers if h[0] != b"host")]
        path = urllib.parse.unquote(target.path.decode("ascii"))
        self.scope["method"], self.scope["http_version"] = method.decode("ascii"), version
        self.scope["path"], self.scope["raw_path"] = self.root_path + path, self.root_path.encode("ascii") + target.path
        self.scope["query_string"] = target.query
        self._await("body")
        self._take(version)

    def _take(self, version: str) -> None:
        """Start the request, or let it wait for the answers before its own."""
        cycle = self.cycle = Exchange(
            is_draining=lambda: self._limits.draining and not self.pipeline,
            on_abandoned=partial(self._limits.abandon, self.headers),
            keep_alive_header=self._keep_alive_header,
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if self._running is None:
            self._start(cycle, self.app)
            return
        self.pipeline.appendleft((cycle, self.app))
        if len(self.pipeline) >= _MOST_WAITING:
            self.flow.hold()

    def _start(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._moved = True
        self._received += len(body)
        super().on_body(body)
        is_waiting = self._running is not None and self.cycle is not self._running
        if is_waiting and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.hold()

    def on_chunk_header(self) -> None:
        """Note the head of a chunk of the body."""
        self._moved = True

    def on_message_complete(self) -> None:
        """End the request."""
        self._moved = True
        if self.parser.should_upgrade():
            return
        self._await(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, or wait for it until the connection has been idle for `timeout_keep_alive`."""
        self.server_state.total_requests += 1
        self._running = None
        if self.transport.is_closing():
            return
        self.flow.release()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start(cycle, app)
        elif self._last_words or self._half_closed:
            self.transport.write(self._last_words)
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


def _error_answer(error: ApiError) -> bytes:
    """Return the bytes of an error after which the connection closes."""
    body = msgspec.json.encode(error.body)
    fixed = {"content-type": "application/json", "x-content-type-options": "nosniff", "connection": "close"}
    headers = {**error.headers, **fixed, "content-length": len(body)}
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body
