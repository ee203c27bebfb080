"""HTTP/1.1 connections parsed by httptools, with limits on size, count, time and rate."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chunkattn.server.options import ServerConfig

logger = logging.getLogger(__name__)

LONGEST_HEAD = 1 << 16
"""Size limit in bytes of a request line with its headers, and of a body's trailers; longer input is answered with 400."""
HEAD_TOO_LONG = f"The request line and headers exceed {LONGEST_HEAD} bytes."
LOWEST_RATE = 256
"""Lowest rate in bytes per second at which a client must send a body, and read an answer."""
_CHECK_S = 0.25
_PROBE_S, _LONGEST_PROBE_S = 0.1, 5.0
_LOG_EVERY_S = 10.0


def error_body(status: int, text: str, code: str) -> bytes:
    """Return the JSON body of an error that is answered before the application sees the request.

    Args:
        status: HTTP status.
        text: message of the error.
        code: code of the error.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": text, "type": kind, "param": None, "code": code}}).encode()


@dataclass
class ConnectionLimits:
    """State shared by all connections of a server.

    Attributes:
        config: options of the server.
        most: limit on open connections; lower than `max_connections` if the operating system allows fewer files.
        refused: connections refused since the start.
        logged: time of the last log line about refusals, in seconds of the monotonic clock.
    """

    config: ServerConfig
    most: int
    refused: int = 0
    logged: float = float("-inf")

    def note_refused(self) -> None:
        """Count a connection over the limit; log one line per 10 s."""
        self.refused += 1
        if (now := time.monotonic()) - self.logged >= _LOG_EVERY_S:
            logger.warning("connections over max_connections %d are refused with 503: %d so far", self.most, self.refused)
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


class BoundedHttp(HttpToolsProtocol):
    """HTTP connection with limits. httptools has no size limit for headers, and uvicorn has no time limit."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._moved = False
        self._fed = self._told = 0
        self._phase: str | None = "headers"  # awaited from the client: "headers", "body" or nothing
        self._since, self._received = time.monotonic(), 0
        self._writing: tuple[float, int, int] | None = None  # start of the wait, buffered bytes then, bytes read since
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it with 503 over the limit."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.most:
            self._limits.note_refused()
            self._refuse(503, "the server has too many connections; try again", "too_many_connections")

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; answer 400 if a head exceeds `LONGEST_HEAD`."""
        if self.transport.is_closing():
            return
        if self._phase is None:
            self._await("headers")
        self._moved = False
        super().data_received(data)
        self._fed = 0 if self._moved else self._fed + len(data)
        if self._fed > LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response(HEAD_TOO_LONG)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the client's end of sending. The client may have left, or may wait for its answer.

        Returns:
            True to keep the connection open.
        """
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self._half_closed:
            return False
        self._half_closed, self.cycle.keep_alive = True, False
        self._probe(_PROBE_S)
        return True

    def _probe(self, pause: float) -> None:
        """Send an interim response: the connection of a client that left is reset, a waiting client skips it."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if not self.pipeline and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(pause, self._probe, min(2 * pause, _LONGEST_PROBE_S))

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
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or self._phase is None:
            return
        if self._phase == "headers":
            if answering:  # the header timeout of the next request starts after this answer
                self._since = now
            elif now - self._since > config.header_timeout_s:
                self._refuse(
                    408, f"the request's headers took longer than header_timeout_s {config.header_timeout_s:g}", "timeout"
                )
        elif self.flow.read_paused:  # the server paused reading, so the client's timeout restarts
            self._await("body")
        elif now - self._since > config.body_timeout_s:
            if self._received < LOWEST_RATE * config.body_timeout_s:
                text = f"less than {LOWEST_RATE} bytes a second of the body came in body_timeout_s {config.body_timeout_s:g}"
                self._refuse(408, text, "timeout")
            else:
                self._await("body")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not an HTTP request, and close."""
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, text: str, code: str) -> None:
        """Answer with an error and close; close alone if another answer has begun."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error_body(status, text, code)
            line = {
                400: b"HTTP/1.1 400 Bad Request\r\n",
                408: b"HTTP/1.1 408 Request Timeout\r\n",
                503: b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n",
            }
            head = b"content-type: application/json\r\nx-content-type-options: nosniff\r\nconnection: close\r\n"
            self.transport.write(b"%s%scontent-length: %d\r\n\r\n%s" % (line[status], head, len(body), body))
        self.transport.close()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._told = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or a trailer after the body.

        Raises:
            ValueError: the headers exceed `LONGEST_HEAD`; the parser turns this into a 400.
        """
        self._told += len(name) + len(value)
        if self._told > LONGEST_HEAD:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request once its headers are complete."""
        self._moved = True
        self._await("body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._moved = True
        self._received += len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Note the head of a chunk of the body."""
        self._moved = True

    def on_message_complete(self) -> None:
        """End the request."""
        self._moved = True
        self._await(None)
        super().on_message_complete()
