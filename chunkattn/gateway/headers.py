"""Headers of requests to replicas, and of their answers to clients."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from chunkattn.web.middleware import REPLICA_HEADER

_REPLICA = REPLICA_HEADER.encode()
_ONE_HOP = frozenset(b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade expect".split())
_OWN = frozenset(b"host content-length date server".split())
"""Headers that each end writes itself."""
_BODILESS = (204, 304)
"""Statuses without a body. The length that a 304 may tell is that of another answer, which uvicorn would wait for."""
_CORS = b"access-control-"


def outgoing_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of the request to a replica: the client's, its address, and the id and the span of the request."""
    traced = scope.get("state", {}).get("trace_headers", ())  # without a span of its own, the client's go on
    replaced = (b"x-request-id", b"x-forwarded-for", b"x-forwarded-proto", _REPLICA, *(name for name, _ in traced))
    dropped = _ONE_HOP | _OWN | _named_by_connection(scope["headers"])
    listed = [(name, value) for name, value in scope["headers"] if name not in dropped and name not in replaced]
    if (request_id := scope.get("state", {}).get("request_id")) is not None:
        listed.append((b"x-request-id", request_id.encode()))
    listed += traced
    if client := scope.get("client"):
        listed += [(b"x-forwarded-for", client[0].encode()), (b"x-forwarded-proto", scope.get("scheme", "http").encode())]
    return listed


def _named_by_connection(headers: Any) -> set[bytes]:
    """Return the headers that the Connection header declares to be of one hop."""
    return {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}


def relayed_start(message: Any, name: str, relays_cors: bool) -> dict[str, Any]:
    """Return the start of an answer with the headers to relay, and the replica's name.

    Args:
        message: `http.response.start` of a replica.
        name: name of the replica.
        relays_cors: whether the replica decides which pages of other origins may read its answers.
    """
    headers = [(key.lower(), value) for key, value in message["headers"]]
    dropped = _ONE_HOP | _named_by_connection(headers) | _OWN
    if message["status"] not in _BODILESS:
        dropped -= {b"content-length"}
    listed = [(key, value) for key, value in headers if key not in dropped and (relays_cors or not key.startswith(_CORS))]
    return {**message, "headers": [*listed, (_REPLICA, name.encode("latin-1", "replace"))]}
