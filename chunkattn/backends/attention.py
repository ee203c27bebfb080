"""Chunk attention of one sequence as a plain function, for use without an engine."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from chunkattn.backends.base import AttentionBatch, AttentionSpec
from chunkattn.backends.registry import make_backend
from chunkattn.layout import ChunkLayout

_BLOCK_SIZE = 64


def chunk_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T Hkv D"],
    v: Float[Array, "T Hkv D"],
    layout: ChunkLayout,
    *,
    backend: str = "auto",
    scale: float | None = None,
) -> Float[Array, "T H D"]:
    """Compute attention of one sequence under its layout's visibility.

    Args:
        q: queries, already rotated.
        k: keys, already rotated; `H` is a multiple of `Hkv`.
        v: values.
        layout: layout of the `T` tokens.
        backend: name of a registered backend, or `"auto"`.
        scale: factor of the scores, not negative; `1 / sqrt(D)` by default.

    Returns:
        The attention output in q's dtype. Only `reference` in float32 is differentiable: `xla` runs loops of dynamic length,
        and 16-bit K/V pass through the pool as bits.

    Raises:
        ValueError: shapes or dtypes disagree with each other or with the layout, or `scale` is negative.
        BackendError: the backend is unknown or does not support the shapes.
    """
    if not (q.ndim == k.ndim == 3 and len(q) and jnp.issubdtype(q.dtype, jnp.floating) and q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"q, k and v must be 3-D of one float dtype and not empty, got {q.dtype} {q.shape}, {k.dtype} {k.shape}"
        )
    tokens, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[::2] != (tokens, head_dim) or heads % k.shape[1] or len(layout) != tokens:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} and a layout of {len(layout)} tokens do not match")
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if not scale >= 0:
        raise ValueError(f"scale must be 0 or more, got {scale}")
    spec = AttentionSpec(heads, k.shape[1], head_dim, jnp.dtype(q.dtype), _BLOCK_SIZE)
    pages = -(-tokens // _BLOCK_SIZE)
    batch = AttentionBatch(
        num_rows=tokens,
        row_seq=np.zeros(tokens, np.int32),
        row_slot=np.arange(tokens, dtype=np.int32),
        row_start=layout.row_start,
        prefix_end=np.asarray([layout.prefix_len], np.int32),
        block_tables=np.arange(pages, dtype=np.int32)[None],
        page_len=np.full((1, pages), _BLOCK_SIZE, np.int32),
        block_size=_BLOCK_SIZE,
    )
    implementation = make_backend(backend, spec)
    out, _ = implementation.forward(
        q, k, v, implementation.allocate(pages), jax.tree.map(jnp.asarray, implementation.build_metadata(batch)), scale=scale
    )
    return out
