"""The default form of a layer's KV cache: pages of K and V, written and read by rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

FP8 = jnp.dtype(jnp.float8_e4m3fn)
"""One-byte format of a quantised KV cache."""
FP8_MAX = 448.0
"""Largest number of `FP8`, which has no infinity."""
KV = Float[Array, "T Hkv D"]
"""Keys or values of a step's rows."""
KVCache = Any
"""Paged K/V of one layer: a pytree of arrays whose axis 0 is the page."""


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype in which a default cache stores `dtype`: unsigned integers for 8- and 16-bit floats.

    XLA:CPU cannot scatter or gather such floats: it would convert the whole pool to float32 and back at every step.
    """
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if dtype.itemsize < 4 else dtype


def to_cache(x: Float[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Convert values to the cache's `dtype`, clipping values beyond `FP8`'s range to the largest `FP8` number. NaN stays NaN.

    A bare cast to `FP8` turns values beyond its range into NaN.

    Args:
        x: values of the model's dtype.
        dtype: dtype of the cache.
    """
    if dtype == FP8:
        x = jnp.clip(x, -FP8_MAX, FP8_MAX)
    return x.astype(dtype)


def write_pages(cache: KVCache, k: KV, v: KV, flat_slots: Int32[Array, " T"]) -> KVCache:
    """Scatter rows' K/V into a cache of the default form, converted to its dtype.

    Args:
        cache: one layer's cache.
        k: keys of the rows.
        v: values of the rows.
        flat_slots: result of `AttentionBatch.flat_slots`; rows with slot -1 are dropped.

    Returns:
        The updated cache.
    """

    def write(pool: jax.Array, rows: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, *pool.shape[2:])
        index = jnp.where(flat_slots < 0, len(flat), flat_slots)
        bits = _bitcast(to_cache(rows, _kept_as(pool, rows.dtype)), pool.dtype)
        return flat.at[index].set(bits, mode="drop").reshape(pool.shape)

    return write(cache[0], k), write(cache[1], v)


def read_pages(
    cache: KVCache, pages: Int[Array, "*N"], dtype: jnp.dtype
) -> tuple[Float[Array, "*N block_size Hkv D"], Float[Array, "*N block_size Hkv D"]]:
    """Gather K and V of pages from a cache of the default form.

    Args:
        cache: one layer's cache.
        pages: page numbers.
        dtype: the model's dtype, to which K and V are converted.

    Returns:
        K and V of the pages.
    """
    keys, values = (_bitcast(pool[pages], _kept_as(pool, dtype)).astype(dtype) for pool in cache)
    return keys, values


def read_slots(
    cache: KVCache,
    block_tables: Int32[Array, "B W"],
    page_len: Int32[Array, "B W"],
    first: Int32[Array, " B"],
    count: int,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "B N Hkv D"], Float[Array, "B N Hkv D"], Bool[Array, "B N"]]:
    """Gather K and V of consecutive slots from a cache of the default form.

    Args:
        cache: one layer's cache.
        block_tables: page tables, see `AttentionBatch`.
        page_len: valid slots of every page of the tables.
        first: first slot of each table, at least 0; slots beyond the table are invalid.
        count: number of slots.
        dtype: the model's dtype, to which K and V are converted.

    Returns:
        K, V and validity of the slots. K and V of invalid slots may be NaN.
    """
    block_size, width = cache[0].shape[1], block_tables.shape[1]
    columns = (first // block_size)[:, None] + jnp.arange(-(-count // block_size) + 1)
    pages, filled = (jnp.take_along_axis(x, jnp.minimum(columns, width - 1), axis=1) for x in (block_tables, page_len))

    def cut(x: jax.Array) -> jax.Array:
        x, offset = x.reshape(len(first), -1, *x.shape[3:]), first % block_size
        if len(first) == 1:  # a slice is faster than a gather
            return jax.lax.dynamic_slice_in_dim(x, offset[0], count, axis=1)
        return jax.vmap(lambda x, offset: jax.lax.dynamic_slice_in_dim(x, offset, count))(x, offset)

    # The barrier keeps XLA:CPU from fusing the copy of whole pages with what follows, which would copy value by value.
    whole = [pool[pages] for pool in cache]
    if len(first) == 1:
        whole = jax.lax.optimization_barrier(whole)  # type: ignore[no-untyped-call]
    keys, values = (_bitcast(cut(x), _kept_as(x, dtype)).astype(dtype) for x in whole)
    valid = (columns < width)[..., None] & (jnp.arange(block_size) < filled[..., None])
    return keys, values, cut(valid)


def _kept_as(pool: Shaped[Array, "P block_size Hkv D"], dtype: jnp.dtype) -> jnp.dtype:
    """Return the float dtype whose bits a pool holds, for a model of `dtype`."""
    return FP8 if pool.dtype.itemsize == 1 else dtype


def _bitcast(x: Shaped[Array, "*axes"], dtype: jnp.dtype) -> Shaped[Array, "*axes"]:
    """Reinterpret the bits of `x` as `dtype`. A no-op bitcast is skipped, because it has no gradient."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
