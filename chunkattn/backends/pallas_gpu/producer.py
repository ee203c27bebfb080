"""The producer warpgroup: copies pages to shared memory, converts FP8, and clears V where no row sees it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from chunkattn.backends.pallas_gpu.products import ROWS, commit, load
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.backends.pallas_gpu.walk import (
    HIGH,
    LOW,
    POSITION,
    PREFIX_END,
    Gmem,
    Smem,
    Walk,
    each_item,
    entry,
    offset,
    page,
    positions,
    present,
)

_LANES = 64
_L, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def produce(gmem: Gmem, smem: Smem, shape: Shape, heads: int) -> None:
    """Run the producer of a block of threads."""
    act = _convert_item if shape.fp8_stages else _copy_item
    total = each_item(gmem, shape, heads, lambda *at: act(gmem, smem, shape, *at))

    # The last tiles are awaited, too: a block of threads must not end while barriers are in use.
    @pl.loop(jnp.maximum(total - shape.stages, 0), total)
    def drain(turn: Any) -> None:
        plgpu.barrier_wait(smem.keys_free.at[shape.place(turn)])
        plgpu.barrier_wait(smem.values_free.at[shape.place(turn)])


def _copy_item(gmem: Gmem, smem: Smem, shape: Shape, head: Any, item: Any, turn: Any) -> None:
    """Copy the KV tiles of one work item.

    V of a tile that is not whole is cleaned one step later, after the copies of the next tile have started.
    """
    walk = Walk(gmem, item, shape)

    def send(step: Any, place: Any, tile: Any, whole: Any) -> None:
        pages = [page(entry(gmem, walk.seq, tile, box, shape)) for box in range(shape.boxes)]

        def copy(pool: Any, ring: Any, arrived: Any) -> None:
            for box, number in enumerate(pages):
                _copy(pool.at[number, head], tile, ring.at[place], box, arrived.at[place], shape)

        wait_until_free(smem.keys_free.at[place], turn + step, shape)
        copy(gmem.keys, smem.keys, smem.keys_here)
        wait_until_free(smem.values_free.at[place], turn + step, shape)
        pl.when(whole)(lambda: copy(gmem.values, smem.values, smem.values_here))
        pl.when(jnp.logical_not(whole))(lambda: copy(gmem.values, smem.values, smem.values_raw))

    def one_step(step: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        place, before, unclean = carry
        number = jnp.minimum(step, walk.count - 1)
        tile = walk.tile(number)
        whole = walk.whole(tile, number)
        pl.when(step < walk.count)(lambda: send(step, place, tile, whole))

        @pl.when(unclean == 1)
        def clean() -> None:
            _clean(gmem, smem, shape, walk, item, walk.tile(step - 1), before)

        return shape.after(place), place, jnp.where(whole, 0, 1)

    @pl.when(walk.count > 0)
    def some() -> None:
        first = shape.place(turn)
        lax.fori_loop(0, walk.count + 1, one_step, (first, first, jnp.int32(0)))


def _convert_item(gmem: Gmem, smem: Smem, shape: Shape, head: Any, item: Any, turn: Any) -> None:
    """Copy the FP8 tiles of one work item to a ring of their own, and convert them to the ring that the consumers read.

    Copies are ahead of conversions by all places of their ring but one.
    """
    walk, ahead = Walk(gmem, item, shape), shape.fp8_stages - 1

    def fp8_places(step: Any) -> tuple[Any, Any]:
        ring, barriers = jnp.int32(shape.fp8_stages), jnp.int32(shape.fp8_barriers)
        return lax.rem(turn + step, ring), lax.rem(turn + step, barriers)

    def send(step: Any) -> None:
        (place, raw), tile = fp8_places(step), walk.tile(step)
        for box in range(shape.boxes):
            number = page(entry(gmem, walk.seq, tile, box, shape))
            _copy(gmem.keys.at[number, head], tile, smem.fp8_keys.at[place], box, smem.keys_raw.at[raw], shape)
            _copy(gmem.values.at[number, head], tile, smem.fp8_values.at[place], box, smem.values_raw.at[raw], shape)

    def convert(step: Any) -> None:
        (source, raw), place, tile = fp8_places(step), shape.place(turn + step), walk.tile(step)
        plgpu.barrier_wait(smem.keys_raw.at[raw])
        wait_until_free(smem.keys_free.at[place], turn + step, shape)
        for begin in range(0, shape.slots, ROWS):
            _convert(smem.fp8_keys, smem.keys, source, place, begin)
        commit()
        plgpu.barrier_arrive(smem.keys_here.at[place])
        plgpu.barrier_wait(smem.values_raw.at[raw])
        wait_until_free(smem.values_free.at[place], turn + step, shape)
        for begin in range(0, shape.slots, ROWS):
            _convert(smem.fp8_values, smem.values, source, place, begin, _seen(gmem, walk, item, tile, begin, shape))
        commit()
        plgpu.barrier_arrive(smem.values_here.at[place])

    @pl.loop(0, walk.count + ahead)
    def one_step(step: Any) -> None:
        pl.when(step < walk.count)(lambda: send(step))
        pl.when(step >= ahead)(lambda: convert(step - ahead))


def _copy(source: Any, tile: Any, to: Any, box: int, arrived: Any, shape: Shape) -> None:
    """Copy the box of a KV tile that lies in a page to shared memory, and arrive at a barrier."""
    if shape.block_size > shape.slots:
        source = source.at[pl.ds(pl.multiple_of(offset(tile, shape), shape.slots), shape.slots)]
    plgpu.copy_gmem_to_smem(source, to.at[pl.ds(box * shape.box, shape.box)], arrived)


def wait_until_free(free: Any, turn: Any, shape: Shape) -> None:
    """Wait until the consumers have read the KV tile that was last copied to a place of the ring."""

    @pl.when(turn >= shape.stages)
    def wait() -> None:
        plgpu.barrier_wait(free)


def _clean(gmem: Gmem, smem: Smem, shape: Shape, walk: Walk, item: Any, tile: Any, place: Any) -> None:
    """Set V to zero in the slots of a KV tile that no row sees.

    Such slots may hold NaN, and zero weight times NaN is NaN.
    """
    plgpu.barrier_wait(smem.values_raw.at[place])
    for begin in range(0, shape.slots, ROWS):
        seen = _seen(gmem, walk, item, tile, begin, shape)
        for lane in range(0, shape.head_dim, _LANES):
            at = (place, pl.ds(begin, ROWS), pl.ds(lane, _LANES))
            smem.values[at] = _zero_unless(seen, load(smem.values, at, _L))
    commit()
    for _ in range(shape.boxes):
        plgpu.barrier_arrive(smem.values_here.at[place])


def _convert(ring: Any, to: Any, source: Any, place: Any, begin: int, seen: Any = None) -> None:
    """Convert 64 slots of an FP8 tile to the dtype of another ring; set those to zero that are not seen.

    Args:
        ring: ring of FP8 tiles.
        to: ring of converted tiles.
        source: place in `ring`.
        place: place in `to`.
        begin: first slot of the tile.
        seen: slots that some row sees; None for all.
    """
    for lane in range(0, ring.shape[-1], _LANES):
        rows, lanes = pl.ds(begin, ROWS), pl.ds(lane, _LANES)
        values = load(ring, (source, rows, lanes), _L).astype(jnp.float16)
        if to.dtype != jnp.float16:
            values = values.astype(jnp.float32).astype(to.dtype)  # Hopper converts FP8 to float16 alone
        to[place, rows, lanes] = values if seen is None else _zero_unless(seen, values)


def _seen(gmem: Gmem, walk: Walk, item: Any, tile: Any, begin: int, shape: Shape) -> Bool[Array, " slots"]:
    """Return which of 64 slots of a KV tile some row of an item may see."""
    low, high, prefix_end = (gmem.items[item, field] for field in (LOW, HIGH, PREFIX_END))
    column = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), _ROW) + begin
    slot = column + tile * shape.slots
    seen = (column < present(gmem, walk.seq, tile, column, begin, shape)) & (slot <= high)
    seen &= (slot < prefix_end) | (slot >= low)
    if shape.window is not None:
        seen &= positions(gmem, walk.seq, tile, column, begin, shape) > gmem.items[item, POSITION] - shape.window
    return seen


def _zero_unless(seen: Bool[Array, " slots"], values: Float[Array, "slots lanes"]) -> Float[Array, "slots lanes"]:
    return jnp.where(lax.broadcast_in_dim(seen, values.shape, [0]), values, jnp.zeros((), values.dtype))
