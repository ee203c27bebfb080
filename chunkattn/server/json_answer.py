"""`json_answer`: JSON answers, of which large ones are encoded in a thread and sent in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from fastapi import Response
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

from chunkattn.server.state import ServerState
from chunkattn.web.keys import Caller

_LARGE = 4096
"""Number of values above which an answer is built and encoded in a thread."""
_ENCODED = 16_384
"""Values encoded per call. The encoder holds the GIL for one call, and the event loop waits for the GIL."""
_BYTES_PER_VALUE = 16
_SENT = 1 << 18
"""Bytes handed to the connection at once; the next piece waits until the client has read."""


class PiecesResponse(Response):
    """JSON response whose body is in pieces, sent one after the other as the client reads.

    Args:
        pieces: parts of the body, in order.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(pieces)
        super().__init__(b"", headers={"Content-Length": str(sum(map(len, self._pieces)))})
        self.background: BackgroundTask | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()  # freed as soon as it is sent
            for start in range(0, len(piece), _SENT):
                await send({"type": "http.response.body", "body": piece[start : start + _SENT], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def json_answer(
    state: ServerState, caller: Caller, build: Callable[[], Any], values: int, *, in_thread: bool = False
) -> Response:
    """Return a JSON response; a large answer is built and encoded in a thread, once the client may hold its bytes.

    Args:
        state: state of the server.
        caller: client of the request.
        build: function that returns the content of the answer, an object or a list. Lists are encoded in pieces, and may be
            iterators.
        values: approximate count of values in the answer; more than 4096 select the thread.
        in_thread: whether an answer of any size is built in a thread, because building it takes long.
    """

    def pieces() -> list[bytes]:
        body = build()
        return list(_pieces(body) if isinstance(body, Mapping) else _list_pieces(body))

    if values > _LARGE:
        await caller.hold_bytes(values * _BYTES_PER_VALUE, state.config.request_timeout_s)
    elif not in_thread:
        return Response(msgspec.json.encode(build(), enc_hook=list), media_type="application/json")  # `list` of iterators
    return PiecesResponse(await state.llm.threads.run(pieces))


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the JSON text of an object, each of its long values in several pieces."""
    before = b"{"
    for name, value in body.items():
        yield before + msgspec.json.encode(name) + b":"
        if isinstance(value, (list, Iterator)):
            yield from _list_pieces(value)
        else:
            yield msgspec.json.encode(value)
        before = b","
    yield b"{}" if before == b"{" else b"}"


def _list_pieces(rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON text of a list in pieces of about `_ENCODED` values."""
    before, group, values = b"[", list[Any](), 0
    for row in rows:
        group.append(row)
        values += _count(row)
        if values >= _ENCODED:
            yield before + msgspec.json.encode(group)[1:-1]
            before, group, values = b",", [], 0
    if group:
        yield before + msgspec.json.encode(group)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def _count(value: Any) -> int:
    """Return the approximate number of values in a value: of an object more than of its own level."""
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + (len(value) * _count(value[0]) if value else 0) if isinstance(value, list) else 1
