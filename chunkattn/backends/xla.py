"""Tile-range attention in plain XLA operations: any platform, no O(n^2) array.

Online softmax (FlashAttention, arXiv:2205.14135) over the two KV ranges of each query
tile. Loops have dynamic trip counts, so a tile in which nothing is visible costs neither
a load nor a multiply. Rows of one-row runs that see their whole sequence (decodes) are
handled many sequences at a time; everything else one query tile at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec, KVCache, StepArray, read_pages, write_pages
from chunkattn.backends.registry import register_backend
from chunkattn.backends.tiles import TileRanges, Tiles, cut, full_tiles, spans, tile_ranges

_ON_CPU = jax.default_backend() == "cpu"
PER_HEAD = 16 if _ON_CPU else 0
"""With so many KV heads or fewer, large steps compute each by itself: XLA's batched products are slower on CPU.
It makes programs larger, so small steps, which wait for the weights, do without."""
TILES = ((1024, 256, 256, PER_HEAD), (1, 128, 512, 0))
"""Steps of at least so many rows, and the rows and slots of their tiles: large steps are mostly of long spans, which fill more
rows. The scores of a tile stay as many. Where page tables are narrower, KV tiles are."""
UNMASKED_ROWS = 2048
"""Steps of at least so many rows have a second loop, without a mask, for tiles that need none. It makes them a tenth faster and
their programs twice as large, which matters more to smaller ones: of 28 layers, one takes 10 seconds to be loaded."""
DECODE_SLOTS = 128 if _ON_CPU else 256
"""Slots of a KV tile of decodes: less is read past the end of a short sequence."""
DECODE_ROWS, DECODE_VALUES = (4, 1 << 15) if _ON_CPU else (32, 1 << 30)
"""Sequences of a decode tile, sorted by length, while their keys in it are no more values than this. On CPU, tiles of a tiny
model take longer to hand from thread to thread than to compute; in larger ones, sequences only wait for the longest."""
KEYS_FIRST = (32 if _ON_CPU else 0, 512)
"""Tiles of at most so many folded rows, and of keys of at least so many values a token, have keys on the left of their
product: XLA:CPU transposes the right side, which for so few rows takes far longer than the product."""

_FAR = np.iinfo(np.int32).max
_TINY = np.finfo(np.float32).tiny
_MASKED = -1e30
"""Start of the running maximum: finite, so that a row that has seen nothing yet stays finite."""


Tile = int | jax.Array
"""The number of a tile."""


class TileMetadata(NamedTuple):
    """A step as tiles. `Q` and `D` are static bounds on the tiles; the counts say how many are real.

    Attributes:
        tile_row, tile_last: int32 `[Q]`, first row and last row's slot of a query tile.
        ranges: int32 `[Q]` each, its KV tiles.
        full: int32 `[Q]` each, those of them that need no mask; None where all have one.
        num_tiles: int32 scalar.
        decode_rows: int32 `[D, sequences]`, rows of a decode tile; `T` is padding.
        decode_end: int32 `[D]`, KV tiles (of `DECODE_SLOTS`) of its longest sequence.
        num_decode_tiles: int32 scalar.
        row_seq, row_slot, row_start, flat_slots: int32 `[T]`, as in `AttentionBatch`.
        prefix_end, block_tables, page_len: as in `AttentionBatch`.
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


class _Scores(NamedTuple):
    """What becomes of a product of query and key; see `AttentionSpec.soft_cap`."""

    scale: float
    soft_cap: float | None

    def of(self, products: jax.Array) -> jax.Array:
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)


class _Softmax(NamedTuple):
    """Online softmax state: running maximum and sum `[B, G, R]`, weighted values `[B, G, R, d]`, float32."""

    maximum: Float32[Array, "B Hkv R"]
    total: Float32[Array, "B Hkv R"]
    values: Float32[Array, "B Hkv R D"]


