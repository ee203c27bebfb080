"""Tile-range attention in plain XLA operations, for any platform and without an O(n^2) array.

The algorithm is online softmax over the two KV ranges of each query tile. Loops have dynamic trip counts, so a tile
without a visible slot costs neither a load nor a multiplication. One-row runs that see their whole sequence (decodes) are
computed many sequences at a time; other rows are computed one query tile at a time.

Axes that `base` does not define: `B` sequences computed together, `R` folded rows (rows times query heads per KV head), `N`
slots of a KV tile, `E` decode tiles.

Source: FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from chunkattn.backends import softmax
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
from chunkattn.backends.softmax import ON_CPU, Softmax
from chunkattn.backends.tiles import TileRanges, Tiles, cut, cut_at_questions, full_tiles, spans, tile_ranges, without_chunks

PER_HEAD = 16 if ON_CPU else 0
"""Maximum number of KV heads that large steps compute one by one, because XLA's batched products are slower on CPU.
This makes programs larger, so small steps, which are bound by loading the weights, do without."""
TILES = ((1024, 256, 256, PER_HEAD), (1, 128, 512, 0))
"""Minimum rows of a step, rows and slots of its tiles, and maximum number of KV heads to compute one by one.
Large steps consist mostly of long spans, which fill more rows; both settings give a tile as many scores. KV tiles are
smaller where page tables are narrower."""
UNMASKED_ROWS = 2048
"""Minimum rows of a step with a second loop, without a mask, for tiles that need no mask. The loop makes such steps a tenth
faster and their programs twice as large. Size matters more to smaller steps: a program of 28 layers loads in 10 seconds."""
DECODE_SLOTS = 128 if ON_CPU else 256
"""Slots of a KV tile of decodes; smaller tiles read less past the end of a short sequence."""
DECODE_ROWS, DECODE_VALUES = (4, 1 << 15) if ON_CPU else (32, 1 << 30)
"""Maximum number of sequences of a decode tile, sorted by length, and of key values in a KV tile. On CPU, handing tiles of a
tiny model from thread to thread takes longer than computing them; in larger models, sequences only wait for the longest."""
_FAR = np.iinfo(np.int32).max


Tile = int | jax.Array
"""Number of a KV tile."""


class TileMetadata(NamedTuple):
    """A step as tiles. `Q` and `E` are static bounds; `num_tiles` and `num_decode_tiles` count the tiles in use.

    Attributes:
        tile_row: first row of each query tile.
        tile_last: slot of each query tile's last row.
        ranges: KV tiles of each query tile.
        full: KV tiles of each query tile that need no mask; None if all tiles are masked.
        num_tiles: query tiles in use.
        decode_rows: rows of each decode tile; `T` is padding.
        decode_end: KV tiles (of `DECODE_SLOTS` slots) of each decode tile's longest sequence.
        num_decode_tiles: decode tiles in use.
        row_seq: see `AttentionBatch`.
        row_slot: see `AttentionBatch`.
        row_start: see `AttentionBatch`.
        flat_slots: see `AttentionBatch`.
        prefix_end: see `AttentionBatch`.
        block_tables: see `AttentionBatch`.
        page_len: see `AttentionBatch`.
        weighing: weighing of every row; None leaves all rows as they are.
    """

    tile_row: Int32[StepArray, " Q"]
    tile_last: Int32[StepArray, " Q"]
    ranges: TileRanges
    full: TileRanges | None
    num_tiles: Int32[StepArray, ""]
    decode_rows: Int32[StepArray, "E group"]
    decode_end: Int32[StepArray, " E"]
    num_decode_tiles: Int32[StepArray, ""]
    row_seq: Int32[StepArray, " T"]
    row_slot: Int32[StepArray, " T"]
    row_start: Int32[StepArray, " T"]
    flat_slots: Int32[StepArray, " T"]
    prefix_end: Int32[StepArray, " S"]
    block_tables: Int32[StepArray, "S W"]
    page_len: Int32[StepArray, "S W"]
    weighing: RowWeighing | None


@register_backend("xla")
class XlaBackend(AttentionBackend):
    """The portable backend, which `auto` falls back to on every platform."""

    weighs = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return None: every spec is supported."""
        return None

    def build_metadata(self, batch: AttentionBatch) -> TileMetadata:
        """Cut the batch into tiles; see `AttentionBackend.build_metadata`."""
        rows, (seqs, width) = len(batch.row_seq), batch.block_tables.shape
        tile_rows, tile_slots, per_head = _tile_sizes(rows, width, batch.block_size)
        runs = spans(batch)
        decode = (runs.size == 1) & (batch.row_start[runs.row] == 0)
        prompts, weighing = Tiles(runs.row[~decode], runs.size[~decode]), batch.row_weighing()
        if weighing is not None:
            prompts = cut_at_questions(prompts, weighing)
        tiles = cut(prompts, tile_rows)
        ranges = tile_ranges(batch, tiles, tile_slots)
        full = full_tiles(batch, tiles, tile_slots) if per_head and rows >= UNMASKED_ROWS else None
        if weighing is not None:
            ranges = without_chunks(ranges, tiles, weighing, tile_slots)
            full = full and _without_weighed(full, ranges, weighing.end[tiles.row] > 0)
        bound = rows // tile_rows + min(seqs, rows) * (1 if weighing is None else 2)
        last = batch.row_slot[tiles.row + tiles.size - 1]

        decode_row = runs.row[decode]
        order = batch.row_slot[decode_row].astype(np.int64)
        if weighing is not None:  # weighed rows apart, because a tile of them alone visits every slot once
            order += (weighing.end[decode_row] > 0).astype(np.int64) << 32
        decode_row = decode_row[np.argsort(order, kind="stable")]
        decode_slots = _tile_slots(DECODE_SLOTS, width, batch.block_size)
        group = self._decode_rows(rows, decode_slots)
        decode_bound = -(-min(seqs, rows) // group)
        decode_rows = np.full(decode_bound * group, rows, np.int32)
        decode_rows[: len(decode_row)] = decode_row
        decode_rows = decode_rows.reshape(decode_bound, group)
        ends = np.append(batch.row_slot // decode_slots + 1, 0)[decode_rows].max(axis=1)
        return TileMetadata(
            tile_row=_pad(tiles.row, bound),
            tile_last=_pad(last, bound),
            ranges=TileRanges(*(_pad(r, bound) for r in ranges)),
            full=None if full is None else TileRanges(*(_pad(r, bound) for r in full)),
            num_tiles=np.int32(len(tiles.row)),
            decode_rows=decode_rows,
            decode_end=ends.astype(np.int32),
            num_decode_tiles=np.int32(-(-len(decode_row) // group)),
            row_seq=batch.row_seq,
            row_slot=batch.row_slot,
            row_start=batch.row_start,
            flat_slots=batch.flat_slots(),
            prefix_end=batch.prefix_end,
            block_tables=batch.block_tables,
            page_len=batch.page_len,
            weighing=weighing,
        )

    def _decode_rows(self, rows: int, slots: int) -> int:
        """Return the number of sequences of a decode tile of `slots` slots, in a step of `rows` rows."""
        if ON_CPU and rows <= 8:
            return 1  # the smallest step mostly has one sequence: the rest of its tile would be padding
        fitting = DECODE_VALUES // (slots * self.spec.num_kv_heads * self.spec.head_dim)
        return max(1, min(DECODE_ROWS, fitting, rows))

    def forward(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        cache: KVCache,
        metadata: TileMetadata,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """Attend tile by tile; see `AttentionBackend.forward`."""
        cache = write_pages(cache, k, v, metadata.flat_slots)
        out = _attend_tiles(q, cache, metadata, scale, window)
        return _attend_decodes(out, q, cache, metadata, scale, window), cache


def _without_weighed(full: TileRanges, ranges: TileRanges, weighed: np.ndarray) -> TileRanges:
    """Return `full_tiles` without the tiles of weighed query tiles, which all get a mask."""
    starts = (np.where(weighed, ranges.second_start, x) for x in (full.second_start, full.second_end))
    return TileRanges(np.where(weighed, 0, full.first_end), *starts)


def _tile_sizes(rows: int, width: int, block_size: int) -> tuple[int, int, int]:
    """Return the rows and slots of a step's tiles, and the maximum number of KV heads to compute one by one."""
    _, tile_rows, tile_slots, per_head = next(sizes for sizes in TILES if rows >= sizes[0])
    return min(tile_rows, rows), _tile_slots(tile_slots, width, block_size), per_head


def _tile_slots(wanted: int, width: int, block_size: int) -> int:
    """Return the slots of a KV tile: about `wanted`, in whole pages that divide a page table `width` pages wide."""
    pages = max(1, min(wanted // block_size, width))
    while width % pages:  # for widths that are not a power of two
        pages -= 1
    return pages * block_size


def _pad(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)  # `np.pad` takes ten times as long
    padded[: len(values)] = values
    return padded


def _kv_tile(
    cache: KVCache,
    metadata: TileMetadata,
    seqs: Int32[Array, " B"],
    tile: Int[Array, ""],
    tile_slots: int,
    dtype: jnp.dtype,
) -> tuple[Int[Array, " N"], Float[Array, "B N Hkv D"], Float[Array, "B N Hkv D"], Bool[Array, "B N"]]:
    """Return the slots, keys, values and validity of KV tile `tile` of sequences `seqs`."""
    block_size = cache[0].shape[1]
    pages_per_tile = tile_slots // block_size
    slots = tile * tile_slots + jnp.arange(tile_slots)

    def columns(table: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(table, tile * pages_per_tile, pages_per_tile, axis=1)[seqs]

    pages, page_len = columns(metadata.block_tables), columns(metadata.page_len)
    keys, values = (x.reshape(len(seqs), tile_slots, *x.shape[3:]) for x in read_pages(cache, pages, dtype))
    valid = jnp.arange(block_size) < page_len[..., None]
    return slots, keys, values, valid.reshape(len(seqs), tile_slots)


def _num_tiles(parts: Sequence[tuple[Tile, Tile]]) -> Tile:
    """Return the number of tiles in ranges `[start, end)`. A range may be empty or end before its start."""
    return sum(jnp.maximum(end - start, 0) for start, end in parts)


def _nth_tile(step: jax.Array, parts: Sequence[tuple[Tile, Tile]]) -> jax.Array:
    """Return tile number `step` of the ranges."""
    tile = jnp.zeros_like(step)
    for start, end in parts:
        size = jnp.maximum(end - start, 0)
        tile = jnp.where((step >= 0) & (step < size), start + step, tile)
        step -= size
    return tile


def _attend_tiles(
    q: Float[Array, "T H D"], cache: KVCache, metadata: TileMetadata, scale: float, window: int | None
) -> Float[Array, "T H D"]:
    """Attend one query tile at a time. Rows of decodes are left undefined."""
    rows, (_, block_size, kv_heads, _) = len(q), cache[0].shape
    tile_rows, tile_slots, per_head = _tile_sizes(rows, metadata.block_tables.shape[1], block_size)
    # Every tile reads and writes `tile_rows` rows. Padding keeps the last tile in bounds, and the next tile
    # overwrites the rows written past a tile's own.
    q = jnp.pad(q, ((0, tile_rows), (0, 0), (0, 0)))
    row_slot, row_start = (jnp.pad(x, (0, tile_rows)) for x in (metadata.row_slot, metadata.row_start))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row, last = metadata.tile_row[index], metadata.tile_last[index]
        seq = metadata.row_seq[row]
        first_end, second_start, second_end = (r[index] for r in metadata.ranges)
        own, start = (jax.lax.dynamic_slice_in_dim(x, row, tile_rows)[:, None] for x in (row_slot, row_start))
        folded = softmax.fold(jax.lax.dynamic_slice_in_dim(q, row, tile_rows)[None], kv_heads)
        if window is not None:  # a plain prompt: one range, and slots ascend with the rows
            second_start = jnp.maximum(second_start, (row_slot[row] - window + 1) // tile_slots)

        by_head, state = kv_heads <= per_head, softmax.start(folded)
        update = softmax.update_by_head if by_head else softmax.update
        if metadata.weighing is not None:  # the range is empty for rows that are left as they are
            begin, end, temperature, chunk_scale = (x[row] for x in metadata.weighing)

            def one_chunk_tile(tile: jax.Array, state: Softmax) -> Softmax:
                slots, keys, values, valid = _kv_tile(cache, metadata, seq[None], tile, tile_slots, q.dtype)
                mask = jnp.broadcast_to((slots >= begin) & (slots < end) & valid, (1, tile_rows, tile_slots))
                return update(state, folded, keys, values, mask, valid & (slots <= last), scale / temperature)

            state = jax.lax.fori_loop(begin // tile_slots, -(-end // tile_slots), one_chunk_tile, state)
            state = softmax.as_one_slot(state, chunk_scale)
        parts = [(0, first_end), (second_start, second_end)]
        if by_head and window is None and metadata.full is not None:
            full = TileRanges(*(r[index] for r in metadata.full))
            whole = [(0, full.first_end), (full.second_start, full.second_end)]
            second_start = jnp.maximum(second_start, full.first_end)
            parts = [(full.first_end, first_end), (second_start, full.second_start), (full.second_end, second_end)]

            def one_full_tile(step: jax.Array, state: Softmax) -> Softmax:
                _, keys, values, valid = _kv_tile(cache, metadata, seq[None], _nth_tile(step, whole), tile_slots, q.dtype)
                return softmax.update_by_head(
                    state, folded, softmax.fill_holes(keys, valid, block_size), values, None, valid, scale
                )

            state = jax.lax.fori_loop(0, _num_tiles(whole), one_full_tile, state)

        def one_kv_tile(step: jax.Array, state: Softmax) -> Softmax:
            tile = _nth_tile(step, parts)
            slots, keys, values, valid = _kv_tile(cache, metadata, seq[None], tile, tile_slots, q.dtype)
            mask = (slots <= own) & ((slots < metadata.prefix_end[seq]) | (slots >= start)) & valid
            if window is not None:
                mask &= slots > own - window
            if metadata.weighing is not None:
                mask &= (slots < begin) | (slots >= end)
            return update(state, folded, keys, values, mask[None], valid & (slots <= last), scale)

        state = jax.lax.fori_loop(0, _num_tiles(parts), one_kv_tile, state)
        block = softmax.unfold(softmax.finish(state), tile_rows)[0].astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, block, row, axis=0)

    return jax.lax.fori_loop(0, metadata.num_tiles, one_tile, jnp.zeros_like(q))[:rows]


def _attend_decodes(
    out: Float[Array, "T H D"],
    q: Float[Array, "T H D"],
    cache: KVCache,
    metadata: TileMetadata,
    scale: float,
    window: int | None,
) -> Float[Array, "T H D"]:
    """Attend the one-row runs that see their whole sequence, one decode tile at a time, and write them into `out`."""
    kv_heads = cache[0].shape[2]
    tile_slots = _tile_slots(DECODE_SLOTS, metadata.block_tables.shape[1], cache[0].shape[1])

    def one_group(index: jax.Array, out: jax.Array) -> jax.Array:
        rows = metadata.decode_rows[index]
        seqs, own = metadata.row_seq[rows], jnp.where(rows < len(q), metadata.row_slot[rows], -1)[:, None]
        folded = softmax.fold(q[rows][:, None], kv_heads)
        begin = jnp.int32(0)
        if window is not None:
            shortest = jnp.where(own < 0, _FAR, own).min()
            begin = jnp.maximum(shortest - window + 1, 0) // tile_slots

        weighing = None if metadata.weighing is None else RowWeighing(*(x[rows][:, None] for x in metadata.weighing))

        def one_kv_tile(tile: jax.Array, state: Softmax, of_chunks: bool = False) -> Softmax:
            slots, keys, values, valid = _kv_tile(cache, metadata, seqs, tile, tile_slots, q.dtype)
            factor: float | jax.Array = scale
            if ON_CPU:  # copy whole pages before the transposition: fused, XLA copies value by value
                keys, values = softmax.barrier((keys, values))
            mask = (slots <= own) & valid
            if window is not None:
                mask &= slots > own - window
            if weighing is not None:
                chunk = (slots >= weighing.begin) & (slots < weighing.end)
                mask &= chunk if of_chunks else ~chunk
                factor = scale / weighing.temperature[..., None, None, None] if of_chunks else scale
            return softmax.update(state, folded, keys, values, mask[:, None], mask, factor)

        state, end = softmax.start(folded), metadata.decode_end[index]
        if weighing is None:
            state = jax.lax.fori_loop(begin, end, one_kv_tile, state)
        else:
            (first, after), rest = _chunk_tiles(weighing, own >= 0, end, tile_slots)
            state = jax.lax.fori_loop(first, after, partial(one_kv_tile, of_chunks=True), state)
            state = softmax.as_one_slot(state, weighing.scale[..., None])
            state = jax.lax.fori_loop(0, _num_tiles(rest), lambda i, state: one_kv_tile(_nth_tile(i, rest), state), state)
        return out.at[rows].set(softmax.unfold(softmax.finish(state), 1)[:, 0].astype(q.dtype), mode="drop")

    return jax.lax.fori_loop(0, metadata.num_decode_tiles, one_group, out)


def _chunk_tiles(
    weighing: RowWeighing, used: Bool[Array, "B 1"], end: jax.Array, tile_slots: int
) -> tuple[tuple[Tile, Tile], list[tuple[Tile, Tile]]]:
    """Return the KV tiles `[first, after)` with chunk slots of a decode tile, and the ranges of tiles with other slots.

    Args:
        weighing: weighing of the tile's rows, `[B, 1]` each.
        used: rows in use.
        end: KV tiles of the longest row.
        tile_slots: slots of a KV tile.
    """
    weighed = used & (weighing.end > weighing.begin)
    first = jnp.where(weighed, weighing.begin, _FAR).min() // tile_slots
    after = -(-jnp.where(weighed, weighing.end, 0).max() // tile_slots)
    # A tile that lies within the chunk slots of every row has no other slot. A row that is not weighed needs all tiles.
    every = end * tile_slots
    skipped = -(-jnp.where(used, jnp.where(weighed, weighing.begin, every), 0).max() // tile_slots)
    resumed = jnp.where(used, jnp.where(weighed, weighing.end, 0), _FAR).min() // tile_slots
    return (first, after), [(0, jnp.minimum(skipped, end)), (jnp.maximum(resumed, skipped), end)]
