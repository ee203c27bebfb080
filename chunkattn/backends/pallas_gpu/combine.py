"""Merges the softmax states that the GPU kernel leaves of a block of queries."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
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
    states: States, kinds: Int32[Array, "E K"], scale: Float32[Array, " E"] | None, rows: Rows
) -> Float32[Array, "Hkv n groups D"]:
    """Return the attention of rows, each merged from the `K` states of its block.

    Args:
        states: states of all blocks, `K` of each block in a row.
        kinds: kind of each state, see `UNUSED`. Unused states may hold NaN.
        scale: chunk scale of each block, see `base.Weighing`; None merges all states alike.
        rows: the rows.
    """
    kind = kinds[rows.block]
    if scale is None:
        return _finish(_merge(_states_of(states, kind != UNUSED, rows)))
    chunks = _as_one_slot(_merge(_states_of(states, kind == CHUNK, rows)), scale[rows.block])
    rest = _merge(_states_of(states, kind == REST, rows))
    return _finish(_merge([chunks, rest]))


def _states_of(states: States, used: Bool[Array, "n K"], rows: Rows) -> list[States]:
    """Return the `K` states of each row; those not used have seen nothing."""
    flat = [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in states]
    selected = []
    for k in range(used.shape[1]):
        index = (rows.block * used.shape[1] + k)[:, None] * states.values.shape[2] + rows.row
        kept = used[:, k, None]
        values, maximum, total = (x[:, index] for x in flat)
        selected.append(
            States(jnp.where(kept[..., None], values, 0), jnp.where(kept, maximum, LEAST), jnp.where(kept, total, 0))
        )
    return selected


def _merge(states: list[States]) -> States:
    """Merge the states of each row. The terms are added in order."""
    highest = functools.reduce(jnp.maximum, (state.maximum for state in states))
    total, values = jnp.zeros_like(highest), jnp.zeros_like(states[0].values)
    for state in states:
        weight = jnp.exp2(state.maximum - highest)
        total += weight * state.total
        values += weight[..., None] * state.values
    return States(values, highest, total)


def _as_one_slot(state: States, scale: Float32[Array, " n"]) -> States:
    """Return the state of one slot by row, see `softmax.as_one_slot`; here maxima are exponents of 2."""
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1)
    maximum = jnp.where(seen, (state.maximum + jnp.log2(total)) * scale[:, None], state.maximum)
    return States(state.values / total[..., None], maximum, seen.astype(jnp.float32))


def _finish(state: States) -> Float32[Array, "Hkv E rows D"]:
    """Normalise the values. Rows that saw no slot become zero."""
    return state.values / jnp.where(state.total > 0, state.total, 1)[..., None]
