"""`Bodies`: JSON bodies of requests, read within bounds and decoded in turns of the clients; `JsonRoute` for FastAPI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from email.message import Message
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from chunkattn.fair_threads import FairThreads
from chunkattn.web.content_codings import codings_of, expanded
from chunkattn.web.errors import ApiError
from chunkattn.web.json_shape import Shape, measure
from chunkattn.web.keys import Caller
from chunkattn.web.options import ServerConfig
from chunkattn.web.time_limit import unless_gone

T = TypeVar("T")

SMALL_BODY = 1 << 16
"""Bytes up to which a body takes nothing of its client's share, and is decoded on the event loop if it has few values."""
_FEW_VALUES = 2048
"""Values up to which such a body is decoded on the event loop."""
_MAX_DEPTH, _MAX_VALUES = 64, 1 << 20
_STRINGS_PER_ITEM, _CONTAINERS_PER_ITEM = 32, 4
_BYTES_PER_STRING, _BYTES_PER_CONTAINER = 16, 64

Use = Callable[[Any], T]
"""Function of the decoded value. It runs where the value is decoded, on the event loop or in a thread."""
Note = Callable[[Request, Any], AbstractContextManager[Any]]
"""Function of a request and its decoded body, if that is valid. The result is entered around the handler."""


class UnreadableError(ApiError):
    """A body is malformed or too complex, and was not read."""


class Bodies:
    """Reader of the bodies of one HTTP process.

    A body is read when its client has room for it. Its shape is checked before it becomes objects. Large bodies are expanded
    and decoded in one thread, in which clients take turns: one call of a decoder holds the GIL, which the event loop needs as
    well, so several threads would be no faster.

    Args:
        config: options with the limits.
        max_items: number of items that a request may have; None bounds the memory of objects alone.
        note: see `Note`.

    Attributes:
        decoder: the thread.
    """

    def __init__(self, config: ServerConfig, max_items: int | None = None, note: Note | None = None) -> None:
        self.note: Note = note or (lambda request, raw: nullcontext())
        self.decoder = FairThreads(1)
        self._most, self._timeout_s = config.max_body_bytes, config.request_timeout_s
        self._max_items = max_items

    async def receive(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request. A large body is read when its client has room for it.

        Args:
            scope: ASGI scope of the request, with its caller.
            receive: ASGI channel of its messages.

        Raises:
            ApiError: 408, the body takes longer than a request may; 429, the client has no room until the timeout; 499, the
                client has left.
        """
        caller: Caller = scope["state"]["caller"]
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > SMALL_BODY:
            await caller.hold_bytes(int(length), self._timeout_s)
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client has left", code="client_closed_request")
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > SMALL_BODY and not caller.num_bytes:  # of unknown length: takes the room of the longest
                        limit.reschedule(None)
                        await caller.hold_bytes(self._most, self._timeout_s)
                        limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        except TimeoutError:
            text = f"the body took longer than request_timeout_s {self._timeout_s:g}"
            raise ApiError(408, text, code="timeout") from None
        caller.keep_bytes(len(body) if len(body) > SMALL_BODY else 0)
        return bytes(body)

    async def decode(self, scope: Scope, body: bytes, use: Use[T]) -> T:
        """Return what a function makes of the value of a JSON body.

        Args:
            scope: ASGI scope of the request.
            body: body as it was sent.
            use: the function.

        Raises:
            ApiError: the content coding cannot be read, the value is too large or too complex, or the text is malformed.
        """
        caller: Caller = scope["state"]["caller"]
        codings = codings_of(scope["headers"])
        if codings:
            await caller.hold_bytes(self._most, self._timeout_s)

        def work() -> tuple[T, int]:
            plain = _utf8(expanded(body, codings, self._most))
            self._check_shape(plain)
            return use(_decoded(plain)), len(plain)

        result, size = await self.in_turn(work, quick=not codings and is_quick(body))
        if codings:
            size = max(size, len(body))
            caller.keep_bytes(size if size > SMALL_BODY else 0)
        return result

    async def in_turn(self, work: Callable[[], T], *, quick: bool) -> T:
        """Return the result of work on a body, in the decoder thread unless it is quick.

        Args:
            work: the work.
            quick: see `is_quick`.
        """
        return work() if quick else await self.decoder.run(work)

    def _check_shape(self, body: bytes) -> None:
        """Check the number of values and the depth of a body.

        Raises:
            ApiError: 400, a limit is exceeded; 413, the objects would take too much memory.
        """
        if self._max_items is None:
            room = max(self._most, ServerConfig.max_body_bytes)
            limits = Shape(room // _BYTES_PER_CONTAINER, room // _BYTES_PER_STRING, _MAX_VALUES, _MAX_DEPTH)
        else:
            items = self._max_items
            limits = Shape(_CONTAINERS_PER_ITEM * items, _STRINGS_PER_ITEM * items, _MAX_VALUES, _MAX_DEPTH)
        bounds = _bounds(body)
        shape = bounds if all(count <= most for count, most in zip(bounds, limits)) else measure(body)
        for name, count, most in zip(("objects and lists", "texts", "values", "levels"), shape, limits, strict=True):
            if count > most:
                text = f"the body has {count} {name}, at most {most} are read; send less at once"
                if self._max_items is None and name != "levels":
                    raise ApiError(413, text, code="request_too_large")
                raise UnreadableError(400, text, code="body_too_complex")


class JsonRoute(APIRoute):
    """Route whose body is a JSON object; pass the class to a router as `route_class`.

    `bodies` of the app's state reads and decodes the body. The validation runs where the body is decoded.

    Attributes:
        field_status: status of an answer to a fault in a field.
    """

    field_status = 400

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a validated body."""
        handler, field = super().get_route_handler(), self.body_field

        async def answer(request: Request) -> Response:
            with nullcontext() if field is None else await _read(request, field):
                return await handler(request)

        return answer


async def _read(request: Request, field: Any) -> AbstractContextManager[Any]:
    """Read, decode and validate the body of a request; the handler finds the result in `request.json`.

    Returns:
        Context of the handler.

    Raises:
        ApiError: see `Bodies`.
        RequestValidationError: the body is not valid.
    """
    bodies: Bodies = request.app.state.bodies
    body = request._body = await bodies.receive(request.scope, request.receive)
    if not body or not is_json(request.headers.get("content-type", "")):
        return nullcontext()  # the handler answers with its own error

    def validated(raw: Any) -> tuple[Any, AbstractContextManager[Any]]:
        value, errors = field.validate(raw, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return value, bodies.note(request, raw)

    decoding = bodies.decode(request.scope, body, validated)
    request._json, noted = await (decoding if is_quick(body) else unless_gone(request, decoding))
    return noted


def is_quick(body: bytes) -> bool:
    """Return whether a JSON text is so small that work on it may hold up the event loop."""
    return len(body) <= SMALL_BODY and sum(_bounds(body)[:3]) <= _FEW_VALUES


def is_json(content_type: str) -> bool:
    """Return whether a content type is JSON, as FastAPI judges it."""
    message = Message()
    message["content-type"] = content_type
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
        raise UnreadableError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


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
        raise UnreadableError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
