"""The backend that calls the native attention operator, over pages with a KV head's tokens side by side.

Pages are `[pages, kv_heads, block_size, head_dim]`, so that a decode reads a head's keys and values in one piece. The operator
itself is written in C++; see `native/`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from chunkattn.backends.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    StepArray,
    Weighing,
    storage_dtype,
    to_cache,
)
from chunkattn.backends.cpu import library
from chunkattn.backends.registry import register_backend
from chunkattn.errors import BackendError

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
MAX_GROUPS = 256


class CpuMetadata(NamedTuple):
    """The arrays of an `AttentionBatch`."""

    num_rows: Int32[StepArray, " 1"]
    row_seq: Int32[StepArray, " T"]
    row_slot: Int32[StepArray, " T"]
    row_start: Int32[StepArray, " T"]
    prefix_end: Int32[StepArray, " S"]
    block_tables: Int32[StepArray, "S W"]
    page_len: Int32[StepArray, "S W"]
    weighing: Weighing | None


@register_backend("cpu")
class CpuBackend(AttentionBackend):
    """Native attention on CPUs: one call per layer, on all threads of XLA."""

    keeps_bits = True
    weighs = True
    any_table_width = True
    smallest_step = 1

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

    def allocate(self, num_pages: int) -> KVCache:
        """Allocate K and V, each `[pages, kv_heads, block_size, head_dim]`; see `AttentionBackend.allocate`."""
        shape = (num_pages, self.spec.num_kv_heads, self.spec.block_size, self.spec.head_dim)
        dtype = storage_dtype(self.spec.cache_dtype)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def build_metadata(self, batch: AttentionBatch) -> CpuMetadata:
        """Return the batch's arrays; see `AttentionBackend.build_metadata`."""
        return CpuMetadata(
            np.asarray([batch.num_rows], np.int32),
            batch.row_seq,
            batch.row_slot,
            batch.row_start,
            batch.prefix_end,
            batch.block_tables,
            batch.page_len,
            batch.weighing,
        )

    def forward(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        cache: KVCache,
        metadata: CpuMetadata,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """Write and attend in one native call; see `AttentionBackend.forward`."""
        k, v = (to_cache(x, self.spec.cache_dtype) for x in (k, v))
        result = (q.shape, q.dtype if q.dtype == jnp.bfloat16 else jnp.float32)
        shapes = [jax.ShapeDtypeStruct(*x) for x in (result, *((pool.shape, pool.dtype) for pool in cache))]  # type: ignore[no-untyped-call]
        call = jax.ffi.ffi_call(library.ATTENTION, shapes, input_output_aliases={3: 1, 4: 2})
        given = (*metadata[:-1], *(metadata.weighing or ()))
        out, keys, values = call(q, k, v, *cache, *given, scale=np.float32(scale), window=np.int32(window or 0))
        return out.astype(q.dtype), (keys, values)
