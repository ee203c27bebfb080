"""Frames that carry messages between processes: msgpack, checked against the messages' types, without pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

_KINDS = "biuf"
"""NumPy kinds that may be sent: bool, integers, floats."""


class Frames:
    """Encoder and decoder of messages of certain types.

    Args:
        kinds: dataclasses of the messages.
        most_array_bytes: limit on the bytes of all arrays of a frame, checked before they are allocated.
    """

    def __init__(self, kinds: Iterable[type], most_array_bytes: float = math.inf) -> None:
        self._most = self._left = most_array_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=to_plain)
        self._frames = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
            kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=self._bounded) for kind in kinds
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
        """Decode and validate the messages of a frame.

        Raises:
            msgspec.DecodeError: the frame is malformed, a message does not match its type, or its arrays are too large.
        """
        self._left = self._most
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
        return from_plain(kind, value)


def to_plain(value: Any) -> Any:
    """Return an array as dtype, shape, last value, and the part without the ends of axes that repeat this value.

    A page table of a step, for example, is mostly padding. A NumPy scalar becomes a Python one.

    Raises:
        TypeError: the value has no wire form.
    """
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no wire form")
    dtype = _check(value.dtype, TypeError)
    if not value.size:
        return dtype.str, value.shape, b"", value.shape, b""
    bits = np.ascontiguousarray(value).view(f"u{dtype.itemsize}").reshape(value.shape)
    differs = bits != bits.flat[-1]
    ends = []
    for axis in range(value.ndim):
        (places,) = differs.any(axis=tuple(other for other in range(value.ndim) if other != axis)).nonzero()
        ends.append(int(places[-1]) + 1 if len(places) else 0)
    used = value[tuple(slice(end) for end in ends)]
    return dtype.str, value.shape, value.flat[-1].tobytes(), used.shape, used.tobytes()


def from_plain(kind: type, value: Any) -> Any:
    """Return an array that `to_plain` made plain.

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
