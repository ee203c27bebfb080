"""HTTP/1.1 as httptools parses it, with a bound on what stands before a body."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 1 << 16
"""Bytes of a request line with its headers, and of the trailers of a body; longer ones are answered with 400."""


class BoundedHttp(HttpToolsProtocol):
    """A connection. httptools itself would gather headers without an end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._moved = False
        self._fed = self._told = 0

    def data_received(self, data: bytes) -> None:
        """Bytes of the client's."""
        self._moved = False
        super().data_received(data)
        self._fed = 0 if self._moved else self._fed + len(data)
        if self._fed > LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers exceed {LONGEST_HEAD} bytes.")

    def on_message_begin(self) -> None:
        """A request."""
        super().on_message_begin()
        self._told = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or behind a body a trailer.

        Raises:
            ValueError: they are too long; the parser makes it an error of the client's.
        """
        self._told += len(name) + len(value)
        if self._told > LONGEST_HEAD:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request begins."""
        self._moved = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """More of the body."""
        self._moved = True
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """More of the body is announced."""
        self._moved = True

    def on_message_complete(self) -> None:
        """The request ends."""
        self._moved = True
        super().on_message_complete()
