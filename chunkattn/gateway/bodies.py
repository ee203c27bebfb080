"""Bodies of requests at a gateway: read, expanded and decoded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from chunkattn.web.content_codings import codings_of, expanded
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Caller

_SMALL_BODY = 1 << 16
"""Size in bytes up to which a body does not count in `max_body_bytes_per_client`."""


async def read_body(scope: Scope, receive: Receive, most: int, timeout_s: float) -> bytes:
    """Return the body of a request. A large body is read when its client has room for it.

    Args:
        scope: ASGI scope of the request, with its caller.
        receive: source of its messages.
        most: limit on the bytes of a body.
        timeout_s: time limit in seconds.

    Raises:
        ApiError: the client left before the end, the body takes too long, or the client's other bodies take the room.
    """
    caller: Caller = scope["state"]["caller"]
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if length.isdigit() and int(length) > _SMALL_BODY:
        await caller.hold_bytes(int(length), timeout_s)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the client has left", code="client_closed_request")
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > _SMALL_BODY and not caller.num_bytes:  # of unknown length, so it takes the room of the longest
                    limit.reschedule(None)
                    await caller.hold_bytes(most, timeout_s)
                    limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than request_timeout_s {timeout_s:g}", code="timeout") from None
    caller.keep_bytes(size if size > _SMALL_BODY else 0)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def expanded_body(body: bytes, headers: Iterable[tuple[bytes, bytes]], most: int) -> bytes:
    """Return a body without its Content-Encoding.

    Args:
        body: the body as it was sent.
        headers: headers of the request: names in lower case, and values.
        most: limit on the bytes of the expanded body.

    Raises:
        ApiError: the coding is unknown, or the body is damaged or too large.
    """
    codings = codings_of(headers)
    return expanded(body, codings, most) if codings else body


def decoded_json(body: bytes) -> Any:
    """Return the value of a JSON body; None for one that is no JSON. UTF-16 and UTF-32 are read as a server reads them."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
