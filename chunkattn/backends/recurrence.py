"""Gated delta rule over states in slots: the interface of the forms in which recurrent layers are computed.

A *walk* computes consecutive tokens of one part of a prompt in one step. Blocks of `BLOCK` tokens are counted from the start of
the part. A walk that another step continues leaves the state before its open block in a slot, and the rows of that block in a
seat, so no end of a step moves a bit.

Axes in the annotations: `T` rows of a step, `B` walks, `N` slots, `M` seats, `Hk` key heads, `Hv` value heads, `dk` and `dv`
their sizes. Value head `h` reads key head `h // (Hv // Hk)`.

Source: Gated Delta Networks, arXiv:2412.06464; the chunkwise form is that of arXiv:2406.06484.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

BLOCK = 64
"""Tokens of a block of the chunkwise form."""


@dataclass(frozen=True)
class RecurrentSpec:
    """Sizes of a recurrent layer on one device.

    Attributes:
        key_heads: number of query and key heads.
        value_heads: number of value heads, a multiple of `key_heads`.
        key_dim: size of a query or key head.
        value_dim: size of a value head.
        taps: inputs that one output of the convolution reads, at least 2.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4


class Inputs(NamedTuple):
    """Inputs of a recurrent layer: the products of its rows, and its own small parameters in float32.

    Attributes:
        q: queries before the convolution.
        k: keys before the convolution.
        v: values before the convolution.
        b: logits of the write strengths.
        a: inputs of the decays.
        conv_q: taps of the convolution of every query channel, the last for a row's own input.
        conv_k: taps of the keys.
        conv_v: taps of the values.
        a_log: logarithms of the rates of decay.
        dt_bias: biases of `a`.
    """

    q: Float32[Array, "T Hk*dk"]
    k: Float32[Array, "T Hk*dk"]
    v: Float32[Array, "T Hv*dv"]
    b: Float32[Array, "T Hv"]
    a: Float32[Array, "T Hv"]
    conv_q: Float32[Array, "Hk*dk taps"]
    conv_k: Float32[Array, "Hk*dk taps"]
    conv_v: Float32[Array, "Hv*dv taps"]
    a_log: Float32[Array, " Hv"]
    dt_bias: Float32[Array, " Hv"]


class Window(NamedTuple):
    """The last inputs of the convolution before a token, the latest last; zeros before the first token."""

    q: Float32[Array, "N taps-1 Hk dk"]
    k: Float32[Array, "N taps-1 Hk dk"]
    v: Float32[Array, "N taps-1 Hv dv"]


class Slots(NamedTuple):
    """States of one layer, each after some token, with the window before the next token."""

    state: Float32[Array, "N Hv dk dv"]
    window: Window


class Seats(NamedTuple):
    """Rows of the open blocks of one layer, and the window before the next token.

    Attributes:
        keys: normalised keys.
        values: vectors that the rows have written at their keys. A form may keep the rows' values instead.
        decay: logarithm of the decay of each row. A form may keep several numbers of a head, one after the other.
        window: last inputs of the convolution.
    """

    keys: Float32[Array, "M BLOCK Hk dk"]
    values: Float32[Array, "M BLOCK Hv dv"]
    decay: Float32[Array, "M BLOCK n*Hv"]
    window: Window


class RecurrentCache(NamedTuple):
    """Arrays that one layer keeps between steps."""

    slots: Slots
    seats: Seats


class Walk(NamedTuple):
    """Tokens `at ... at + length - 1` of a part, in the step's rows from `row` on.

    Attributes:
        row: first row in the step.
        length: number of tokens; 0 for an entry without a walk.
        at: tokens of the part before these.
        source: slot of the state before the open block, or before the part where `at` is 0; -1 for zeros. A slot other than
            `slot` needs an `at` that is a multiple of `BLOCK`; it is only read in this step, perhaps by several walks.
        slot: slot that has the state before the open block after the step; -1 for a walk that no step continues.
        seat: seat of the open block, read if `source` is `slot`, and written; -1 with a `slot` of -1.
        keep_at: number of tokens of the part after which the state is kept, above `at`: a multiple of `BLOCK`, or the end
            `at + length`. 0 keeps none.
        keep_slot: slot that gets this state; -1 for none.
    """

    row: int
    length: int
    at: int
    source: int
    slot: int
    seat: int
    keep_at: int = 0
    keep_slot: int = -1


NO_WALK = Walk(0, 0, 0, -1, -1, -1)
"""An entry without a walk."""


def allocate(spec: RecurrentSpec, slots: int, seats: int) -> RecurrentCache:
    """Return the empty cache of one layer.

    Args:
        spec: sizes of the layer.
        slots: number of slots.
        seats: number of seats.
    """
    keys, values = (spec.key_heads, spec.key_dim), (spec.value_heads, spec.value_dim)

    def window(count: int) -> Window:
        q, k, v = (jnp.zeros((count, spec.taps - 1, *heads), jnp.float32) for heads in (keys, keys, values))
        return Window(q, k, v)

    state = jnp.zeros((slots, spec.value_heads, spec.key_dim, spec.value_dim), jnp.float32)
    of_keys, of_values = (jnp.zeros((seats, BLOCK, *heads), jnp.float32) for heads in (keys, values))
    decay = jnp.zeros((seats, BLOCK, spec.value_heads), jnp.float32)
    return RecurrentCache(Slots(state, window(slots)), Seats(of_keys, of_values, decay, window(seats)))


class Recurrence(ABC):
    """A way to compute the layers. `build` runs on the host, once per step; `forward` is traced, once per layer.

    A row whose inputs are not all finite gets NaN in every head, and the layer goes on as if the row had neither a convolution
    input nor a write. Rows before it keep their bits; rows in no walk get zeros.
    """

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec

    def allocate(self, slots: int, seats: int) -> RecurrentCache:
        """Return the empty cache of one layer. Devices divide its axes of heads.

        Args:
            slots: number of slots.
            seats: number of seats.
        """
        return allocate(self.spec, slots, seats)

    @abstractmethod
    def build(self, walks: Int32[np.ndarray, "B 8"], num_rows: int) -> Any:
        """Return the arrays of a step, whose sizes follow from the arguments' sizes alone.

        Args:
            walks: the walks, as `Walk` has them, `NO_WALK` for entries without one. Rows of different walks are different.
            num_rows: rows `T` of the step.
        """

    @abstractmethod
    def forward(self, inputs: Inputs, cache: RecurrentCache, arrays: Any) -> tuple[Float32[Array, "T Hv dv"], RecurrentCache]:
        """Return the outputs of the rows before the gated norm, and the cache.

        A row has the same bits in any company, and wherever the steps before it ended.

        Args:
            inputs: inputs of the layer.
            cache: cache of the layer.
            arrays: what `build` returned for the step.
        """
