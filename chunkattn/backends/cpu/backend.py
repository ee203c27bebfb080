"""The backend that calls the native attention operator, over pages with a KV head's tokens side by side.

Pages are `[pages, kv_heads, block_size, head_dim]`, so that a decode reads a head's keys and values in one piece. The operator
itself is written in C++; see `native/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec, HeadInputs, Metadata, Queries
from chunkattn.backends.cpu import library, linear
from chunkattn.backends.default_cache import KV, KVCache, to_cache
from chunkattn.backends.registry import register_backend
from chunkattn.errors import BackendError

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
MAX_GROUPS = 256
_FORMATS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
"""Dtypes of models, as `Format` in `native/step.h` counts them."""


@register_backend("cpu")
class CpuBackend(AttentionBackend):
    """Native attention on CPUs: one call per layer, on all threads of XLA."""

    keeps_bits = True
    weighs = True
    prepares_heads = True
    advances = True
    heads_first = True
    any_table_width = True
    smallest_step = 1
    step_rows = 32

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if reason := library.refusal():
            raise BackendError(reason)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return why the operator cannot serve `spec` on this machine, or None if it can."""
        if jax.default_backend() != "cpu":
            return "it runs on CPUs only"
        if spec.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return f"it computes float32, bfloat16 and float16, not {spec.dtype}"
        if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {spec.head_dim}"
        if spec.num_heads // spec.num_kv_heads > MAX_GROUPS:
            return f"at most {MAX_GROUPS} query heads may share a KV head, got {spec.num_heads // spec.num_kv_heads}"
        return library.refusal()

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """Return the batch's arrays in the operator's order; see `AttentionBackend.build_metadata`."""
        num_rows = np.asarray([batch.num_rows], np.int32)
        of_rows, tables = (batch.row_seq, batch.row_slot, batch.row_start), (batch.block_tables, batch.page_len)
        page_position = batch.page_positions() if self.spec.windowed else None
        return (num_rows, *of_rows, batch.prefix_end, *tables), batch.weighing, page_position

    def advance(self, decodes: Metadata, steps: Int32[Array, " T"], used: Bool[Array, " T"]) -> Metadata:
        """Move the rows; see `AttentionBackend.advance`."""
        (num_rows, seq, slot, *others), *more = decodes
        return (num_rows, seq, slot + steps, *others), *more

    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: Metadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Write and attend in one native call; see `AttentionBackend.forward`."""
        k, v = (to_cache(x, self.spec.cache_dtype) for x in (k, v))
        arrays, weighing, page_position = metadata
        more = jax.tree.leaves(weighing if window is None else page_position)  # chunks are weighed anew in full attention alone
        call = self._call(library.ATTENTION, q.shape, q.dtype, cache)
        out, keys, values = call(q, k, v, *cache, *arrays, *more, scale=np.float32(scale), window=np.int32(window or 0))
        return out.astype(q.dtype), (keys, values)

    def forward_inputs(self, heads: HeadInputs, cache: KVCache, metadata: Metadata, *, scale: float) -> tuple[Queries, KVCache]:
        """Prepare heads, write and attend in one native call; see `AttentionBackend.forward_inputs`."""
        scales = [x for x in (heads.q_scale, heads.k_scale) if x is not None]
        arrays, weighing, _ = metadata
        call = self._call(library.ATTEND_HEADS, heads.q.shape, heads.dtype, cache)
        out, keys, values = call(
            heads.q,
            heads.k,
            heads.v,
            *cache,
            heads.cos,
            heads.sin,
            *arrays,
            *scales,
            *jax.tree.leaves(weighing),
            scale=np.float32(scale),
            epsilon=np.float32(heads.epsilon),
            norms=bool(scales),
            in_chain=heads.dtype == jnp.bfloat16 and (linear.any_rows() or linear.order() is not None),
            format=np.int32(_FORMATS.index(heads.dtype)),
        )
        return out.astype(heads.dtype), (keys, values)

    def _call(
        self, operator: str, shape: tuple[int, ...], dtype: jnp.dtype, cache: KVCache
    ) -> Callable[..., Sequence[jax.Array]]:
        """Return an operator that writes K and V, its arguments 3 and 4, in place."""
        result = (shape, dtype if dtype == jnp.bfloat16 else jnp.float32)
        shapes = [jax.ShapeDtypeStruct(*x) for x in (result, *((pool.shape, pool.dtype) for pool in cache))]  # type: ignore[no-untyped-call]
        call: Callable[..., Sequence[jax.Array]] = jax.ffi.ffi_call(operator, shapes, input_output_aliases={3: 1, 4: 2})
        return call
