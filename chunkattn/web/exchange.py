"""`Exchange`: one request on a connection with its answer, and `LingeringTransport`, which closes without losing an answer."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_LARGE = 1 << 16
"""Bytes of a body whose decoding is worth a pause."""
_LEAVING_S = 0.02
"""Pause in seconds in which the end of a connection that has already arrived is read and answered with a reset."""


class LingeringTransport:
    """Transport whose `close` ends the sending, and reads on until the client closes as well.

    Closing a socket whose client still sends resets the connection, and a reset may destroy an answer that the client has not
    read (RFC 9112, 9.6).

    Args:
        transport: transport of the connection.
        loop: its event loop.
        linger_s: function that returns how long to read on, in seconds.

    Attributes:
        client_ended: whether the client has ended its sending, so there is nothing to read on for.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, linger_s: Callable[[], float]) -> None:
        self._transport, self._loop, self._linger_s = transport, loop, linger_s
        self._is_closing = self.client_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or will be."""
        return self._is_closing or self._transport.is_closing()

    def has_input(self) -> bool:
        """Return whether bytes of the client, or its end, have arrived that the event loop has not read."""
        socket = self._transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0:
            return False
        if not hasattr(select, "poll"):  # Windows
            return bool(select.select([socket.fileno()], [], [], 0)[0])
        return bool(_events(socket.fileno()))

    def is_reset(self) -> bool:
        """Return whether the client has reset the connection; False where the system does not tell."""
        socket = self._transport.get_extra_info("socket")
        if socket is None or socket.fileno() < 0 or not hasattr(select, "poll"):
            return False
        return bool(_events(socket.fileno()) & (select.POLLERR | select.POLLHUP))

    def write(self, data: bytes) -> None:
        """Send bytes; after `close` they are dropped."""
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End the sending, and close once the client has closed or the time is over."""
        if self.is_closing():
            return
        self._is_closing = True
        if self.client_ended or not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
            if not self._transport.is_reading():
                self._transport.resume_reading()
        except (OSError, RuntimeError):  # the client has reset the connection, or has sent its end before
            self._transport.close()
            return
        self._loop.call_later(self._linger_s(), self._transport.close)

    def close_now(self) -> None:
        """Close once everything is sent, without waiting for the client."""
        self._is_closing = True
        self._transport.close()


class HeldFlow(FlowControl):
    """Flow control whose reading stays paused while it is held, whatever a request that reads its body asks for."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self._is_held = False

    def hold(self) -> None:
        """Pause reading until `release`."""
        self._is_held = True
        self.pause_reading()

    def release(self) -> None:
        """Read again."""
        self._is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read again unless held."""
        if not self._is_held:
            super().resume_reading()


class Exchange(RequestResponseCycle):
    """One request with its answer.

    Args:
        is_draining: function that returns whether the answer should be the last one of its connection.
        on_abandoned: called when the client has left before its body was handed on.
        keep_alive_header: header of answers after which the connection stays open.
        **options: arguments of uvicorn's class.
    """

    transport: Any

    def __init__(
        self,
        *,
        is_draining: Callable[[], bool],
        on_abandoned: Callable[[], None],
        keep_alive_header: tuple[bytes, bytes],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._is_draining, self._on_abandoned, self._keep_alive_header = is_draining, on_abandoned, keep_alive_header
        self._ends_with_connection = False
        self._size, self._is_whole, self._is_refused = 0, False, False

    async def receive(self) -> Any:
        """Return the next part of the body, or `http.disconnect`.

        After the last part of a large body, more bytes or the connection's end may wait to be read. There is a pause then, so
        that the body of a client that hung up is not decoded.
        """
        message = await super().receive()
        if message["type"] == "http.request":
            self._size += len(message["body"])
            self._is_whole = not message["more_body"]
            if self._size > _LARGE and self._is_whole and self.transport.has_input():
                self.flow.resume_reading()  # a client's end is seen, and answered by a probe
                await asyncio.sleep(_LEAVING_S)
                if self.disconnected or self.transport.is_reset():
                    self.drop()  # nobody reads an answer
                    self.transport.abort()  # else a connection whose reading is paused would stay
                    self._on_abandoned()
                    return {"type": "http.disconnect"}
        elif not (self._is_whole or self._is_refused):
            self._on_abandoned()
        return message

    async def send(self, message: Any) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start" and not self.response_started:
            self._prepare(message)
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    def _prepare(self, message: Any) -> None:
        """Decide how the answer ends, and whether the connection goes on."""
        names = {name.lower() for name, _ in message.get("headers", ())}
        asks_first = self.waiting_for_100_continue and self.more_body  # its body may come next, or another request
        if asks_first or self._is_draining():
            self.keep_alive = False
        if self.scope["http_version"] == "1.0" and not names & {b"content-length", b"transfer-encoding"}:
            self._ends_with_connection, self.chunked_encoding = True, False  # HTTP/1.0 has no chunks
        if self.keep_alive and b"connection" not in names:
            self.default_headers = [*self.default_headers, self._keep_alive_header]

    def drop(self, *, refused: bool = False) -> None:
        """End the request: its application sees a client that has left, and sends nothing more.

        Args:
            refused: whether the server ends it, not the client.
        """
        self.disconnected, self._is_refused = True, refused or self._is_refused
        self.message_event.set()


def _events(file: int) -> int:
    """Return what a socket is ready for, of `select.POLLIN` and its errors."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return next((events for _, events in poll.poll(0)), 0)
