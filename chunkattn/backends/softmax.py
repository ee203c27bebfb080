"""The online softmax of the `xla` backend: one step takes one portion of the KV slots.

On CPUs, a row has the same bits beside any rows, in tiles of any number of rows. Every sum is a product of one of two forms,
because XLA:CPU adds up other products and `jnp.sum` in an order that depends on the number of rows:

- the right side has its depth last;
- the right side has its depth first, and a multiple of `_COLUMNS` columns.

Axes that `base` does not define: `B` runs of rows computed together, `R` folded rows (rows times query heads per KV head), `N`
slots of a portion.

Source: FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from chunkattn.backends.portable import on_cpu

_COLUMNS = 64
"""Divisor of the columns of a product whose right side has its depth first, on CPUs."""
_ONES = (8, 16, 32, 64)
"""Columns of ones that the product that adds up weights may have, on CPUs."""
_PROBED_ROWS = (16, 32, 80, 256, 1024)
_PROBED_SLOTS = 128
_TINY = np.finfo(np.float32).tiny
_MASKED = -1e30
"""Start of the running maximum: finite, so that a row that has seen no slot yet stays finite."""


class Softmax(NamedTuple):
    """State of the online softmax: running maximum, running sum and weighted values."""

    maximum: Float32[Array, "*axes"]
    total: Float32[Array, "*axes"]
    values: Float32[Array, "*axes D"]


def fold(q: Float[Array, "rows H D"], kv_heads: int) -> Float[Array, "Hkv R D"]:
    """Turn the query heads that share a KV head into rows."""
    rows, heads, head_dim = q.shape
    return q.reshape(rows, kv_heads, heads // kv_heads, head_dim).swapaxes(0, 1).reshape(kv_heads, -1, head_dim)


def unfold(x: Float[Array, "Hkv R D"], rows: int) -> Float[Array, "rows H D"]:
    """Invert `fold`."""
    kv_heads, _, head_dim = x.shape
    return x.reshape(kv_heads, rows, -1, head_dim).swapaxes(0, 1).reshape(rows, -1, head_dim)


def start(q: Float[Array, "Hkv R D"]) -> Softmax:
    """Return the state before the first portion, for folded queries."""
    shape = q.shape[:-1]
    return Softmax(jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32))


def finish(state: Softmax) -> Float32[Array, "Hkv R D"]:
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
    q: Float[Array, "Hkv B R D"],
    keys: Float[Array, "B N Hkv D"],
    values: Float[Array, "B N Hkv D"],
    mask: Bool[Array, "B rows N"],
    present: Bool[Array, "B N"],
    scale: float | Float32[Array, "B 1 1 1"],
) -> Softmax:
    """Take one online-softmax step over a portion.

    Args:
        state: state so far, of the rows of `q`.
        q: folded queries.
        keys: keys of the portion.
        values: values of the portion.
        mask: visible slots of each row; a row stands for `R / rows` folded rows.
        present: slots that hold a token; other slots may be NaN.
        scale: factor of the products.
    """
    head_dim, slots = q.shape[-1], mask.shape[-1]
    columns, ones = (_COLUMNS, _ones()) if on_cpu() else (1, 1)
    if on_cpu():  # the copy is faster than a product of keys in another order
        keys = barrier(keys.transpose(2, 0, 1, 3))
        scores = _product("gbrd,gbnd->gbrn", q, keys)
    else:
        scores = _product("gbrd,bngd->gbrn", q, keys)
    by_row = scores.reshape(*scores.shape[:2], mask.shape[1], -1, slots)
    scores = jnp.where(mask[:, :, None], by_row * scale, -jnp.inf).reshape(scores.shape)
    maximum = jnp.maximum(state.maximum, scores.max(-1))
    # The barrier keeps XLA from computing the weights twice, for the sum and for the product.
    weights = barrier(_rounded(jnp.exp(scores - maximum[..., None]), values.dtype))
    decay = jnp.exp(state.maximum - maximum)
    values = jnp.where(present[..., None, None], values, 0)
    values = jnp.pad(values, (*3 * [(0, 0)], (0, -head_dim % columns)))
    added = _product("gbrn,bngd->gbrd", weights, values)[..., :head_dim]
    total = _add_up(weights, ones)
    return Softmax(maximum, state.total * decay + total, state.values * decay[..., None] + added)


@cache
def _ones() -> int:
    """Return the fewest columns of ones whose product adds up a row in one order, whatever the number of rows.

    The number depends on the processor's vectors: 8 columns are too few with AVX2. It is found by products of several sizes,
    bit by bit.
    """
    rng = np.random.default_rng(0)
    weights = rng.random((1, 1, _PROBED_ROWS[-1], _PROBED_SLOTS), np.float32)
    with jax.ensure_compile_time_eval():
        for columns in _ONES:
            parts = [np.asarray(_add_up(jnp.asarray(weights[:, :, :rows]), columns)) for rows in _PROBED_ROWS]
            if all(np.array_equal(part, parts[-1][:, :, : part.shape[-1]]) for part in parts):
                return columns
    return _ONES[-1]


@partial(jax.jit, static_argnums=1)
def _add_up(weights: Float[Array, "Hkv B R N"], columns: int) -> Float32[Array, "Hkv B R"]:
    ones = jnp.ones((columns, weights.shape[-1]), weights.dtype)
    return _product("gbrn,cn->gbrc", weights, ones)[..., 0]


def _product(equation: str, x: Float[Array, "*x"], y: Float[Array, "*y"]) -> Float32[Array, "*out"]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


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
