"""Merges the softmax states that the GPU kernel leaves of a block of queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from chunkattn.backends.pallas_gpu.kernel import LEAST, States

UNUSED, REST, CHUNK = range(3)
"""Kinds of a block's states: no state, slots that keep their scores, chunk slots whose scores are weighed anew."""


class Rows(NamedTuple):
    """Rows of blocks of queries.

    Attributes:
        block: block of each token.
        row: row of the block of each of the token's query heads.
    """

    block: Int32[Array, " n"]
    row: Int32[Array, "n groups"]


def combine(
    states: States, kinds: Int32[Array, "E K"], scale: Float32[Array, " E"] | None, rows: Rows | int
) -> Float32[Array, "Hkv n groups D"]:
    """Return the attention of rows, each merged from the `K` states of its block.

    Args:
        states: states of all blocks, `K` of each block in a row.
        kinds: kind of each state, see `UNUSED`. Unused states may hold NaN.
        scale: chunk scale of each block, see `base.Weighing`; None merges all states alike.
        rows: the rows, or a number of first rows of every block.
    """
    blocks, most = kinds.shape
    if isinstance(rows, int):

        def of_rows(x: jax.Array, number: int) -> jax.Array:
            return x.reshape(x.shape[0], blocks, most, *x.shape[2:])[:, :, number, :rows]
    else:
        block, row = rows
        kinds, scale = kinds[block], None if scale is None else scale[block]

        def of_rows(x: jax.Array, number: int) -> jax.Array:
            return x[:, (block * most + number)[:, None], row]

    found = [States(*(of_rows(x, number) for x in states)) for number in range(most)]
    by_lane = [States(values, *(jnp.broadcast_to(x[..., None], values.shape) for x in sums)) for values, *sums in found]
    if scale is None:
        return _finish(_merge(by_lane, kinds != UNUSED))
    chunks = _as_one_slot(_merge(by_lane, kinds == CHUNK), scale)
    return _finish(_add(chunks, _merge(by_lane, kinds == REST)))


def _merge(states: Sequence[States], used: Bool[Array, "n K"]) -> States:
    """Merge the `K` states of each row, each `[Hkv, n, groups, D]` by lane; those not used have seen nothing.

    XLA makes one kernel of `combine`. It would make two of it with a reduction over `K`.
    """
    nothing = (np.float32(0), np.float32(LEAST), np.float32(0))
    kept = (used[None, :, number, None, None] for number in range(len(states)))
    seen = [States(*(jnp.where(use, x, none) for x, none in zip(state, nothing))) for use, state in zip(kept, states)]
    return reduce(_add, seen)


def _add(one: States, other: States) -> States:
    """Merge two states of each row."""
    highest = jnp.maximum(one.maximum, other.maximum)
    weights = [jnp.exp2(state.maximum - highest) for state in (one, other)]
    values, total = (weights[0] * x + weights[1] * y for x, y in ((one.values, other.values), (one.total, other.total)))
    return States(values, highest, total)


def _as_one_slot(state: States, scale: Float32[Array, " n"]) -> States:
    """Return the state of one slot by row, see `softmax.as_one_slot`; here maxima are exponents of 2."""
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1)
    maximum = jnp.where(seen, (state.maximum + jnp.log2(total)) * scale[:, None, None], state.maximum)
    return States(state.values / total, maximum, seen.astype(jnp.float32))


def _finish(state: States) -> Float32[Array, "Hkv n groups D"]:
    """Normalise the values. Rows that saw no slot become zero."""
    return state.values / jnp.where(state.total > 0, state.total, 1)