@register_backend("xla")
class XlaBackend(AttentionBackend):
    """The portable backend; `auto` falls back to it everywhere."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Everything is supported."""
        return None

    def build_metadata(self, batch: AttentionBatch) -> TileMetadata:
        """See `AttentionBackend.build_metadata`."""
        rows, (seqs, width) = len(batch.row_seq), batch.block_tables.shape
        tile_rows, tile_slots, per_head = _tile_sizes(rows, width, batch.block_size)
        runs = spans(batch)
        decode = (runs.size == 1) & (batch.row_start[runs.row] == 0)
        tiles = cut(Tiles(runs.row[~decode], runs.size[~decode]), tile_rows)
        ranges = tile_ranges(batch, tiles, tile_slots)
        full = full_tiles(batch, tiles, tile_slots) if per_head and rows >= UNMASKED_ROWS else None
        bound = rows // tile_rows + min(seqs, rows)
        last = batch.row_slot[tiles.row + tiles.size - 1]

        decode_row = runs.row[decode]
        decode_row = decode_row[np.argsort(batch.row_slot[decode_row], kind="stable")]
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
        )

    def _decode_rows(self, rows: int, slots: int) -> int:
        """Sequences of a decode tile of so many slots, in a step of `rows`."""
        if _ON_CPU and rows <= 8:
            return 1  # the smallest step is mostly that of one sequence: the others of its tile would be padding
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
        """See `AttentionBackend.forward`."""
        cache = write_pages(cache, k, v, metadata.flat_slots)
        how = _Scores(scale, self.spec.soft_cap)
        out = _attend_tiles(q, cache, metadata, how, window)
        return _attend_decodes(out, q, cache, metadata, how, window), cache


def _tile_sizes(rows: int, width: int, block_size: int) -> tuple[int, int, int]:
    """Rows and slots of the tiles of a step, and with how many KV heads each is computed by itself."""
    _, tile_rows, tile_slots, per_head = next(sizes for sizes in TILES if rows >= sizes[0])
    return min(tile_rows, rows), _tile_slots(tile_slots, width, block_size), per_head


