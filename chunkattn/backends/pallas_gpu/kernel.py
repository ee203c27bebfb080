"""The attention kernel for Hopper: work items walk their KV tiles, with page copies ahead of the products.

A work item is a block of queries of one sequence and KV head, and two ranges of KV tiles that some of its rows see
(`chunkattn.backends.tiles`). One producer warpgroup copies the pages of the KV tiles to a ring in shared memory by TMA, one
copy a page. One or two consumer warpgroups of 64 rows (tokens times query heads of the KV head) multiply. Tiles of which
every row sees every slot need no mask; most tiles of a long prompt are of this kind.

Items either end in attention outputs, one block of threads an item, or in softmax states (`Shape.states`), which `combine`
merges. In the second form a fixed number of blocks takes all items in turn.

Source: FlashAttention-3, arXiv:2407.08608, as in JAX's `attention_mgpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from chunkattn.backends.pallas_gpu import products
from chunkattn.backends.pallas_gpu.producer import produce
from chunkattn.backends.pallas_gpu.products import ROWS, commit
from chunkattn.backends.pallas_gpu.shape import UNIT, Shape
from chunkattn.backends.pallas_gpu.walk import (
    FAR,
    HIGH,
    LOW,
    OUT,
    POSITION,
    PREFIX_END,
    QUERY,
    SIZE,
    START,
    Gmem,
    Smem,
    Walk,
    each_item,
    positions,
    present,
)
from chunkattn.backends.softmax import barrier

LEAST = -1e30
"""Start of the running maximum: finite, so that a row that has seen no slot yet stays finite."""
_TINY = 1e-30

_L, _ROW, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class States(NamedTuple):
    """Softmax states of work items: values not yet divided by the sum, running maximum in exponents of 2, running sum."""

    values: Float32[Array, "Hkv I rows D"]
    maximum: Float32[Array, "Hkv I rows"]
    total: Float32[Array, "Hkv I rows"]


@partial(jax.jit, static_argnames=("shape", "scale", "interpret"))  # layers share one kernel, compiled once
def attend(
    items: Int32[Array, "I fields"],
    num_items: Int32[Array, " 1"] | None,
    factors: Float32[Array, " I"] | None,
    rows: Int32[Array, "E fields warpgroups 64"] | None,
    visits: Int32[Array, "E N"] | None,
    table: Int32[Array, "S W"],
    shifts: Int32[Array, "S W"] | None,
    holes: Int32[Array, "S tiles"],
    q: Float[Array, "Hkv rows D"],
    keys: Float[Array, "P Hkv block_size D"],
    values: Float[Array, "P Hkv block_size D"],
    shape: Shape,
    *,
    scale: float,
    interpret: Any,
) -> Float[Array, "Hkv rows D"] | States:
    """Compute attention of work items over pages already written.

    Args:
        items: work items, see `walk`.
        num_items: number of items in use, for `shape.states`; otherwise None.
        factors: further factor of each item's scores; None is 1.
        rows: last slot, first slot beyond the prefix and, for windows, position of each row of a block of queries; None takes
            the item's `HIGH`, `LOW` and `POSITION`. Items that end in states see no more than `HIGH` and `LOW` let them.
        visits: KV tiles that each block of queries visits, for windows; otherwise None.
        table: page-table entries, see `walk.LENGTH_SHIFT`.
        shifts: position minus slot of every page, for windows; otherwise None.
        holes: whether a page of a KV tile is not full.
        q: queries of folded rows, see `plan.Layout`.
        keys: pages of K.
        values: pages of V.
        shape: sizes.
        scale: factor of the scores.
        interpret: argument of `plgpu.kernel`.

    Returns:
        Outputs by folded row, or states by item. Rows of no item and items from `num_items` on are undefined.
    """
    given = {"num_items": num_items, "factors": factors, "rows": rows, "visits": visits, "shifts": shifts}
    optional = {name: x for name, x in given.items() if x is not None}
    heads, number = keys.shape[1], len(items)
    grid: dict[str, Any]
    if shape.states:
        states = (heads, number, shape.rows)
        out_type = [_array((*states, shape.head_dim), jnp.float32), *2 * [_array(states, jnp.float32)]]
        grid = {"grid": (min(shape.blocks, heads * number),), "grid_names": ("block",)}
    else:
        out_type = [_array(q.shape, q.dtype)]
        grid = {"grid": (heads, number), "grid_names": ("head", "item")}
    log2_scale = max(scale * math.log2(math.e), _TINY)  # a masked score times zero would be NaN

    def entry(*refs: Any) -> None:
        named = dict(zip(("items", "table", "holes", "q", "keys", "values", *optional), refs))
        gmem = Gmem(**named, out=refs[len(named) :])
        pl.run_scoped(
            lambda *scratch: _run(gmem, Smem(*scratch), shape, heads, log2_scale, interpret is not False),
            *shape.scratch(q.dtype),
            collective_axes="warpgroup",
        )

    results = plgpu.kernel(
        entry,
        out_type=out_type,
        **grid,
        num_threads=shape.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(items, table, holes, q, keys, values, *optional.values())
    return States(*results) if shape.states else results[0]


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _run(gmem: Gmem, smem: Smem, shape: Shape, heads: int, log2_scale: float, twin: bool) -> None:
    """Run one warpgroup of a block of threads."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < shape.warpgroups)
    def consumer() -> None:
        if shape.warpgroups == 2:  # one consumer and the producer share 256 registers a thread as they are
            plgpu.set_max_registers(shape.consumer_registers, action="increase")
        each_item(gmem, shape, heads, lambda *at: _consume(gmem, smem, shape, log2_scale, warpgroup, twin, *at))

    @pl.when(warpgroup == shape.warpgroups)
    def producer() -> None:
        if shape.warpgroups == 2:
            plgpu.set_max_registers(shape.producer_registers, action="decrease")
        produce(gmem, smem, shape, heads)


