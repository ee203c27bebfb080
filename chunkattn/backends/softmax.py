"""The online softmax of the `xla` backend: one step takes one KV tile.

Axes that `base` does not define: `B` sequences computed together, `R` folded rows (rows times query heads per KV head), `N`
slots of a KV tile.

Source: FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

ON_CPU = jax.default_backend() == "cpu"
KEYS_FIRST = (32 if ON_CPU else 0, 512)
"""Tiles of at most this many folded rows, with keys of at least this many values a token, have the keys on the left of
the product. XLA:CPU transposes the right side, which for few rows takes far longer than the product."""

_TINY = np.finfo(np.float32).tiny
_MASKED = -1e30
"""Start of the running maximum: finite, so that a row that has seen no slot yet stays finite."""


class Softmax(NamedTuple):
    """State of the online softmax: running maximum, running sum and weighted values."""

    maximum: Float32[Array, "B Hkv R"]
    total: Float32[Array, "B Hkv R"]
    values: Float32[Array, "B Hkv R D"]


def fold(q: Float[Array, "B rows H D"], kv_heads: int) -> Float[Array, "B Hkv R D"]:
    """Turn the query heads that share a KV head into rows."""
    b, r, h, d = q.shape
    return q.reshape(b, r, kv_heads, h // kv_heads, d).transpose(0, 2, 1, 3, 4).reshape(b, kv_heads, -1, d)


def unfold(x: Float[Array, "B Hkv R D"], rows: int) -> Float[Array, "B rows H D"]:
    """Invert `fold`."""
    b, g, _, d = x.shape
    return x.reshape(b, g, rows, -1, d).transpose(0, 2, 1, 3, 4).reshape(b, rows, -1, d)


def start(q: Float[Array, "B Hkv R D"]) -> Softmax:
    """Return the state before the first tile, for folded queries."""
    shape = q.shape[:3]
    return Softmax(jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32))


def finish(state: Softmax) -> Float32[Array, "B Hkv R D"]:
    """Normalise the values. Rows that saw no slot (padding) become zero."""
    return state.values / jnp.maximum(state.total, _TINY)[..., None]


def as_one_slot(state: Softmax, scale: Float32[Array, "*#axes"]) -> Softmax:
    """Return the state of one slot with the values seen so far, whose score is their log-sum-exp times `scale`.

    Rows that saw no slot stay as they are.

    Args:
        state: state over chunk slots.
        scale: chunk scale, see `base.Weighing`; broadcasts to the rows.
    """
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1)
    maximum = jnp.where(seen, (state.maximum + jnp.log(total)) * scale, state.maximum)
    return Softmax(maximum, seen.astype(jnp.float32), state.values / total[..., None])


def update(
    state: Softmax,
    q: Float[Array, "B Hkv R D"],
    keys: Float[Array, "B N Hkv D"],
    values: Float[Array, "B N Hkv D"],
    mask: Bool[Array, "B rows N"],
    present: Bool[Array, "B N"],
    scale: float | Float32[Array, "B 1 1 1 1"] | Float32[Array, ""],
) -> Softmax:
    """Take one online-softmax step over a KV tile.

    Args:
        state: state so far.
        q: folded queries.
        keys: keys of the tile.
        values: values of the tile.
        mask: visible slots of each row; a row stands for `R / rows` folded rows.
        present: slots that hold a token; other slots may be NaN.
        scale: factor of the products.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    few_rows, large_keys = KEYS_FIRST
    if q.shape[2] <= few_rows and keys.shape[2] * keys.shape[3] >= large_keys:  # the barrier keeps XLA from swapping the sides
        scores = barrier(multiply("bngd,bgrd->bgnr", keys, q)).swapaxes(2, 3)
    else:
        scores = multiply("bgrd,bngd->bgrn", q, keys)
    by_row = scores.reshape(*scores.shape[:2], mask.shape[1], -1, scores.shape[3])
    scores = jnp.where(mask[:, None, :, None], by_row * scale, -jnp.inf).reshape(scores.shape)
    maximum = jnp.maximum(state.maximum, scores.max(-1))
    weights, decay = jnp.exp(scores - maximum[..., None]), jnp.exp(state.maximum - maximum)
    values = jnp.where(present[..., None, None], values, 0)
    added = multiply("bgrn,bngd->bgrd", weights.astype(values.dtype), values)
    return Softmax(maximum, state.total * decay + weights.sum(-1), state.values * decay[..., None] + added)


def update_by_head(
    state: Softmax,
    q: Float[Array, "1 Hkv R D"],
    keys: Float[Array, "1 N Hkv D"],
    values: Float[Array, "1 N Hkv D"],
    mask: Bool[Array, "1 rows N"] | None,
    present: Bool[Array, "1 N"],
    scale: float | Float32[Array, ""],
) -> Softmax:
    """Take one online-softmax step like `update`, for one sequence, one KV head at a time.

    A mask of None means that every row sees every token. Keys must then be finite in slots without a token, too.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    values = jnp.where(present[..., None, None], values, 0)
    if mask is not None:
        mask = jnp.repeat(mask[0], q.shape[2] // mask.shape[1], axis=0)
    heads = range(q.shape[1])
    scores = [multiply(q[0, g], keys[0, :, g], (((1,), (1,)), ((), ()))) for g in heads]
    if mask is None:  # the scale is not negative, so the maximum may be taken before it
        highest = jnp.stack([x.max(-1) for x in scores]) * scale
    else:
        scores = [jnp.where(mask, x * scale, -jnp.inf) for x in scores]
        highest = jnp.stack([x.max(-1) for x in scores])
    maximum = jnp.maximum(state.maximum[0], highest)
    if mask is None:
        weights = [jnp.where(present, jnp.exp(x * scale - m[:, None]), 0) for x, m in zip(scores, maximum)]
    else:
        weights = [jnp.exp(x - m[:, None]) for x, m in zip(scores, maximum)]
    # The barrier keeps XLA from computing the weights twice, for the sum and for the product.
    weights = [barrier(_rounded(w, values.dtype)) for w in weights]
    added = jnp.stack([multiply(w, values[0, :, g], (((1,), (0,)), ((), ()))) for g, w in zip(heads, weights)])
    decay = jnp.exp(state.maximum[0] - maximum)
    total = state.total[0] * decay + jnp.stack([w.sum(-1, dtype=jnp.float32) for w in weights])
    return Softmax(maximum[None], total[None], state.values * decay[None, ..., None] + added[None])


def barrier(x: Any) -> Any:
    """Put a barrier around `x`: XLA computes it separately and fuses no operation across."""
    return jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]


def _rounded(weights: Float32[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Round non-negative weights to the nearest value of `dtype`.

    Rounding to bfloat16 works on the bits, because XLA:CPU's own conversion makes the loop over the exponential three times
    slower.
    """
    if dtype != jnp.bfloat16:
        return weights.astype(dtype)
    bits = jax.lax.bitcast_convert_type(weights, jnp.uint32)
    return jax.lax.bitcast_convert_type(((bits + 0x8000) >> 16).astype(jnp.uint16), dtype)


def fill_holes(keys: Float[Array, "B N Hkv D"], present: Bool[Array, "B N"], block_size: int) -> Float[Array, "B N Hkv D"]:
    """Replace keys of slots that are not `present` by the first key of their page, which every page has."""
    pages = keys.reshape(len(keys), -1, block_size, *keys.shape[2:])
    return jnp.where(present.reshape(*pages.shape[:3], 1, 1), pages, pages[:, :, :1]).reshape(keys.shape)
