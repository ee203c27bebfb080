"""Rules of RFC 9110 and 9112 for the head of a request that llhttp does not check: version, method, framing and target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httptools

from chunkattn.web.errors import ApiError

Header = tuple[bytes, bytes]
_VERSIONS = ("1.0", "1.1")
_SCHEMES = (b"http", b"https")


@dataclass(frozen=True)
class Target:
    """Target of a request.

    Attributes:
        path: path as it was sent, or `*`.
        query: query string without the question mark.
        authority: host and port of a target in absolute form; None for a path.
    """

    path: bytes
    query: bytes = b""
    authority: bytes | None = None


def check_framing(method: bytes, version: str, headers: Sequence[Header]) -> None:
    """Check what decides where a request ends.

    Args:
        method: method of the request.
        version: its HTTP version, such as "1.1".
        headers: names in lower case, and values.

    Raises:
        ApiError: 501 for CONNECT and for transfer codings before `chunked`; 505 for HTTP/0.9 and HTTP/2; 400 for a
            transfer coding in HTTP/1.0, beside a Content-Length, or that does not end with `chunked`.
    """
    if version not in _VERSIONS:
        raise ApiError(505, f"HTTP/{version} is not served; send HTTP/1.1", code="http_version_not_supported")
    if method == b"CONNECT":  # what follows belongs to the tunnel, so the connection has no next request
        raise ApiError(501, "CONNECT is not served, because this server is no proxy", code="method_not_supported")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return
    if version == "1.0":
        raise ApiError(400, "HTTP/1.0 has no Transfer-Encoding; send a Content-Length, or HTTP/1.1", code="invalid_http")
    if any(name == b"content-length" for name, _ in headers):
        raise ApiError(400, "the request has Content-Length and Transfer-Encoding; send one of them", code="invalid_http")
    listed = [coding.strip().lower() for coding in b",".join(codings).split(b",")]
    if listed[-1] != b"chunked":
        raise ApiError(400, "a Transfer-Encoding must end with chunked, else the body has no end", code="invalid_http")
    if len(listed) > 1:
        text = "the only transfer coding that is read is chunked; compress a body with Content-Encoding instead"
        raise ApiError(501, text, code="unsupported_transfer_encoding")


def read_target(target: bytes) -> Target:
    """Return the parts of a target in origin, absolute or asterisk form.

    Raises:
        ApiError: 400, it has none of these forms.
    """
    try:
        parts = httptools.parse_url(target)
        if target.startswith(b"/") or target == b"*":
            parts.path.decode("ascii")
            return Target(parts.path, parts.query or b"")
        if parts.schema is not None and parts.schema.lower() in _SCHEMES and parts.host:
            host = b"[%s]" % parts.host if b":" in parts.host else parts.host
            authority = host if parts.port is None else b"%s:%d" % (host, parts.port)
            return Target(parts.path or b"/", parts.query or b"", authority)
    except (httptools.HttpParserError, UnicodeDecodeError):
        pass
    raise ApiError(400, f"the target of a request must be a path, got {ascii(target[:100])[2:-1]}", code="invalid_path")
