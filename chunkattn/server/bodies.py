"""JSON request bodies: bounds on their bytes and values, and decoding and validation of large bodies in a thread."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from email.message import Message
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from chunkattn.fair_threads import check_wanted
from chunkattn.server.errors import ApiError, too_large
from chunkattn.server.json_shape import Shape, measure
from chunkattn.server.keys import Caller
from chunkattn.server.options import ServerConfig
from chunkattn.server.state import ServerState

SMALL_BODY = 1 << 16
"""Bytes up to which a body takes nothing of its client's share, and is decoded on the event loop if it has few values."""
_PIECE = 1 << 16
"""Bytes inflated at once."""
_FEW_VALUES = 2048
"""Values up to which such a body is decoded on the event loop."""
_MAX_DEPTH, _MAX_VALUES = 64, 1 << 20
_MAX_CODINGS = 2
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
        await caller.hold_bytes(config.max_body_bytes, config.request_timeout_s)
        body = await threads.run(_inflated, body, coding, config.max_body_bytes)
        caller.keep_bytes(len(body) if len(body) > SMALL_BODY else 0)

    def read() -> Any:
        plain = _utf8(body)
        _check_shape(plain, state.llm.config.max_items_per_request)
        value, errors = field.validate(_decoded(plain), {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return value

    quick = len(body) <= SMALL_BODY and sum(_bounds(body)[:3]) <= _FEW_VALUES
    request._json = read() if quick else await state.decoder.run(read)


async def _received(request: Request, caller: Caller, config: ServerConfig) -> bytes:
    """Return the body of a request. A large body is read when its client has room for it.

    Raises:
        ApiError: 408, the body takes longer than a request may; 413, it is too large; 429, the client has no room until the
            timeout.
    """
    timeout = config.request_timeout_s
    until = asyncio.get_running_loop().time() + timeout
    length = request.headers.get("content-length", "")
    pieces, size, held = list[bytes](), int(length) if length.isdecimal() else 0, False
    more = True
    while more or (size > SMALL_BODY and not held):
        if size > SMALL_BODY and not held:  # a body of unknown length takes the room of the longest
            most = config.max_body_bytes
            await caller.hold_bytes(min(size, most) if length else most, timeout)
            held, until = True, asyncio.get_running_loop().time() + timeout
            continue
        try:
            async with asyncio.timeout_at(until):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, f"the body took longer than request_timeout_s {timeout:g}", code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client has left")
        pieces.append(message.get("body", b""))
        more = bool(message.get("more_body"))
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
    listed = [c.strip() for c in codings.split(",") if c.strip() not in ("", "identity")]
    if len(listed) > _MAX_CODINGS:
        text = f"the body has {len(listed)} content codings, at most {_MAX_CODINGS} are read"
        raise ApiError(415, text, code="unsupported_encoding")
    for coding in reversed(listed):
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
            check_wanted()
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
