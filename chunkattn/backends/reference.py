"""The reference backend: every row gathers the slots that it sees. Slow and simple; the tests' oracle.

A row's slots are summed in portions, first those of the prefix, then those of its own part (see `AttentionBackend.forward`).

Axes that `base` does not define: `R` rows of a block, `N` slots of a portion, `M` portions.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from chunkattn.backends.base import AttentionBatch, Queries, RowWeighing, StepArray, positions_of
from chunkattn.backends.default_cache import KV, KVCache, read_slots, write_pages
from chunkattn.backends.portable import PortableBackend
from chunkattn.backends.registry import register_backend

PORTION = 128
"""Slots that are summed at once."""
ROWS = 32
"""Rows that are computed at once. Every step has blocks of this size, so that one program computes every row."""

_multiply = partial(jnp.einsum, precision="highest")


class _Rows(NamedTuple):
    """Rows, see `AttentionBatch`. Padding rows have sequence -1."""

    seq: Int32[StepArray, " R"]
    slot: Int32[StepArray, " R"]
    start: Int32[StepArray, " R"]
    weighing: RowWeighing | None


class RowMetadata(NamedTuple):
    """The arrays of an `AttentionBatch`."""

    rows: _Rows
    flat_slots: Int32[StepArray, " T"]
    prefix_end: Int32[StepArray, " S"]
    block_tables: Int32[StepArray, "S W"]
    page_len: Int32[StepArray, "S W"]
    page_position: Int32[StepArray, "S W"] | None


@register_backend("reference")
class ReferenceBackend(PortableBackend):
    """A backend that gathers the slots of every row."""

    def build_metadata(self, batch: AttentionBatch) -> RowMetadata:
        """Copy the batch's arrays; see `AttentionBackend.build_metadata`."""
        row_seq = batch.row_seq.copy()
        row_seq[batch.num_rows :] = -1
        rows = _Rows(row_seq, batch.row_slot, batch.row_start, batch.row_weighing())
        page_position = batch.page_positions() if self.spec.windowed else None
        return RowMetadata(rows, batch.flat_slots(), batch.prefix_end, batch.block_tables, batch.page_len, page_position)

    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: RowMetadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Attend row by row; see `AttentionBackend.forward`."""
        cache = write_pages(cache, k, v, metadata.flat_slots)
        rows, heads, head_dim = q.shape
        kv_heads, block_size = k.shape[1], cache[0].shape[1]
        num_slots = metadata.block_tables.shape[1] * block_size
        portions = jnp.arange((-(-num_slots // PORTION) + 1) * PORTION).reshape(-1, PORTION)

        def one_block(block: tuple[jax.Array, _Rows]) -> Float[Array, "R H D"]:
            q, of = block
            prefix_end = metadata.prefix_end[of.seq]
            tables, page_len = metadata.block_tables[of.seq], metadata.page_len[of.seq]
            # A row's slots are those of the prefix, up to the end of a portion, and then those of its own part.
            own_from = -(-prefix_end // PORTION) * PORTION
            own_start = jnp.maximum(of.start, prefix_end)
            folded = q.astype(jnp.float32).reshape(ROWS, kv_heads, -1, head_dim)
            folded = jnp.pad(folded, ((0, 0), (0, 0), (0, 1), (0, 0)))  # XLA:CPU adds up a single row in another order

            def seen(portion: Int32[Array, " N"]) -> tuple[Int32[Array, "R N"], Bool[Array, "R N"], jax.Array, jax.Array]:
                of_prefix = portion < own_from[:, None]
                slots = jnp.where(of_prefix, portion, portion + (own_start - own_from)[:, None])
                keys, values, valid = read_slots(cache, tables, page_len, slots[:, 0], PORTION, q.dtype)
                mask = valid & (slots <= of.slot[:, None]) & (~of_prefix | (slots < prefix_end[:, None]))
                mask &= (of.seq >= 0)[:, None]
                if window is not None:
                    assert metadata.page_position is not None
                    own, others = (
                        positions_of(metadata.page_position, of.seq, x, block_size) for x in (of.slot[:, None], slots)
                    )
                    mask &= others > own - window
                keys, values = (jnp.where(mask[..., None, None], x, 0).astype(jnp.float32) for x in (keys, values))
                return slots, mask, keys, values

            def scored(portion: Int32[Array, " N"]) -> tuple[Int32[Array, "R N"], Bool[Array, "R N"], Float[Array, "H R N"]]:
                slots, mask, keys, _ = seen(portion)
                scores = _multiply("rgqd,rngd->rgqn", folded, keys)[:, :, :-1] * scale
                return slots, mask, scores.reshape(ROWS, heads, PORTION).swapaxes(0, 1)

            slots, mask, scores = (_join(x) for x in jax.lax.map(scored, portions))
            if of.weighing is not None and window is None:
                scores = _weigh(scores, mask, slots, of.weighing)
            scores = jnp.where(mask, scores, -1e30)
            weights = jnp.where(mask, jnp.exp(scores - _highest(scores)), 0)

            def add(total: jax.Array, portion: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                numbers, weights = portion
                by_head = weights.swapaxes(0, 1).reshape(ROWS, kv_heads, -1, PORTION)
                by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, 1), (0, 0)))
                return total + _multiply("rgqn,rngd->rgqd", by_head, seen(numbers)[3])[:, :, :-1], None

            start = jnp.zeros((ROWS, kv_heads, heads // kv_heads, head_dim), jnp.float32)
            values, _ = jax.lax.scan(add, start, (portions, _split(weights)))
            total = _sums(weights).swapaxes(0, 1)
            return (values.reshape(ROWS, heads, head_dim) / jnp.where(total > 0, total, 1)).astype(q.dtype)

        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, -rows % ROWS), *(x.ndim - 1) * [(0, 0)])), (q, metadata.rows))
        blocks = jax.tree.map(lambda x: x.reshape(-1, ROWS, *x.shape[1:]), padded)
        return jax.lax.map(one_block, blocks).reshape(-1, heads, head_dim)[:rows], cache


def _join(x: Shaped[Array, "M *axes N"]) -> Shaped[Array, "*axes slots"]:
    """Return portions side by side."""
    return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)


def _split(x: Shaped[Array, "*axes slots"]) -> Shaped[Array, "M *axes N"]:
    """Invert `_join`."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, PORTION), -2, 0)


