"""HTTP/1.1 client for many requests at once. httptools parses the answers, so the client leaves the processor to the server."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from chunkattn.errors import ConfigError, EngineError

_ANSWER_S = 60.0
LONGEST_MESSAGE = 300
"""Characters of an answer in the message of an error."""


class MissingRoute(ConfigError):
    """Server without the route of a question."""


class RefusedRequest(ConfigError):
    """Request that the server understands as HTTP and refuses for its content or size."""


_ERRORS: dict[int, type[ConfigError]] = {
    **dict.fromkeys((404, 405, 501), MissingRoute),
    **dict.fromkeys((400, 413, 422), RefusedRequest),
}
"""Errors by status."""


class Client:
    """Client of one server, with as many persistent connections as there are requests at once.

    Args:
        url: base URL of the server, with or without a final `/v1`.
        api_key: bearer token; None sends none.
        name: name of the URL's option or argument in errors.

    Raises:
        ConfigError: the URL has no http or https scheme or no host, or holds credentials; the key cannot be a header.
    """

    def __init__(self, url: str, api_key: str | None = None, name: str = "--url") -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{name} {url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{name} must be like http://localhost:8000; got {url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"{name} takes no credentials, query or fragment; give a key with --api-key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--api-key must be printable ASCII")
        self._host, self._path = parts.hostname, parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        key = "" if api_key is None else f"Authorization: Bearer {api_key}\r\n"
        self._headers = f"Host: {parts.netloc}\r\nAccept: */*\r\nContent-Type: application/json\r\n{key}"
        self._idle: list[_Connection] = []

    async def json(
        self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = _ANSWER_S, advice: str = ""
    ) -> Any:
        """Return the JSON of the answer to a GET or, with a body, to a POST.

        Args:
            path: path below the base URL.
            body: value for the body.
            timeout_s: longest wait for the answer in seconds.
            advice: end of the error about an answer that is no success or no JSON.

        Raises:
            MissingRoute: the server has no such route.
            RefusedRequest: the server refuses what the request says or its size.
            ConfigError: the server refuses the request for another reason, such as a wrong key or a full queue.
            EngineError: the server fails, gives no answer, or no JSON.
        """
        name = f"{'GET' if body is None else 'POST'} {path}"
        answer = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                status = await self.send(path, None if body is None else json.dumps(body).encode(), answer.extend)
        except TimeoutError:
            raise EngineError(f"{name} had no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise EngineError(f"{name} failed: {error or type(error).__name__}; is the server running?") from None
        if status != 200:
            kind = _ERRORS.get(status, ConfigError if status < 500 else EngineError)
            raise kind(f"{name} answered {status}: {answer[:LONGEST_MESSAGE].decode(errors='replace')}{advice}")
        try:
            return json.loads(answer)
        except ValueError:
            raise EngineError(f"{name} gave no JSON{advice}") from None

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def send(self, path: str, body: bytes | None, hear: Callable[[bytes], object]) -> int:
        """Send a GET or, with a body, a POST, and return the status of the answer.

        Args:
            path: path below the base URL.
            body: JSON.
            hear: receives the pieces of the answer's body as they arrive.

        Raises:
            OSError: the connection failed or ended before the answer did.
        """
        method, data = ("GET", b"") if body is None else ("POST", body)
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(data)}\r\n\r\n"
        while True:
            is_reused = bool(self._idle)
            connection = self._idle.pop() if is_reused else await self._connect()
            try:
                status = await connection.exchange(head.encode() + data, hear)
            except OSError:
                if is_reused and not connection.has_answer:
                    continue  # the server closed the idle connection before the request came
                raise
            except BaseException:
                connection.abort()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return status

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection


class _Connection(asyncio.Protocol):
    """Connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.is_open, self.has_answer = False, False
        self._parser = HttpResponseParser(self)
        self._status: asyncio.Future[int] | None = None
        self._has_head, self._ends_at_close = False, True

    async def exchange(self, request: bytes, hear: Callable[[bytes], object]) -> int:
        """Send a request and return the status once the answer has ended."""
        self.has_answer, self._ends_at_close, self._hear = False, True, hear
        if not self.is_open:
            raise ConnectionResetError("the server closed the connection")
        self._status = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._status

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        self._transport.abort()

    # Calls of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._status is None or self._status.done():
            self.abort()  # nothing was asked
            return
        self.has_answer = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(ConnectionError(f"the answer is no HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self.has_answer and self._has_head and self._ends_at_close:
            self.on_message_complete()
        else:
            self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    # Calls of the parser

    def on_message_begin(self) -> None:
        self._has_head = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_at_close = False

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._hear(body)

    def on_message_complete(self) -> None:
        if self.is_open and not self._parser.should_keep_alive():
            self.is_open = False
            self._transport.close()
        if self._status is not None and not self._status.done():
            self._status.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if self._status is not None and not self._status.done():
            self._status.set_exception(error)