def _tile_slots(wanted: int, width: int, block_size: int) -> int:
    """Slots of a KV tile: about `wanted`, in whole pages that divide a page table `width` pages wide."""
    pages = max(1, min(wanted // block_size, width))
    while width % pages:  # page tables are usually a power of two wide; others get the next divisor
        pages -= 1
    return pages * block_size


def _pad(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)  # `np.pad` takes ten times as long
    padded[: len(values)] = values
    return padded


def _fold(q: Float[Array, "B rows H D"], kv_heads: int) -> Float[Array, "B Hkv R D"]:
    """`[B, R, heads, d]` to `[B, kv_heads, R * groups, d]`: GQA groups become rows."""
    b, r, h, d = q.shape
    return q.reshape(b, r, kv_heads, h // kv_heads, d).transpose(0, 2, 1, 3, 4).reshape(b, kv_heads, -1, d)


def _unfold(x: Float[Array, "B Hkv R D"], rows: int) -> Float[Array, "B rows H D"]:
    """The inverse of `_fold`: `[B, rows, heads, d]`."""
    b, g, _, d = x.shape
    return x.reshape(b, g, rows, -1, d).transpose(0, 2, 1, 3, 4).reshape(b, rows, -1, d)


def _start(q: Float[Array, "B Hkv R D"]) -> _Softmax:
    """No tile seen yet, for folded queries `[B, G, R, d]`."""
    shape = q.shape[:3]
    return _Softmax(jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32))


def _finish(state: _Softmax) -> Float32[Array, "B Hkv R D"]:
    """Normalised values; rows that saw nothing (padding) are zero."""
    return state.values / jnp.maximum(state.total, _TINY)[..., None]


def _update(
    state: _Softmax,
    q: Float[Array, "B Hkv R D"],
    keys: Float[Array, "B N Hkv D"],
    values: Float[Array, "B N Hkv D"],
    mask: Bool[Array, "B rows N"],
    present: Bool[Array, "B N"],
    how: _Scores,
) -> _Softmax:
    """One online-softmax step over a KV tile.

    Args:
        state: so far.
        q: folded queries `[B, G, R, d]`.
        keys: `[B, N, G, d]`.
        values: as `keys`.
        mask: bool `[B, rows, N]`; each row stands for `R / rows` folded ones.
        present: bool `[B, N]`, slots that hold a token; the rest may be NaN.
        how: what makes scores of products.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    few_rows, large_keys = KEYS_FIRST
    if q.shape[2] <= few_rows and keys.shape[2] * keys.shape[3] >= large_keys:  # apart, or XLA swaps the sides
        scores = _apart(multiply("bngd,bgrd->bgnr", keys, q)).swapaxes(2, 3)
    else:
        scores = multiply("bgrd,bngd->bgrn", q, keys)
    by_row = scores.reshape(*scores.shape[:2], mask.shape[1], -1, scores.shape[3])
    scores = jnp.where(mask[:, None, :, None], how.of(by_row), -jnp.inf).reshape(scores.shape)
    maximum = jnp.maximum(state.maximum, scores.max(-1))
    weights, decay = jnp.exp(scores - maximum[..., None]), jnp.exp(state.maximum - maximum)
    values = jnp.where(present[..., None, None], values, 0)
    added = multiply("bgrn,bngd->bgrd", weights.astype(values.dtype), values)
    return _Softmax(maximum, state.total * decay + weights.sum(-1), state.values * decay[..., None] + added)


def _update_by_head(
    state: _Softmax,
    q: Float[Array, "1 Hkv R D"],
    keys: Float[Array, "1 N Hkv D"],
    values: Float[Array, "1 N Hkv D"],
    mask: Bool[Array, "1 rows N"] | None,
    present: Bool[Array, "1 N"],
    how: _Scores,
) -> _Softmax:
    """As `_update`, for one sequence and one KV head after the other.

    Without a mask every row sees every token; keys must then be finite even where none is present.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    multiply = partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    values = jnp.where(present[..., None, None], values, 0)
    if mask is not None:
        mask = jnp.repeat(mask[0], q.shape[2] // mask.shape[1], axis=0)
    heads = range(q.shape[1])
    scores = [multiply(q[0, g], keys[0, :, g], (((1,), (1,)), ((), ()))) for g in heads]
    if mask is None:  # what `how` makes of them grows with them, so their maximum can be taken before
        highest = how.of(jnp.stack([x.max(-1) for x in scores]))
    else:
        scores = [jnp.where(mask, how.of(x), -jnp.inf) for x in scores]
        highest = jnp.stack([x.max(-1) for x in scores])
    maximum = jnp.maximum(state.maximum[0], highest)
    if mask is None:
        weights = [jnp.where(present, jnp.exp(how.of(x) - m[:, None]), 0) for x, m in zip(scores, maximum)]
    else:
        weights = [jnp.exp(x - m[:, None]) for x, m in zip(scores, maximum)]
    # Apart: made once, for the sum and the product.
    weights = [_apart(_rounded(w, values.dtype)) for w in weights]
    added = jnp.stack([multiply(w, values[0, :, g], (((1,), (0,)), ((), ()))) for g, w in zip(heads, weights)])
    decay = jnp.exp(state.maximum[0] - maximum)
    total = state.total[0] * decay + jnp.stack([w.sum(-1, dtype=jnp.float32) for w in weights])
    return _Softmax(maximum[None], total[None], state.values * decay[None, ..., None] + added[None])


def _apart(x: Any) -> Any:
    """Behind a barrier: XLA computes it by itself, and fuses nothing across."""
    return jax.lax.optimization_barrier(x)  # type: ignore[no-untyped-call]


def _rounded(weights: Float32[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Float32 weights, none negative, to the nearest of `dtype`.

    To bfloat16 by their bits: XLA:CPU's own conversion makes the loop over the exponential three times slower.
    """
    if dtype != jnp.bfloat16:
        return weights.astype(dtype)
    bits = jax.lax.bitcast_convert_type(weights, jnp.uint32)
    return jax.lax.bitcast_convert_type(((bits + 0x8000) >> 16).astype(jnp.uint16), dtype)


def _fill_holes(keys: Float[Array, "B N Hkv D"], present: Bool[Array, "B N"], block_size: int) -> Float[Array, "B N Hkv D"]:
    """Keys `[B, N, G, d]` with those that are not `present` `[B, N]` replaced by their page's first, which every page has."""
    pages = keys.reshape(len(keys), -1, block_size, *keys.shape[2:])
    return jnp.where(present.reshape(*pages.shape[:3], 1, 1), pages, pages[:, :, :1]).reshape(keys.shape)


def _kv_tile(
    cache: KVCache,
    metadata: TileMetadata,
    seqs: Int32[Array, " B"],
    tile: Int[Array, ""],
    tile_slots: int,
    dtype: jnp.dtype,
) -> tuple[Int[Array, " N"], Float[Array, "B N Hkv D"], Float[Array, "B N Hkv D"], Bool[Array, "B N"]]:
    """KV tile number `tile` of sequences `[B]`: slots `[N]`, keys and values `[B, N, G, d]`, valid `[B, N]`."""
    block_size = cache[0].shape[1]
    pages_per_tile = tile_slots // block_size
    slots = tile * tile_slots + jnp.arange(tile_slots)

    def columns(table: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(table, tile * pages_per_tile, pages_per_tile, axis=1)[seqs]

    pages, page_len = columns(metadata.block_tables), columns(metadata.page_len)
    keys, values = (x.reshape(len(seqs), tile_slots, *x.shape[3:]) for x in read_pages(cache, pages, dtype))
    valid = jnp.arange(block_size) < page_len[..., None]
    return slots, keys, values, valid.reshape(len(seqs), tile_slots)


def _count(parts: Sequence[tuple[Tile, Tile]]) -> Tile:
    """Tiles of ranges `[start, end)`; one may be empty, or even end before it starts."""
    return sum(jnp.maximum(end - start, 0) for start, end in parts)


def _nth(step: jax.Array, parts: Sequence[tuple[Tile, Tile]]) -> jax.Array:
    """The tile number `step` of them."""
    tile = jnp.zeros_like(step)
    for start, end in parts:
        size = jnp.maximum(end - start, 0)
        tile = jnp.where((step >= 0) & (step < size), start + step, tile)
        step -= size
    return tile


def _attend_tiles(
    q: Float[Array, "T H D"], cache: KVCache, metadata: TileMetadata, how: _Scores, window: int | None
) -> Float[Array, "T H D"]:
    """Query tiles one after the other, `[T, heads, d]`; rows of decodes are left undefined."""
    rows, (_, block_size, kv_heads, _) = len(q), cache[0].shape
    tile_rows, tile_slots, per_head = _tile_sizes(rows, metadata.block_tables.shape[1], block_size)
    # A tile reads and writes `tile_rows` rows wherever it begins: padding keeps the last one
    # in bounds, and what it writes past its own rows the next tile overwrites.
    q = jnp.pad(q, ((0, tile_rows), (0, 0), (0, 0)))
    row_slot, row_start = (jnp.pad(x, (0, tile_rows)) for x in (metadata.row_slot, metadata.row_start))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row, last = metadata.tile_row[index], metadata.tile_last[index]
        seq = metadata.row_seq[row]
        first_end, second_start, second_end = (r[index] for r in metadata.ranges)
        own, start = (jax.lax.dynamic_slice_in_dim(x, row, tile_rows)[:, None] for x in (row_slot, row_start))
        folded = _fold(jax.lax.dynamic_slice_in_dim(q, row, tile_rows)[None], kv_heads)
        if window is not None:  # a plain prompt: one range, and slots ascend with the rows
            second_start = jnp.maximum(second_start, (row_slot[row] - window + 1) // tile_slots)

        by_head, state = kv_heads <= per_head, _start(folded)
        parts = [(0, first_end), (second_start, second_end)]
        if by_head and window is None and metadata.full is not None:
            full = TileRanges(*(r[index] for r in metadata.full))
            whole = [(0, full.first_end), (full.second_start, full.second_end)]
            second_start = jnp.maximum(second_start, full.first_end)
            parts = [(full.first_end, first_end), (second_start, full.second_start), (full.second_end, second_end)]

            def one_full_tile(step: jax.Array, state: _Softmax) -> _Softmax:
                _, keys, values, valid = _kv_tile(cache, metadata, seq[None], _nth(step, whole), tile_slots, q.dtype)
                return _update_by_head(state, folded, _fill_holes(keys, valid, block_size), values, None, valid, how)

            state = jax.lax.fori_loop(0, _count(whole), one_full_tile, state)

        def one_kv_tile(step: jax.Array, state: _Softmax) -> _Softmax:
            tile = _nth(step, parts)
            slots, keys, values, valid = _kv_tile(cache, metadata, seq[None], tile, tile_slots, q.dtype)
            mask = (slots <= own) & ((slots < metadata.prefix_end[seq]) | (slots >= start)) & valid
            if window is not None:
                mask &= slots > own - window
            update = _update_by_head if by_head else _update
            return update(state, folded, keys, values, mask[None], valid & (slots <= last), how)

        state = jax.lax.fori_loop(0, _count(parts), one_kv_tile, state)
        block = _unfold(_finish(state), tile_rows)[0].astype(q.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, block, row, axis=0)

    return jax.lax.fori_loop(0, metadata.num_tiles, one_tile, jnp.zeros_like(q))[:rows]


def _attend_decodes(
    out: Float[Array, "T H D"],
    q: Float[Array, "T H D"],
    cache: KVCache,
    metadata: TileMetadata,
    how: _Scores,
    window: int | None,
) -> Float[Array, "T H D"]:
    """One-row runs that see their whole sequence, a tile of sequences at a time, written into `out`."""
    kv_heads = cache[0].shape[2]
    tile_slots = _tile_slots(DECODE_SLOTS, metadata.block_tables.shape[1], cache[0].shape[1])

    def one_group(index: jax.Array, out: jax.Array) -> jax.Array:
        rows = metadata.decode_rows[index]
        seqs, own = metadata.row_seq[rows], jnp.where(rows < len(q), metadata.row_slot[rows], -1)[:, None]
        folded = _fold(q[rows][:, None], kv_heads)
        begin = jnp.int32(0)
        if window is not None:
            shortest = jnp.where(own < 0, _FAR, own).min()
            begin = jnp.maximum(shortest - window + 1, 0) // tile_slots

        def one_kv_tile(tile: jax.Array, state: _Softmax) -> _Softmax:
            slots, keys, values, valid = _kv_tile(cache, metadata, seqs, tile, tile_slots, q.dtype)
            if _ON_CPU:  # pages are copied whole, then transposed: fused, value by value
                keys, values = _apart((keys, values))
            mask = (slots <= own) & valid
            if window is not None:
                mask &= slots > own - window
            return _update(state, folded, keys, values, mask[:, None], mask, how)

        state = jax.lax.fori_loop(begin, metadata.decode_end[index], one_kv_tile, _start(folded))
        return out.at[rows].set(_unfold(_finish(state), 1)[:, 0].astype(q.dtype), mode="drop")

    return jax.lax.fori_loop(0, metadata.num_decode_tiles, one_group, out)
