"""The attention kernel for TPUs: query tiles walk their KV tiles, with page copies double-buffered.

One grid step is one query tile: rows of one sequence inside one block of the batch's rows, or one decode. The grid step
walks the KV tiles of its two ranges (`chunkattn.backends.tiles`) and no other tile. While a KV tile is multiplied, the pages
of the next tile are copied from HBM, across query tiles too. If every row of the query tile sees every slot of the KV
tile, no mask is computed; most tiles of a long prefix are of this kind.

The kernel gathers nothing by a vector of indices, which Mosaic cannot lower. Page numbers are scalars, one sequence's row
of the page table at a time in SMEM (at most 128 KiB; a whole table would not fit), and the rows' slots arrive as a block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from chunkattn.backends.pallas_tpu.blocks import LANES, Shape
from chunkattn.backends.pallas_tpu.pages import Pages

SCALARS = BLOCK, LOW, HIGH, SEQ, FIRST_END, SECOND_START, SECOND_END, MIN_SLOT, LAST, MAX_START, PREFIX_END = range(11)
"""Rows of the scalars of query tiles, int32 `[len(SCALARS), Q]`.

In order: block of the batch's rows, the tile's rows within the block `[LOW, HIGH)`, sequence, KV ranges, smallest and
largest slot of its rows, largest row start, slots of the prefix.
"""
CHUNKS = CHUNK_BEGIN, CHUNK_END = len(SCALARS), len(SCALARS) + 1
"""Further rows of the scalars in steps that weigh chunks anew: the chunk slots of the tile's rows, empty if not weighed."""
WINDOW = FIRST_VISIT, POSITION = len(SCALARS), len(SCALARS) + 1
"""Further rows of the scalars in layers with a sliding window: first of `Window.visits`, lowest position of the tile's rows.

The KV ranges are then those of an index into `Window.visits`.
"""
FACTORS = PER_TEMPERATURE, CHUNK_SCALE = range(2)
"""Rows of the factors of weighed query tiles, float32 `[len(FACTORS), Q]`: one over the temperature, and the scale."""

_MASKED = -1e38
"""Bias of an invisible score: far below `_LEAST`, so its weight is zero."""
_LEAST = -1e30
"""Start of the running maximum: finite, so that a row that has seen no slot yet stays finite."""
_FAR = np.iinfo(np.int32).max


class Window(NamedTuple):
    """KV tiles and positions that query tiles need under a sliding window.

    Attributes:
        visits: KV tiles of each query tile, see `windows.Visits`.
        shifts: position minus slot of every page.
    """

    visits: Int32[Array, "Q 1 N"]
    shifts: Int32[Array, "S 1 W"]


