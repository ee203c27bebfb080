"""Merges the softmax states that the GPU kernel leaves of one block of queries."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from chunkattn.backends.pallas_gpu.kernel import LEAST, States

UNUSED, REST, CHUNK = range(3)
"""Kinds of a block's states: no state, slots that keep their scores, chunk slots whose scores are weighed anew."""


def combine(states: States, kinds: Int32[Array, "E K"], scale: Float32[Array, " E"] | None) -> Float32[Array, "Hkv E rows D"]:
    """Return the attention of each block of queries, merged from its `K` states.

    Args:
        states: states of all blocks, `K` of each block in a row.
        kinds: kind of each state, see `UNUSED`. Unused states may hold NaN.
        scale: chunk scale of each block, see `base.Weighing`; None merges all states alike.
    """
    blocks, count = kinds.shape
    states = States(*(x.reshape(x.shape[0], blocks, count, *x.shape[2:]) for x in states))
    if scale is None:
        return _finish(_merge(states, kinds != UNUSED))
    chunks = _as_one_slot(_merge(states, kinds == CHUNK), scale[None, :, None])
    rest = _merge(states, kinds == REST)
    both = States(*(jnp.stack(pair, axis=2) for pair in zip(chunks, rest)))
    return _finish(_merge(both, jnp.ones((blocks, 2), bool)))


def _merge(states: States, used: Array) -> States:
    """Merge the used states of each block. The terms are added in order, whatever the number of blocks."""
    used = used[None, :, :, None]
    highest = jnp.where(used, states.maximum, LEAST).max(axis=2)
    weights = jnp.where(used, jnp.exp2(states.maximum - highest[:, :, None]), 0)
    total, values = jnp.zeros_like(highest), jnp.zeros((*highest.shape, states.values.shape[-1]), jnp.float32)
    for k in range(used.shape[2]):
        weight = weights[:, :, k]
        total += jnp.where(used[:, :, k], weight * states.total[:, :, k], 0)
        values += jnp.where(used[:, :, k, :, None], weight[..., None] * states.values[:, :, k], 0)
    return States(values, highest, total)


def _as_one_slot(state: States, scale: Float32[Array, "#Hkv E #rows"]) -> States:
    """Return the state of one slot, see `softmax.as_one_slot`; here maxima are exponents of 2."""
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1)
    maximum = jnp.where(seen, (state.maximum + jnp.log2(total)) * scale, state.maximum)
    return States(state.values / total[..., None], maximum, seen.astype(jnp.float32))


def _finish(state: States) -> Float32[Array, "Hkv E rows D"]:
    """Normalise the values. Rows that saw no slot become zero."""
    return state.values / jnp.where(state.total > 0, state.total, 1)[..., None]