def _sums(x: Float32[Array, "*axes slots"]) -> Float32[Array, "*axes 1"]:
    """Return the sums over all portions, one after the other.

    A product has one order of additions for any number of rows. XLA:CPU's own sums do not.
    """
    by_portion = _multiply("...n,cn->...c", _split(x), jnp.ones((8, PORTION), jnp.float32))[..., :1]
    total, _ = jax.lax.scan(lambda total, portion: (total + portion, None), jnp.zeros_like(by_portion[0]), by_portion)
    return total


def _highest(scores: Float32[Array, "*axes slots"]) -> Float32[Array, "*axes 1"]:
    return jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))


def _weigh(
    scores: Float[Array, "H R slots"], mask: Bool[Array, "R slots"], slots: Int32[Array, "R slots"], weighing: RowWeighing
) -> Float[Array, "H R slots"]:
    """Return the scores with those of chunk slots weighed anew, see `base.Weighing`."""
    begin, end, temperature, scale = (x[:, None] for x in weighing)
    chunk = mask & (slots >= begin) & (slots < end)
    tempered = scores / temperature
    highest = _highest(jnp.where(chunk, tempered, -1e30))
    sums = _sums(jnp.where(chunk, jnp.exp(tempered - highest), 0))
    total = highest + jnp.log(jnp.where(sums > 0, sums, 1))
    return jnp.where(chunk, tempered + (scale - 1) * total, scores)
