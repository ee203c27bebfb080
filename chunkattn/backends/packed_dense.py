"""The dense-mask baseline: plain attention with a mask as its input, the usual method of packed scoring elsewhere.

The backend exists for comparison. A step's rows attend only to rows of the same step, so every prompt must be complete in
its step. The cache is neither read nor written.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Int64

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec, Queries, StepArray
from chunkattn.backends.default_cache import KV, KVCache
from chunkattn.backends.registry import register_backend
from chunkattn.backends.tiles import spans
from chunkattn.errors import BackendError

_MASKED = -1e30
"""Finite, so that padding rows, which see no slot, stay finite."""


class MaskMetadata(NamedTuple):
    """A step as its mask.

    Attributes:
        mask: whether row `i` sees row `j`; `M` is the smaller of `T` and the row limit.
        position: position of every row; None for models without sliding windows.
    """

    mask: Bool[StepArray, "M M"]
    position: Int32[StepArray, " M"] | None


@register_backend("packed_dense")
class PackedDenseBackend(AttentionBackend):
    """Plain softmax attention of a step's rows under a mask built on the host.

    Attributes:
        max_rows: maximum number of rows of a step. At 8192 rows the mask takes 64 MiB, and the float32 scores of one head
            take 256 MiB.
    """

    max_rows = 8192

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Accept K/V in the model's dtype; see `AttentionBackend.supports`."""
        if spec.cache_dtype != spec.dtype:
            return f"packed_dense reads no cache, so K/V must stay {spec.dtype}, got kv_dtype {spec.cache_dtype}"
        return None

    def build_metadata(self, batch: AttentionBatch) -> MaskMetadata:
        """Build the mask; see `AttentionBackend.build_metadata`.

        Raises:
            BackendError: the step has more than `max_rows` rows, or a row sees a slot outside this step.
        """
        limit = self.max_rows
        if batch.num_rows > limit:
            raise BackendError(
                f"packed_dense: {batch.num_rows} rows in a step exceed the limit of {limit}; memory grows with their "
                "square. Score fewer items at a time, or use an algorithm or backend without a mask"
            )
        size = min(len(batch.row_seq), limit)
        mask = np.zeros((size, size), bool)
        for row, count in zip(*spans(batch), strict=True):
            own = slice(row, row + count)
            slot, prefix_end = batch.row_slot[own], batch.prefix_end[batch.row_seq[row]]
            mask[own, own] = (slot <= slot[:, None]) & ((slot < prefix_end) | (slot >= batch.row_start[own, None]))
        here, seen = np.count_nonzero(mask[: batch.num_rows], axis=1), _visible_slots(batch)
        if (here != seen).any():
            row = int(np.argmax(here != seen))
            raise BackendError(
                f"packed_dense: row {row} (sequence {batch.row_seq[row]}, slot {batch.row_slot[row]}) sees {seen[row]} slots, "
                f"of which {here[row]} are rows of this step, and no cache is read. Compute the whole prompt as one span of "
                "one step with nothing of it cached, or use another attention_backend"
            )
        return MaskMetadata(mask, batch.row_positions()[:size] if self.spec.windowed else None)

    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: MaskMetadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Attend under the mask; see `AttentionBackend.forward`. The cache is returned unchanged."""
        size, (rows, heads, head_dim), kv_heads = len(metadata.mask), q.shape, k.shape[1]
        mask = metadata.mask
        if window is not None:
            assert metadata.position is not None
            mask = mask & (metadata.position > metadata.position[:, None] - window)
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def one_head(
            head: tuple[Float[Array, "groups M D"], Float[Array, "M D"], Float[Array, "M D"]],
        ) -> Float32[Array, "groups M D"]:
            """Attend with one KV head and its query heads."""
            q, k, v = head
            scores = jnp.einsum("rqd,kd->rqk", q, k, precision=precision, preferred_element_type=jnp.float32)
            weights = jax.nn.softmax(jnp.where(mask, scores * scale, _MASKED), axis=-1).astype(v.dtype)
            return jnp.einsum("rqk,kd->rqd", weights, v, precision=precision, preferred_element_type=jnp.float32)

        folded = q[:size].reshape(size, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
        # One KV head at a time: the scores of all heads would be the largest array by far.
        out = jax.lax.map(one_head, (folded, k[:size].swapaxes(0, 1), v[:size].swapaxes(0, 1)))
        out = out.transpose(2, 0, 1, 3).reshape(size, heads, head_dim).astype(q.dtype)
        return jnp.pad(out, ((0, rows - size), (0, 0), (0, 0))), cache


def _visible_slots(batch: AttentionBatch) -> Int64[np.ndarray, " num_rows"]:
    """Return the number of valid slots that each row sees, inside or outside this step."""
    seq, slot, start = (x[: batch.num_rows] for x in (batch.row_seq, batch.row_slot, batch.row_start))
    before = np.pad(np.cumsum(batch.page_len, axis=1), ((0, 0), (1, 0)))

    def valid_below(end: np.ndarray) -> np.ndarray:
        page, within = np.divmod(end, batch.block_size)
        return before[seq, page] + within  # a page's valid slots come first, and `end` is at or just after one

    hidden = valid_below(start) - valid_below(batch.prefix_end[seq])
    return valid_below(slot + 1) - np.maximum(hidden, 0)