def attend(
    scalars: Int32[Array, "scalars Q"],
    factors: Float32[Array, "2 Q"] | None,
    count: Int32[Array, ""],
    q: Float[Array, "blocks*rows H*lanes"] | Float[Array, "Q Hkv groups lanes"],
    rows: Int32[Array, "blocks 8 row_lanes"] | None,
    table: Int32[Array, "S 1 W"],
    pool: Shaped[Array, "P Hkv block_size kv_lanes"],
    shape: Shape,
    *,
    scale: float,
    window: int | None,
    visits: Window | None,
    interpret: Any,
    vmem_limit_bytes: int,
) -> Float[Array, "blocks*rows H*lanes"] | Float[Array, "Q Hkv groups lanes"]:
    """Compute attention of `count` query tiles over pages already written.

    Args:
        scalars: scalars of the query tiles; tiles of one block are contiguous and every block has one.
        factors: factors of the query tiles, whose scalars then hold `CHUNKS` too; None weighs no chunks anew.
        count: query tiles in use.
        q: queries by row; for decodes, by KV head. `lanes` is `shape.head_dim`.
        rows: row slots, row starts and, for windows, positions of a block in its first rows; None for decodes.
        table: page-table entries, see `pages.LENGTH_BITS`.
        pool: pages of K and V in `kv_lanes`, `shape.lanes`.
        shape: sizes.
        scale: factor of the scores.
        window: see `AttentionBackend.forward`.
        visits: what the window lets query tiles see, whose scalars then hold `WINDOW` too; None without a window.
        interpret: argument of `pl.pallas_call`.
        vmem_limit_bytes: bytes of vector memory that the kernel may use.

    Returns:
        The attention output in the form of `q`. Rows of no tile are zero; decodes beyond `count` are undefined.
    """
    decode = rows is None
    folded = shape.groups * shape.rows
    f32 = jnp.float32
    if rows is None:
        q_spec = pl.BlockSpec((1, shape.heads, shape.groups, shape.head_dim), lambda h, i, *_: (i, h, 0, 0))
        row_specs, row_args, scratch = [], [], []
    else:
        width = shape.heads * shape.groups * shape.head_dim
        q_spec = pl.BlockSpec((shape.rows, width), lambda h, i, sc, *_: (sc[BLOCK, i], h))
        row_specs = [pl.BlockSpec((1, *rows.shape[1:]), lambda h, i, sc, *_: (sc[BLOCK, i], 0, 0))]
        row_args = [rows]
        scratch = [pltpu.VMEM((shape.heads, folded, shape.head_dim), q.dtype)]

    def table_spec(ahead: int) -> pl.BlockSpec:
        last = scalars.shape[1] - 1
        return pl.BlockSpec(
            (1, 1, table.shape[2]),
            lambda h, i, sc, *_: (sc[SEQ, jnp.minimum(i + ahead, last)], 0, 0),
            memory_space=pltpu.SMEM,
        )

    window_specs = []
    if visits is not None:
        window_specs = [
            pl.BlockSpec((1, 1, visits.visits.shape[2]), lambda h, i, *_: (i, 0, 0), memory_space=pltpu.SMEM),
            table_spec(0),
        ]
    prefetched = [scalars] if factors is None else [scalars, factors]
    return pl.pallas_call(
        lambda *refs: _query_tile(refs, shape, decode, factors is not None, scale * math.log2(math.e), window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(shape.head_blocks, count),
            in_specs=[
                q_spec,
                *row_specs,
                table_spec(0),
                table_spec(1),
                *window_specs,
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((shape.heads, folded, LANES), f32),
                pltpu.VMEM((shape.heads, folded, LANES), f32),
                pltpu.VMEM((shape.heads, folded, shape.head_dim), f32),
                pltpu.VMEM((shape.rows, shape.slots), f32),
                pltpu.VMEM((1, shape.slots), jnp.int32),
                pltpu.VMEM((2, shape.heads, shape.slots, shape.lanes), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((3,), jnp.int32),
                *scratch,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),  # type: ignore[no-untyped-call]
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="chunk_decode" if decode else "chunk_attention",
    )(*prefetched, q, *row_args, table, table, *(visits or ()), pool)


def _query_tile(refs: tuple[Any, ...], shape: Shape, decode: bool, weighs: bool, log2_scale: float, window: int | None) -> None:
    """Run one grid step.

    A weighed query tile walks the KV tiles of its chunk slots first. Their sums then become those of one slot, as in
    `chunkattn.backends.softmax.as_one_slot`, and the tiles with other slots follow.
    """
    sc, factors, refs = (refs[0], refs[1], refs[2:]) if weighs else (refs[0], None, refs[1:])
    q, refs = refs[0], refs[1:]
    rows: Any = None
    if not decode:
        rows, refs = refs[0], refs[1:]
    table, next_table, refs = refs[0], refs[1], refs[2:]
    visits: Any = None
    if window is not None:
        visits, shifts, refs = refs[0], refs[1], refs[2:]
    folded, refs = (q.at[0], refs) if decode else (refs[-1], refs[:-1])
    pool, out, *sums, bias, columns, kv, arrived, state = refs
    head_block, i = pl.program_id(0), pl.program_id(1)
    pages = Pages(pool, kv, arrived, state, head_block * shape.heads, shape)
    following = jnp.minimum(i + 1, sc.shape[1] - 1)

    def first_chunk_tile(tile: Any) -> Any:
        return lax.div(sc[CHUNK_BEGIN, tile], shape.slots)

    def chunk_tiles(tile: Any) -> Any:
        return lax.div(sc[CHUNK_END, tile] + shape.slots - 1, shape.slots) - first_chunk_tile(tile)

    def tiles_of(tile: Any) -> Any:
        count = sc[FIRST_END, tile] + sc[SECOND_END, tile] - sc[SECOND_START, tile]
        return count + chunk_tiles(tile) if weighs else count

    def first_kv_tile(tile: Any) -> Any:
        return kv_tile(tile, 0) if window is None else sc[FIRST_VISIT, tile] >> 1

    def kv_tile(tile: Any, step: Any) -> Any:
        if window is not None:
            return visits[0, 0, step] >> 1
        later = step - chunk_tiles(tile) if weighs else step
        other = jnp.where(later < sc[FIRST_END, tile], later, sc[SECOND_START, tile] + later - sc[FIRST_END, tile])
        return jnp.where(later < 0, first_chunk_tile(tile) + step, other) if weighs else other

    @pl.when(i == 0)
    def begin_walk() -> None:
        state[2] = 0

    buffer0, count, last = state[2], tiles_of(i), sc[LAST, i]
    started = (i > 0) & (tiles_of(jnp.maximum(i - 1, 0)) > 0)
    next_has_any = (i + 1 < pl.num_programs(1)) & (tiles_of(following) > 0)

    @pl.when((count > 0) & ~started)
    def send_for_first() -> None:
        pages.start(table, first_kv_tile(i), last, buffer0)

    for at_first, ref in zip((_LEAST, 0.0, 0.0), sums, strict=True):
        ref[...] = jnp.full_like(ref, at_first)
    if decode:
        row_slot, row_start = last, sc[MAX_START, i]
    else:
        _fold(q, folded, shape)
        by_row = jnp.transpose(rows[0])[: shape.rows]
        row_slot, row_start = by_row[:, 0:1], by_row[:, 1:2]

    def one_kv_tile(step: Any, _: Any) -> None:
        tile, buffer = kv_tile(i, step), (buffer0 + step) & 1

        @pl.when(step + 1 < count)
        def send_for_next() -> None:
            pages.start(table, kv_tile(i, step + 1), last, 1 - buffer)

        @pl.when((step + 1 == count) & next_has_any)
        def send_for_next_tile() -> None:
            pages.start(next_table, first_kv_tile(following), sc[LAST, following], 1 - buffer)

        pages.wait(tile, last, buffer)
        begin, end = tile * shape.slots, (tile + 1) * shape.slots
        whole = (pages.shortest(buffer) == shape.block_size) & (end <= sc[MIN_SLOT, i] + 1)
        whole &= (end <= sc[PREFIX_END, i]) | (begin >= sc[MAX_START, i])
        if window is not None:
            whole &= visits[0, 0, step] & 1 == 0
        factor: Any = log2_scale
        if factors is not None:
            of_chunks = step < chunk_tiles(i)
            first_chunk, after_chunks = sc[CHUNK_BEGIN, i], sc[CHUNK_END, i]
            within, without = (begin >= first_chunk) & (end <= after_chunks), (end <= first_chunk) | (begin >= after_chunks)
            whole &= (of_chunks & within) | (jnp.logical_not(of_chunks) & without)
            factor = jnp.where(of_chunks, factors[PER_TEMPERATURE, i] * log2_scale, log2_scale)

            @pl.when((step == chunk_tiles(i)) & (step > 0))
            def end_chunks() -> None:
                _as_one_slot(sums, factors[CHUNK_SCALE, i], shape)

        def accumulate(masked: bool) -> None:
            def some_heads(turn: Any, _: Any) -> None:
                heads = [turn * shape.together + head for head in range(shape.together)]
                _update(folded, kv.at[buffer], sums, bias if masked else None, heads, shape, factor)

            lax.fori_loop(0, shape.heads // shape.together, some_heads, None)

        @pl.when(whole)
        def all_seen() -> None:
            accumulate(masked=False)

        @pl.when(jnp.logical_not(whole))
        def some_seen() -> None:
            columns[...] = begin + lax.broadcasted_iota(jnp.int32, columns.shape, 1)

            @pl.when((pages.shortest(buffer) < shape.block_size) | (end > last + 1))
            def some_unwritten() -> None:
                pages.clean(table, tile, last, buffer, columns)

            slot = columns[...]
            seen = (slot <= row_slot) & ((slot < sc[PREFIX_END, i]) | (slot >= row_start))
            if window is not None:
                row_position = sc[POSITION, i] if decode else by_row[:, 2:3]
                seen &= _positions(shifts, tile, shape) > row_position - window
            if weighs:
                seen &= (slot >= jnp.where(of_chunks, first_chunk, 0)) & (slot < jnp.where(of_chunks, after_chunks, _FAR))
                seen &= (slot < jnp.where(of_chunks, _FAR, first_chunk)) | (slot >= jnp.where(of_chunks, _FAR, after_chunks))
            bias[...] = jnp.where(seen, 0.0, _MASKED)
            accumulate(masked=True)

    lax.fori_loop(0, count, one_kv_tile, None)
    state[2] = (buffer0 + count) & 1

    def result(head: int) -> jax.Array:
        _, total, values = sums
        return values[head] / jnp.maximum(jnp.sum(total[head], axis=1, keepdims=True), np.finfo(np.float32).tiny)

    if decode:
        for head in range(shape.heads):
            out[0, head] = result(head).astype(out.dtype)
    else:
        first = (i == 0) | (sc[BLOCK, jnp.maximum(i - 1, 0)] != sc[BLOCK, i])
        row = lax.broadcasted_iota(jnp.int32, (shape.rows, shape.head_dim), 0)
        own_row, earlier = (row >= sc[LOW, i]) & (row < sc[HIGH, i]), jnp.logical_not(first)
        for head in range(shape.heads):
            attended = result(head)
            for group in range(shape.groups):
                lanes = pl.ds((head * shape.groups + group) * shape.head_dim, shape.head_dim)
                old = jnp.where(earlier, out[:, lanes].astype(jnp.float32), 0.0)
                new = attended[group * shape.rows : (group + 1) * shape.rows]
                out[:, lanes] = jnp.where(own_row, new, old).astype(out.dtype)


def _positions(shifts: Any, tile: Any, shape: Shape) -> jax.Array:
    """Return the positions of a KV tile's slots, int32 `[1, slots]`."""
    lane = lax.broadcasted_iota(jnp.int32, (1, shape.slots), 1)

    def one_page(place: Any, positions: jax.Array) -> jax.Array:
        shift = shifts[0, 0, jnp.minimum(tile * shape.pages + place, shifts.shape[2] - 1)]
        own = (lane >= place * shape.block_size) & (lane < (place + 1) * shape.block_size)
        return jnp.where(own, positions + shift, positions)

    return lax.fori_loop(0, shape.pages, one_page, lane + tile * shape.slots)


def _fold(q: Any, folded: Any, shape: Shape) -> None:
    """Copy `[rows, heads * groups * head_dim]` to `[heads, groups * rows, head_dim]` in whole registers."""
    for head in range(shape.heads):
        for group in range(shape.groups):
            lanes = pl.ds((head * shape.groups + group) * shape.head_dim, shape.head_dim)
            folded[head, pl.ds(group * shape.rows, shape.rows), :] = q[:, lanes]


def _as_one_slot(sums: list[Any], scale: Any, shape: Shape) -> None:
    """Turn the sums over chunk slots, of which every row has seen one, into the sums over one slot with their values.

    The score of this slot is `scale` times the log-sum-exp of the chunk slots, in exponents of 2.
    """
    maximum, total, values = sums

    def one_head(head: Any, _: Any) -> None:
        seen = jnp.sum(total[head], axis=1, keepdims=True)
        maximum[head] = (maximum[head] + jnp.log2(seen)) * scale
        total[head] = jnp.full_like(total[head], 1 / LANES)
        values[head] = values[head] / seen

    lax.fori_loop(0, shape.heads, one_head, None)


def _update(folded: Any, kv: Any, sums: list[Any], bias: Any | None, heads: list[Any], shape: Shape, log2_scale: Any) -> None:
    """Take one online-softmax step of some KV heads.

    The code runs stage by stage over the heads, because the compiler overlaps operations that are written side by side. Every
    lane holds the maximum; the sum is kept by lane and added up once, at the end. Products times
    `log2_scale` are exponents of 2.
    """
    maximum, total, values = sums
    precision = lax.Precision.HIGHEST if folded.dtype == jnp.float32 else None

    def multiply(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
        dimensions = (((1,), (contracted,)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    def score(head: Any) -> jax.Array:
        scores = multiply(folded[head], kv[head, :, : shape.head_dim].astype(folded.dtype), 1) * log2_scale
        if bias is None:
            return scores
        by_group = scores.reshape(shape.groups, shape.rows, shape.slots) + bias[...][None]
        return by_group.reshape(scores.shape)

    def weigh(head: Any, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        old = maximum[head]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        decay = jnp.exp2(old - new)
        blocks = [jnp.exp2(scores[:, at : at + LANES] - new) for at in range(0, shape.slots, LANES)]
        maximum[head] = new
        total[head] = total[head] * decay + sum(blocks[1:], blocks[0])
        return jnp.concatenate(blocks, axis=1).astype(folded.dtype), decay

    scores = [score(head) for head in heads]
    weighed = [weigh(head, of_head) for head, of_head in zip(heads, scores, strict=True)]
    for head, (weights, decay) in zip(heads, weighed, strict=True):
        added = multiply(weights, kv[head, :, shape.lanes - shape.head_dim :].astype(folded.dtype), 0)
        values[head] = values[head] * jnp.concatenate([decay] * (shape.head_dim // LANES), axis=1) + added
