"""Frames that carry messages between processes: msgpack, checked against the messages' types, without pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

_KINDS = "biuf"
"""NumPy kinds that may be sent: bool, integers, floats."""


class Frames:
    """Encoder and decoder of messages of certain types.

    Args:
        kinds: dataclasses of the messages.
        to_plain: turns a value that msgpack does not know into one that it knows.
        from_plain: turns such a value back, given its type.
        most_array_bytes: limit on the bytes of all arrays of a frame, checked before they are allocated; None sets no limit.
    """

    def __init__(
        self,
        kinds: Iterable[type],
        to_plain: Callable[[Any], Any],
        from_plain: Callable[[type, Any], Any],
        most_array_bytes: int | None = None,
    ) -> None:
        self._from_plain, self._most, self._left = from_plain, most_array_bytes, 0
        hook = from_plain if most_array_bytes is None else self._bounded
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_plain)
        self._frames = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
            kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=hook) for kind in kinds
        }

    def encode(self, messages: Sequence[Any]) -> bytes:
        """Encode messages into one frame, each with its type's name.

        Raises:
            UnicodeEncodeError: a text holds half a surrogate pair.
            OverflowError: an integer has more than 64 bits.
            TypeError: a value has no wire form.
        """
        return self._encoder.encode([(type(m).__name__, m) for m in messages])

    def decode(self, frame: bytes) -> list[Any]:
        """Decode and validate the messages of a frame; arrays are read-only.

        Raises:
            msgspec.DecodeError: the frame is malformed, a message does not match its type, or its arrays are too large.
        """
        self._left = self._most or 0
        try:
            return [self._decoders[name].decode(raw) for name, raw in self._frames.decode(frame)]
        except KeyError as name:
            raise msgspec.DecodeError(f"unknown kind of message {name}") from None
        except msgspec.DecodeError:
            raise
        except Exception as error:  # NumPy raises many kinds for a wrong array
            raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None

    def _bounded(self, kind: type, value: Any) -> Any:
        """Return an array of a frame, if it fits the room that is left.

        Raises:
            ValueError: the arrays of the frame are too large.
        """
        name, shape, *_ = value
        self._left -= math.prod(shape) * np.dtype(name).itemsize
        if self._left < 0 or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"the arrays of a frame must have at most {self._most} bytes")
        return self._from_plain(kind, value)


def to_plain(value: Any) -> Any:
    """Return an array as its dtype, shape and bytes, and a NumPy scalar as a Python one.

    Raises:
        TypeError: the value has no wire form.
    """
    if isinstance(value, np.ndarray):
        _check(value.dtype, TypeError)
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no wire form")


def from_plain(kind: type, value: Any) -> Any:
    """Return an array that `to_plain` made plain.

    Raises:
        TypeError, ValueError: the value has no wire form.
    """
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} has no wire form")
    name, shape, data = value
    return np.frombuffer(data, _check(np.dtype(name), ValueError)).reshape(shape)


def to_used(value: Any) -> Any:
    """Return an array or a NumPy scalar as `to_plain` does an array, but without the ends of axes that repeat its last value.

    Arrays of a step are padded to few sizes. Most of a page table, for example, is padding.

    Raises:
        TypeError: the value has no wire form.
    """
    if not isinstance(value, (np.ndarray, np.generic)):
        return to_plain(value)
    value = np.asarray(value)
    dtype = _check(value.dtype, TypeError)
    if not value.size:
        return dtype.str, value.shape, b"", value.shape, b""
    bits = np.ascontiguousarray(value).view(f"u{dtype.itemsize}").reshape(value.shape)
    differs = bits != bits.flat[-1]
    ends = []
    for axis in range(value.ndim):
        (found,) = differs.any(axis=tuple(other for other in range(value.ndim) if other != axis)).nonzero()
        ends.append(int(found[-1]) + 1 if len(found) else 0)
    used = value[tuple(slice(end) for end in ends)]
    return dtype.str, value.shape, value.flat[-1].tobytes(), used.shape, used.tobytes()


def from_used(kind: type, value: Any) -> Any:
    """Return an array that `to_used` made plain.

    Raises:
        TypeError, ValueError: the value has no wire form.
    """
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} has no wire form")
    name, shape, fill, used, data = value
    dtype = _check(np.dtype(name), ValueError)
    if len(used) != len(shape) or any(not 0 <= end <= size for end, size in zip(used, shape, strict=True)):
        raise ValueError(f"an array of shape {shape} has no part of shape {used}")
    array = np.empty(shape, dtype)
    if array.size:
        array[...] = np.frombuffer(fill, dtype)[0]
        array[tuple(slice(end) for end in used)] = np.frombuffer(data, dtype).reshape(used)
    return array


def _check(dtype: np.dtype, error: type[Exception]) -> np.dtype:
    if dtype.kind not in _KINDS:
        raise error(f"arrays of {dtype} have no wire form")
    return dtype
