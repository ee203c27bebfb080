"""Messages between the hosts of one model, and what must be equal on all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, get_args

import jax
import msgspec

from chunkattn.config import EngineConfig
from chunkattn.engine.host_calls import HostCall
from chunkattn.remote.frames import Frames, to_plain
from chunkattn.remote.messages import Checkpoint, Failed

_OWN_OPTIONS = ("model", "adapter", "tokenizer", "revision", "chunk_calibration", "host_index", "group_secret_file")
"""Options that may differ between hosts."""
_ROOM_BYTES = 1 << 29
"""Bytes for the arrays of one call: edits of 64 rows over a vocabulary of 256K tokens take 208 MiB."""


@dataclass(frozen=True)
class Hello:
    """A host that wants to take part.

    Attributes:
        host_index: the host's number.
        port: port where the host takes its calls.
        key: public key of this port, of ZeroMQ's CURVE. It is new in every start.
        traits: what must be equal on all hosts, by name.
    """

    host_index: int
    port: int
    key: bytes
    traits: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """Answer to a host that cannot take part."""

    reason: str


@dataclass(frozen=True)
class Join:
    """Answer to a host once all hosts are there.

    Attributes:
        port: port of JAX's coordinator.
    """

    port: int


@dataclass(frozen=True)
class Opened:
    """First message to the port for calls, by which its host knows the connection of the first host."""


@dataclass(frozen=True)
class Busy:
    """Notice that a host loads or compiles, for which the others wait without a limit of steps."""


@dataclass(frozen=True)
class End:
    """Notice that the first host ends in order."""


TO_FIRST = Frames([Hello, Busy, Failed])
"""Frames to the first host."""
TO_OTHER = Frames([Refused, Join, Busy, End])
"""Frames of the first host to another, besides calls."""


CALLS = Frames([Opened, End, *get_args(HostCall)], _ROOM_BYTES)
"""Frames that carry the calls of the first host."""


def traits_of(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what must be equal on all hosts of a model, by name.

    Args:
        config: options of the engine.
        checkpoint: the checkpoint to load.
    """
    options = {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(config).items() if n not in _OWN_OPTIONS}
    model = msgspec.to_builtins(checkpoint.spec, enc_hook=to_plain)
    return {
        "chunkattn": version("chunkattn"),
        "jax": jax.__version__,
        **options,
        "shape of the model": msgspec.json.encode(model).decode(),
        "dtype of the model": checkpoint.dtype,
        "weights of the model": checkpoint.files().sample().hex(),
    }


def difference(first: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return the first trait that differs between two hosts, in words, or None."""
    for name in first:
        if (there := other.get(name)) != (here := first[name]):
            values = f": {there!r} there, {here!r} on host 0" if len(repr((there, here))) < 120 else ""
            return f"{name} differs{values}; start every host with the same version, options and checkpoint"
    return None