def _consume(
    gmem: Gmem, smem: Smem, shape: Shape, log2_scale: float, warpgroup: Any, twin: bool, head: Any, item: Any, turn: Any
) -> None:
    """Compute one work item's rows of a consumer warpgroup.

    With two consumers, one computes its softmax while the other multiplies: both pass `smem.order` before and after their
    products, the second one half a step behind.
    """
    walk = Walk(gmem, item, shape)
    q, count = smem.q.at[warpgroup], walk.count
    alternate = shape.warpgroups == 2

    def pass_on() -> None:
        if alternate:
            plgpu.barrier_arrive(smem.order)
            plgpu.barrier_wait(smem.order)

    def wait_for_keys(step: Any, place: Any) -> None:
        @pl.when(step < count)
        def wait() -> None:
            plgpu.barrier_wait(smem.keys_here.at[place])

    part = q.at[pl.ds(0, min(shape.rows, ROWS))]
    source = gmem.q.at[head, pl.ds(_first_row(gmem, item, warpgroup, shape), part.shape[0])]
    plgpu.copy_gmem_to_smem(source, part, smem.q_here.at[warpgroup])
    factor = log2_scale if gmem.factors is None else gmem.factors[item] * log2_scale
    plgpu.barrier_wait(smem.q_here.at[warpgroup])
    first = shape.place(turn)
    wait_for_keys(0, first)
    if alternate:
        pl.when(warpgroup == 1)(pass_on)

    def one_tile(step: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        accumulated, maximum, total, place = carry
        tile, following = walk.tile(step), shape.after(place)
        whole = walk.whole(tile, step)
        scores = multiply_keys(q, smem.keys.at[place], smem.keys_free.at[place], pass_on, twin=twin)
        scores = lax.cond(whole, lambda s: s, lambda s: _masked(s, gmem, walk, tile, item, warpgroup, shape), scores)
        highest = jnp.maximum(maximum, scores.max(axis=1) * factor)
        decay = jnp.exp2(maximum - highest)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(highest, scores.shape, [0]))
        accumulated *= lax.broadcast_in_dim(decay, accumulated.shape, [0])
        total *= decay
        rounded = weights.astype(q.dtype)
        if shape.head_dim <= 128:
            total += weights.sum(axis=1)
            accumulated, total, highest, rounded = barrier((accumulated, total, highest, rounded))
        if alternate:
            plgpu.barrier_arrive(smem.order)
        wait_for_values(smem.values_here.at[place])
        if alternate:
            plgpu.barrier_wait(smem.order)
        if shape.head_dim > 128:
            total += weights.sum(axis=1)
        accumulated = products.add_values(
            accumulated, rounded, smem.values.at[place], lambda: wait_for_keys(step + 1, following), twin=twin
        )
        plgpu.barrier_arrive(smem.values_free.at[place])
        return accumulated, highest, total, following

    start = (
        plgpu.layout_cast(jnp.zeros((ROWS, shape.head_dim), jnp.float32), _L),
        plgpu.layout_cast(jnp.full((ROWS,), LEAST, jnp.float32), _ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
        first,
    )
    accumulated, maximum, total, _ = lax.fori_loop(0, count, one_tile, start)
    if alternate:
        pl.when(warpgroup == 0)(pass_on)
    if shape.states:
        _store_states(gmem, smem, shape, head, item, accumulated, maximum, total)
    else:
        accumulated /= lax.broadcast_in_dim(jnp.maximum(total, _TINY), accumulated.shape, [0])
        q[...] = accumulated.astype(q.dtype)
        commit()
        _copy_outputs(gmem, q, shape, head, item, warpgroup)
    wait_for_copies()


def _first_row(gmem: Gmem, item: Any, warpgroup: Any, shape: Shape) -> Any:
    """Return the first folded row of a warpgroup, which fills whole units unless it is the last."""
    return pl.multiple_of(gmem.items[item, START] + warpgroup * (shape.units(shape.tokens) * UNIT), UNIT)


def _copy_outputs(gmem: Gmem, outputs: Any, shape: Shape, head: Any, item: Any, warpgroup: Any) -> None:
    """Copy the outputs of a warpgroup's rows to GMEM: all at once, or as many units as there are."""
    place = _first_row(gmem, item, warpgroup, shape)
    number = shape.units(jnp.clip(gmem.items[item, SIZE] - warpgroup * shape.tokens, 0, shape.tokens))

    @pl.when(number == ROWS // UNIT)
    def whole() -> None:
        plgpu.copy_smem_to_gmem(outputs, gmem.out[0].at[head, pl.ds(place, ROWS)])

    @pl.when(number < ROWS // UNIT)
    def by_unit() -> None:
        @pl.loop(0, number)
        def copy(unit: Any) -> None:
            row = unit * UNIT
            source = outputs.at[pl.ds(pl.multiple_of(row, UNIT), UNIT)]
            plgpu.copy_smem_to_gmem(source, gmem.out[0].at[head, pl.ds(pl.multiple_of(place + row, UNIT), UNIT)])


def _store_states(
    gmem: Gmem, smem: Smem, shape: Shape, head: Any, item: Any, accumulated: Any, maximum: Any, total: Any
) -> None:
    """Copy the states of an item's rows to GMEM, `Shape.state_lanes` lanes of the values at a time."""
    rows, place = pl.ds(0, shape.rows), gmem.items[item, OUT]
    values, *sums = smem.sums
    lanes = shape.state_lanes
    for lane in range(0, shape.head_dim, lanes):
        values[...] = accumulated[:, lane : lane + lanes]
        if lane == 0:
            for ref, result in zip(sums, (maximum, total)):
                ref[...] = result
        commit()
        plgpu.copy_smem_to_gmem(values.at[rows], gmem.out[0].at[head, place, :, pl.ds(lane, lanes)])
        if lane == 0:
            for ref, out in zip(sums, gmem.out[1:]):
                plgpu.copy_smem_to_gmem(ref.at[rows], out.at[head, place])
        if lane + lanes < shape.head_dim:
            wait_for_copies()


def wait_for_copies() -> None:
    """Wait until results have left shared memory, which the next ones overwrite."""
    plgpu.wait_smem_to_gmem(0)


def multiply_keys(q: Any, keys: Any, free: Any, then: Callable[[], None], *, twin: bool) -> Float32[Array, "64 slots"]:
    """Return the scores of one KV tile, and free its keys."""
    scores = products.scores(q, keys, then, twin=twin)
    plgpu.barrier_arrive(free)
    return scores


def wait_for_values(here: Any) -> None:
    """Wait until the values of a KV tile have arrived, free of NaN in slots that no row sees."""
    plgpu.barrier_wait(here)


def visible(slot: Any, last: Any, start: Any, prefix_end: Any) -> Any:
    """Return which slots a row sees, see `base.AttentionBatch`."""
    return (slot <= last) & ((slot < prefix_end) | (slot >= start))


def _masked(
    scores: Float32[Array, "64 slots"], gmem: Gmem, walk: Walk, tile: Any, item: Any, warpgroup: Any, shape: Shape
) -> Float32[Array, "64 slots"]:
    """Return the scores with those of invisible slots set to minus infinity."""
    column = plgpu.layout_cast(lax.iota(jnp.int32, shape.slots), _COLUMN)
    slot = jnp.where(column < present(gmem, walk.seq, tile, column, 0, shape), column + tile * shape.slots, FAR)
    slot = lax.broadcast_in_dim(slot, scores.shape, [1])
    last, start = gmem.items[item, HIGH], gmem.items[item, LOW]
    own: Any = 0 if shape.window is None else gmem.items[item, POSITION]
    if gmem.rows is not None:  # the bounds are read again, so they hold no registers over the loop
        block = gmem.items[item, QUERY] if shape.states else item
        by_row = [products.load(gmem.rows, (block, field, warpgroup), _ROW) for field in range(2)]
        if shape.states:
            by_row = [jnp.minimum(by_row[0], last), jnp.maximum(by_row[1], start)]
        last, start = (lax.broadcast_in_dim(x, scores.shape, [0]) for x in by_row)
        if shape.window is not None:
            own = lax.broadcast_in_dim(products.load(gmem.rows, (block, 2, warpgroup), _ROW), scores.shape, [0])
    seen = visible(slot, last, start, gmem.items[item, PREFIX_END])
    if shape.window is not None:
        position = lax.broadcast_in_dim(positions(gmem, walk.seq, tile, column, 0, shape), scores.shape, [1])
        seen &= position > own - shape.window
    return jnp.where(seen, scores, -jnp.inf)
