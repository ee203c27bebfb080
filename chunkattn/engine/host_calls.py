"""Calls that the first host of a model makes on its devices, as data, so that the other hosts make the same calls.

The first host schedules. Devices of several hosts run one program together, so every host must run the same programs in the
same order. `Runner` and `KVPool` tell each call before they make it, and a `Follower` makes it on another host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Forward:
    """Call of `Runner.forward`.

    Attributes:
        leaves: arrays of `StepArrays`, in the order of JAX's trees.
        backend: see `StepArrays`.
    """

    leaves: Arrays
    backend: str | None


@dataclass(frozen=True)
class Decode:
    """Call of `Runner.decode`.

    Attributes:
        leaves: arrays of `DecodeArrays`, in the order of JAX's trees.
        continues: see `Runner.decode`.
    """

    leaves: Arrays
    continues: bool


@dataclass(frozen=True)
class ReadDecodes:
    """Call of `Runner.read_decodes` of the oldest run that has not been read."""


@dataclass(frozen=True)
class ReadSample:
    """Call of `Runner.sample` of the last hidden states.

    Attributes:
        rows: see `Runner.sample`.
        parameters: fields of `SampleInput`.
        edits: fields of `Edits`, or None.
        with_logprobs: see `Runner.sample`.
        mask: see `Runner.sample`.
    """

    rows: tuple[int, ...]
    parameters: Arrays
    edits: Arrays | None
    with_logprobs: bool
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class ReadLabels:
    """Call of `Runner.label_logprobs` of the last hidden states, or `Runner.label_logits`.

    Attributes:
        rows: rows to read from.
        labels: token ids of each row's labels.
        raw: whether logits are read.
    """

    rows: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    raw: bool


@dataclass(frozen=True)
class ReadClasses:
    """Call of `Runner.class_logits` of the last hidden states."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class ReadHidden:
    """Call of `Runner.hidden_states` of the last hidden states."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class ReadTokens:
    """Call of `Runner.token_logprobs` of the last hidden states."""

    rows: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class WarmPicks:
    """Call of `Runner.warm_picks` of the last hidden states."""


@dataclass(frozen=True)
class WarmReadout:
    """Call of `Runner.warm_readout`.

    Attributes:
        size: see `Runner.warm_readout`.
        number: see `Runner.warm_readout`.
    """

    size: int
    number: int


@dataclass(frozen=True)
class CopyPages:
    """Call of `KVPool.copy_pages`."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CopyStates:
    """Call of `StatePool.copy`."""

    pairs: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class ResetPool:
    """Call of `Runner.reset`."""


Readout = ReadSample | ReadLabels | ReadClasses | ReadHidden | ReadTokens
HostCall = Forward | Decode | ReadDecodes | Readout | WarmPicks | WarmReadout | CopyPages | CopyStates | ResetPool


Tell = Callable[[HostCall], None]
"""Function that makes the other hosts of a model run a call, without waiting for them. A host alone has none."""
