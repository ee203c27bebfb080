"""The wire form of messages: msgpack, checked against the messages' types, without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from chunkattn.engine.messages import EngineOutput, Message
from chunkattn.remote.control_messages import FromWorker, ToWorker

WireMessage = Message | ToWorker | EngineOutput | FromWorker

_KINDS = "biuf"
"""NumPy kinds that may be sent: bool, integers, floats."""


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of {value.dtype} have no wire form")
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no wire form")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} has no wire form")
    name, shape, data = value
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"arrays of {dtype} have no wire form")
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_frames = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_decoders = {
    kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)
    for kind in (k for union in (Message, ToWorker, EngineOutput, FromWorker) for k in get_args(union))
}


def encode(messages: Sequence[WireMessage]) -> bytes:
    """Encode messages into one frame, each with its type's name.

    Raises:
        UnicodeEncodeError: a text holds half a surrogate pair.
        OverflowError: an integer has more than 64 bits.
        TypeError: a value has no wire form.
    """
    return _encoder.encode([(type(m).__name__, m) for m in messages])


def decode(frame: bytes) -> list[Any]:
    """Decode and validate the messages of a frame; arrays are read-only.

    Raises:
        msgspec.DecodeError: the frame is malformed, or a message does not match its type.
    """
    try:
        return [_decoders[name].decode(raw) for name, raw in _frames.decode(frame)]
    except KeyError as name:
        raise msgspec.DecodeError(f"unknown kind of message {name}") from None
