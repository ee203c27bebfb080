"""The reference backend: dense masks, one sequence at a time, plain softmax. Slow and simple; the tests' oracle."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from chunkattn.backends.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    RowWeighing,
    StepArray,
    read_pages,
    write_pages,
)
from chunkattn.backends.registry import register_backend


class DenseMetadata(NamedTuple):
    """The arrays of an `AttentionBatch`, with padding rows assigned to sequence -1."""

    row_seq: Int32[StepArray, " T"]
    row_slot: Int32[StepArray, " T"]
    row_start: Int32[StepArray, " T"]
    flat_slots: Int32[StepArray, " T"]
    prefix_end: Int32[StepArray, " S"]
    block_tables: Int32[StepArray, "S W"]
    page_len: Int32[StepArray, "S W"]
    weighing: RowWeighing | None


@register_backend("reference")
class ReferenceBackend(AttentionBackend):
    """A backend that builds dense `[T, slots]` masks, one sequence at a time."""

    weighs = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return None: every spec is supported."""
        return None

    def build_metadata(self, batch: AttentionBatch) -> DenseMetadata:
        """Copy the batch's arrays; see `AttentionBackend.build_metadata`."""
        row_seq = batch.row_seq.copy()
        row_seq[batch.num_rows :] = -1
        return DenseMetadata(
            row_seq,
            batch.row_slot,
            batch.row_start,
            batch.flat_slots(),
            batch.prefix_end,
            batch.block_tables,
            batch.page_len,
            batch.row_weighing(),
        )

    def forward(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        cache: KVCache,
        metadata: DenseMetadata,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """Attend with dense masks; see `AttentionBackend.forward`."""
        cache = write_pages(cache, k, v, metadata.flat_slots)
        block_size, groups = cache[0].shape[1], q.shape[1] // k.shape[1]
        slots = jnp.arange(metadata.block_tables.shape[1] * block_size)

        def one_sequence(out: jax.Array, seq: jax.Array) -> tuple[jax.Array, None]:
            pages = metadata.block_tables[seq]
            keys, values = (
                jnp.repeat(x.reshape(len(slots), *x.shape[2:]), groups, axis=1) for x in read_pages(cache, pages, q.dtype)
            )
            row_slot, row_start = metadata.row_slot[:, None], metadata.row_start[:, None]
            mask = (slots <= row_slot) & ((slots < metadata.prefix_end[seq]) | (slots >= row_start))
            mask &= slots % block_size < metadata.page_len[seq][slots // block_size]
            if window is not None:
                mask &= slots > row_slot - window
            mask &= (metadata.row_seq == seq)[:, None]
            keys, values = (jnp.where(mask.any(0)[:, None, None], x, 0) for x in (keys, values))
            scores = jnp.einsum("qhd,khd->hqk", *(x.astype(jnp.float32) for x in (q, keys)), precision="highest")
            scores *= scale
            if metadata.weighing is not None:
                scores = _weigh(scores, mask, slots, metadata.weighing)
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
            attended = jnp.einsum("hqk,khd->qhd", weights, values.astype(jnp.float32), precision="highest")
            return jnp.where((metadata.row_seq == seq)[:, None, None], attended.astype(q.dtype), out), None

        out, _ = jax.lax.scan(one_sequence, jnp.zeros_like(q), jnp.arange(metadata.block_tables.shape[0]))
        return out, cache


def _weigh(
    scores: Float[Array, "H T N"], mask: Bool[Array, "T N"], slots: Int32[Array, " N"], weighing: RowWeighing
) -> Float[Array, "H T N"]:
    """Return the scores with those of chunk slots weighed anew, see `base.Weighing`."""
    begin, end, temperature, scale = (x[:, None] for x in weighing)
    chunk = mask & (slots >= begin) & (slots < end)
    tempered = scores / temperature
    total = jax.nn.logsumexp(jnp.where(chunk, tempered, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(chunk, tempered + (scale - 1) * total, scores)
