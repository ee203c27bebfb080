"""Content codings of request bodies: gzip, deflate and zstd, expanded in pieces and within a limit."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from chunkattn.fair_threads import check_wanted
from chunkattn.web.errors import ApiError, too_large

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ACCEPTED = "gzip, deflate, zstd"
"""Value of an Accept-Encoding header."""
_MAX_CODINGS = 2
_PIECE = 1 << 16
"""Bytes expanded at once."""
_WINDOW_LOG = 23
"""Base-2 logarithm of the largest zstd window, which is memory that a frame makes the decoder take (RFC 9659: 8 MiB)."""


def codings_of(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the content codings of a body in the order in which they were applied, without `identity`.

    Args:
        headers: names in lower case, and values. Several headers are one list (RFC 9110, 5.3).
    """
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    listed = [coding.strip().lower() for value in values for coding in value.split(",")]
    return [coding for coding in listed if coding not in ("", "identity")]


def expanded(body: bytes, codings: Sequence[str], most: int) -> bytes:
    """Return the content of an encoded body.

    Args:
        body: body as it was sent.
        codings: result of `codings_of`.
        most: limit on the bytes of the content.

    Raises:
        ApiError: 415, a coding is unknown; 413, the content exceeds `most`; 400, the body does not match the coding.
    """
    if len(codings) > _MAX_CODINGS:
        text = f"the body has {len(codings)} content codings, at most {_MAX_CODINGS} are read"
        raise ApiError(415, text, code="unsupported_encoding")
    for coding in reversed(codings):
        if coding not in _CODINGS:
            text = f"the content coding {coding[:40]!r} is not supported; send the body as it is, or with gzip, deflate or zstd"
            raise ApiError(415, text, code="unsupported_encoding", **{"Accept-Encoding": ACCEPTED})
        body = _content(body, coding, most)
    return body


def _content(body: bytes, coding: str, most: int) -> bytes:
    content = bytearray()
    try:
        for piece in _CODINGS[coding](body):
            check_wanted()
            content += piece
            if len(content) > most:
                raise too_large(most)
    except (zlib.error, zstd.ZstdError, EOFError, ValueError) as error:
        raise ApiError(400, f"the body is not valid {coding}: {error}", code="invalid_encoding") from None
    return bytes(content)


def _gunzip(body: bytes) -> Iterator[bytes]:
    return _inflate(body, zlib.MAX_WBITS | 16)


def _undeflate(body: bytes) -> Iterator[bytes]:
    has_header = len(body) >= 2 and body[0] & 15 == 8 and not (body[0] << 8 | body[1]) % 31
    return _inflate(body, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)  # some clients leave the zlib header out


def _inflate(body: bytes, bits: int) -> Iterator[bytes]:
    """Yield the pieces of a zlib stream.

    Raises:
        ValueError: the body ends early, or has more than the stream.
    """
    unpack, left = zlib.decompressobj(bits), body
    while left and not unpack.eof:
        yield unpack.decompress(left, _PIECE)
        left = unpack.unconsumed_tail
    yield unpack.flush()  # some symbols that were read with the last byte
    _check_end(unpack.eof, unpack.unused_data)


def _unzstd(body: bytes) -> Iterator[bytes]:
    """Yield the pieces of a zstd frame; see `_inflate`."""
    unpack = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
    yield unpack.decompress(body, _PIECE)
    while not unpack.eof and not unpack.needs_input:
        yield unpack.decompress(b"", _PIECE)
    _check_end(unpack.eof, unpack.unused_data)


def _check_end(is_whole: bool, left: bytes) -> None:
    if not is_whole or left:
        raise ValueError("data follows its end" if is_whole else "it ends early")


_CODINGS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _undeflate,
    "zstd": _unzstd,
}
"""Decoders of the content codings (RFC 9110, 8.4.1; RFC 8878)."""
