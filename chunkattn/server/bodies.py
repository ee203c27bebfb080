"""JSON request bodies: bounds on their bytes and values, and decoding and validation of large bodies in a thread."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from chunkattn.server.errors import ApiError, too_large
from chunkattn.server.json_shape import Shape, measure
from chunkattn.server.keys import Caller
from chunkattn.server.options import ServerConfig
from chunkattn.server.state import ServerState

SMALL_BODY = 1 << 16
"""Size in bytes up to which a body is decoded on the event loop, by `json`, whose errors name the position of the fault."""
_PIECE = 1 << 16
"""Bytes inflated at once."""
_MAX_DEPTH, _MAX_VALUES = 64, 1 << 20
_STRINGS_PER_ITEM, _CONTAINERS_PER_ITEM = 32, 4
_CODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""Window bits of zlib for each content coding (RFC 9110, 8.4.1)."""


class JsonRoute(APIRoute):
    """Route whose body is a JSON object; pass the class to a router as `route_class`.

    Large bodies are decoded and validated in one thread, in which clients take turns. One call of a decoder holds the GIL,
    which the event loop needs as well, so the number of a body's values is bounded before the body becomes objects.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a validated body."""
        handler, field = super().get_route_handler(), self.body_field

        async def answer(request: Request) -> Response:
            if field is not None:
                await _read(request, field)
            return await handler(request)

        return answer


async def _read(request: Request, field: Any) -> None:
    """Read, decode and validate the body of a request; the handler finds the result in `request.json`.

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
        return  # the handler answers with its own error
    if coding := request.headers.get("content-encoding", "").strip().lower():
        body = await threads.run(_inflated, body, coding, config.max_body_bytes)
        if len(body) > SMALL_BODY:
            await caller.hold_bytes(len(body), config.request_timeout_s)

    def read() -> Any:
        plain = _utf8(body)
        _check_shape(plain, state.llm.config.max_items_per_request)
        value, errors = field.validate(_decoded(plain), {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return value

    request._json = read() if len(body) <= SMALL_BODY else await state.decoder.run(read)


async def _received(request: Request, caller: Caller, config: ServerConfig) -> bytes:
    """Return the body of a request. A large body is read when its client has room for it.

    Raises:
        ApiError: 413, the body is too large; 429, the client has no room until the timeout.
    """
    length = request.headers.get("content-length", "")
    pieces, size, held = list[bytes](), int(length) if length.isdecimal() else 0, False
    while True:
        if size > SMALL_BODY and not held:  # a body of unknown length takes the room of the longest
            most = config.max_body_bytes
            await caller.hold_bytes(min(size, most) if length else most, config.request_timeout_s)
            held = True
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client has left")
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            break
        size += 0 if length else len(pieces[-1])
    request._body = b"".join(pieces)
    return request._body


def _is_json(request: Request) -> bool:
    """Return whether the content type is JSON, as FastAPI judges it."""
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _inflated(body: bytes, codings: str, most: int) -> bytes:
    """Return the content of an encoded body.

    Args:
        body: body as it was sent.
        codings: value of the Content-Encoding header.
        most: limit on the bytes of the content.

    Raises:
        ApiError: 415, a coding is unknown; 413, the content exceeds `most`; 400, the body does not match the coding.
    """
    for coding in reversed([c.strip() for c in codings.split(",") if c.strip() not in ("", "identity")]):
        if coding not in _CODINGS:
            text = f"the content coding {coding[:40]!r} is not supported; send the body as it is, or with gzip or deflate"
            raise ApiError(415, text, code="unsupported_encoding", **{"Accept-Encoding": "gzip, deflate"})
        bits = _CODINGS[coding]
        if coding == "deflate" and (len(body) < 2 or body[0] & 15 != 8 or (body[0] << 8 | body[1]) % 31):
            bits = -zlib.MAX_WBITS  # some clients leave the zlib header out
        body = _unpacked(body, coding, bits, most)
    return body


def _unpacked(body: bytes, coding: str, bits: int, most: int) -> bytes:
    unpack, content, left = zlib.decompressobj(bits), bytearray(), body
    try:
        while left and not unpack.eof:
            content += unpack.decompress(left, _PIECE)
            left = unpack.unconsumed_tail
            if not left:
                content += unpack.flush()  # some symbols that were read with the last byte
            if len(content) > most:
                raise too_large(most)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid {coding}: {error}", code="invalid_encoding") from None
    if not unpack.eof or unpack.unused_data:
        fault = "data follows its end" if unpack.eof else "it ends early"
        raise ApiError(400, f"the body is not valid {coding}: {fault}", code="invalid_encoding")
    return bytes(content)


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
    limits = Shape(_CONTAINERS_PER_ITEM * items, _STRINGS_PER_ITEM * items, _MAX_VALUES, _MAX_DEPTH)
    opened = body.count(b"[") + body.count(b"{")
    bounds = Shape(opened, body.count(b'"') // 2, body.count(b","), opened)  # they count the characters in strings, too
    shape = bounds if all(found <= most for found, most in zip(bounds, limits)) else measure(body)
    for name, found, most in zip(("objects and lists", "texts", "values", "levels"), shape, limits, strict=True):
        if found > most:
            text = f"the body has {found} {name}, at most {most} are read; send less at once"
            raise ApiError(400, text, code="body_too_complex")


def _decoded(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        RequestValidationError: the text is malformed.
    """
    try:
        return json.loads(body) if len(body) <= SMALL_BODY else msgspec.json.decode(body)
    except (ValueError, msgspec.MsgspecError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        place = error.pos if isinstance(error, json.JSONDecodeError) else 0
        detail = {"type": "json_invalid", "loc": ("body", place), "msg": "", "input": {}, "ctx": {"error": reason}}
        raise RequestValidationError([detail]) from None
