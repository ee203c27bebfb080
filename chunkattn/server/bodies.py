"""JSON bodies of requests and answers: bounds on what a client sends and holds, and threads for the large ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from email.message import Message
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from chunkattn.schema.piece_keys import Keys, keys_of
from chunkattn.server.state import ServerState
from chunkattn.web.content_codings import codings_of, expanded
from chunkattn.web.errors import ApiError
from chunkattn.web.json_shape import Shape, measure
from chunkattn.web.keys import Caller
from chunkattn.web.options import ServerConfig

SMALL_BODY = 1 << 16
"""Bytes up to which a body takes nothing of its client's share, and is decoded on the event loop if it has few values."""
_FEW_VALUES = 2048
"""Values up to which such a body is decoded on the event loop."""
_MAX_DEPTH, _MAX_VALUES = 64, 1 << 20
_STRINGS_PER_ITEM, _CONTAINERS_PER_ITEM = 32, 4
_LARGE = 4096
"""Number of values above which an answer is built and encoded in a thread."""
_ENCODED = 16_384
"""Values encoded per call. The encoder holds the GIL for one call, and the event loop waits for the GIL."""
_BYTES_PER_VALUE = 16
_SENT = 1 << 18
"""Bytes handed to the connection at once; the next piece waits until the client has read."""


class JsonRoute(APIRoute):
    """Route whose body is a JSON object; pass the class to a router as `route_class`.

    Large bodies are decoded and validated in one thread, in which clients take turns. One call of a decoder holds the GIL,
    which the event loop needs as well, so the number of a body's values is bounded before the body becomes objects.

    Attributes:
        field_status: status of an answer to a fault in a field.
    """

    field_status = 400

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a validated body."""
        handler, field = super().get_route_handler(), self.body_field

        async def answer(request: Request) -> Response:
            keys = Keys() if field is None else await _read(request, field)
            with request.app.state.server.reports.sent(keys):
                return await handler(request)

        return answer


async def _read(request: Request, field: Any) -> Keys:
    """Read, decode and validate the body of a request; the handler finds the result in `request.json`.

    Returns:
        Routing keys of the request, with the option `report_documents`.

    Raises:
        ApiError: the body is too large, has too many values, or has an unknown content coding; or the client's other requests
            hold the memory for bodies until the timeout.
        RequestValidationError: the body is not valid.
    """
    state: ServerState = request.app.state.server
    caller: Caller = request.state.caller
    config, threads = state.config, state.llm.threads
    body = await _received(request, caller, config)
    if not body or not _is_json(request):
        return Keys()  # the handler answers with its own error
    if codings := codings_of(request.scope["headers"]):
        await caller.hold_bytes(config.max_body_bytes, config.request_timeout_s)
        body = await threads.run(expanded, body, codings, config.max_body_bytes)
        caller.keep_bytes(len(body) if len(body) > SMALL_BODY else 0)

    engine, authorization = state.llm.config, request.headers.get("authorization", "")

    def read() -> tuple[Any, Keys]:
        plain = _utf8(body)
        _check_shape(plain, engine.max_items_per_request)
        given = _decoded(plain)
        value, errors = field.validate(given, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        if not config.report_documents:
            return value, Keys()
        separator = engine.chunk_separator if engine.enable_chunk_aware else None
        return value, keys_of(request.scope["path"], given, authorization, separator=separator)

    quick = len(body) <= SMALL_BODY and sum(_bounds(body)[:3]) <= _FEW_VALUES
    request._json, keys = read() if quick else await state.decoder.run(read)
    return keys


async def _received(request: Request, caller: Caller, config: ServerConfig) -> bytes:
    """Return the body of a request. A large body is read when its client has room for it.

    Raises:
        ApiError: 408, the body takes longer than a request may; 413, it is too large; 429, the client has no room until the
            timeout.
    """
    timeout, length = config.request_timeout_s, request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > SMALL_BODY:
        await caller.hold_bytes(int(length), timeout)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout) as limit:
            async for piece in request.stream():
                body += piece
                if len(body) > SMALL_BODY and not caller.num_bytes:  # of unknown length, so it takes the room of the longest
                    limit.reschedule(None)
                    await caller.hold_bytes(config.max_body_bytes, timeout)
                    limit.reschedule(asyncio.get_running_loop().time() + timeout)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than request_timeout_s {timeout:g}", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has left") from None
    request._body = bytes(body)
    return request._body


def _is_json(request: Request) -> bool:
    """Return whether the content type is JSON, as FastAPI judges it."""
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _utf8(body: bytes) -> bytes:
    """Return a JSON text in UTF-8 without a byte order mark. UTF-16 and UTF-32 are recognised as in RFC 4627."""
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _check_shape(body: bytes, items: int) -> None:
    """Check the number of values and the depth of a body.

    Args:
        body: JSON text.
        items: number of items that a request may have.

    Raises:
        ApiError: 400, a limit is exceeded.
    """
    limits, bounds = Shape(_CONTAINERS_PER_ITEM * items, _STRINGS_PER_ITEM * items, _MAX_VALUES, _MAX_DEPTH), _bounds(body)
    shape = bounds if all(found <= most for found, most in zip(bounds, limits)) else measure(body)
    for name, found, most in zip(("objects and lists", "texts", "values", "levels"), shape, limits, strict=True):
        if found > most:
            text = f"the body has {found} {name}, at most {most} are read; send less at once"
            raise ApiError(400, text, code="body_too_complex")


def _bounds(body: bytes) -> Shape:
    """Return upper bounds on the shape of a body. They count the characters within strings, too."""
    opened = body.count(b"[") + body.count(b"{")
    return Shape(opened, body.count(b'"') // 2, body.count(b","), opened)


def _decoded(body: bytes) -> Any:
    """Return the value of a JSON text. msgspec is several times as fast as `json`, which judges what msgspec refuses.

    Raises:
        ApiError: 400, the text is malformed.
    """
    with suppress(ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(body)
    try:
        return json.loads(body)  # also reads NaN and halves of surrogate pairs, which the fields judge
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


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
