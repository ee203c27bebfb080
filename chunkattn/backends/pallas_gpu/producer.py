"""The producer warpgroup: copies pages to shared memory and clears V where no row sees it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from chunkattn.backends.pallas_gpu.products import ROWS, load
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.backends.pallas_gpu.walk import (
    HIGH,
    LOW,
    PREFIX_END,
    Gmem,
    Smem,
    Walk,
    each_item,
    entry,
    offset,
    page,
    present,
)

_LANES = 64
_L, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def produce(gmem: Gmem, smem: Smem, shape: Shape, heads: int) -> None:
    """Run the producer of a block of threads."""
    total = each_item(gmem, shape, heads, lambda *at: _copy_item(gmem, smem, shape, *at))

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
                source = pool.at[number, head]
                if shape.block_size > shape.slots:
                    source = source.at[pl.ds(pl.multiple_of(offset(tile, shape), shape.slots), shape.slots)]
                plgpu.copy_gmem_to_smem(source, ring.at[place, pl.ds(box * shape.box, shape.box)], arrived.at[place])

        wait_until_free(smem.keys_free.at[place], turn + step, shape)
        copy(gmem.keys, smem.keys, smem.keys_here)
        wait_until_free(smem.values_free.at[place], turn + step, shape)
        pl.when(whole)(lambda: copy(gmem.values, smem.values, smem.values_here))
        pl.when(jnp.logical_not(whole))(lambda: copy(gmem.values, smem.values, smem.values_raw))

    def one_step(step: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        place, before, unclean = carry
        tile = walk.tile(jnp.minimum(step, walk.count - 1))
        whole = walk.whole(tile)
        pl.when(step < walk.count)(lambda: send(step, place, tile, whole))

        @pl.when(unclean == 1)
        def clean() -> None:
            _clean(gmem, smem, shape, walk, item, walk.tile(step - 1), before)

        return shape.after(place), place, jnp.where(whole, 0, 1)

    @pl.when(walk.count > 0)
    def some() -> None:
        first = shape.place(turn)
        lax.fori_loop(0, walk.count + 1, one_step, (first, first, jnp.int32(0)))


def wait_until_free(free: Any, turn: Any, shape: Shape) -> None:
    """Wait until the consumers have read the KV tile that was last copied to a place of the ring."""

    @pl.when(turn >= shape.stages)
    def wait() -> None:
        plgpu.barrier_wait(free)


def _clean(gmem: Gmem, smem: Smem, shape: Shape, walk: Walk, item: Any, tile: Any, place: Any) -> None:
    """Set V to zero in the slots of a KV tile that no row sees.

    Such slots may hold NaN, and zero weight times NaN is NaN.
    """
    low, high, prefix_end = (gmem.items[item, field] for field in (LOW, HIGH, PREFIX_END))
    plgpu.barrier_wait(smem.values_raw.at[place])
    for begin in range(0, shape.slots, ROWS):
        column = plgpu.layout_cast(lax.iota(jnp.int32, ROWS), _ROW) + begin
        slot = column + tile * shape.slots
        kept = (column < present(gmem, walk.seq, tile, column, begin, shape)) & (slot <= high)
        kept &= (slot < prefix_end) | (slot >= low)
        for lane in range(0, shape.head_dim, _LANES):
            at = (place, pl.ds(begin, ROWS), pl.ds(lane, _LANES))
            old = load(smem.values, at, _L)
            smem.values[at] = jnp.where(lax.broadcast_in_dim(kept, old.shape, [0]), old, jnp.zeros((), old.dtype))
    plgpu.commit_smem()  # type: ignore[no-untyped-call]
    for _ in range(shape.boxes):
        plgpu.barrier_arrive(smem.values_here.at[place])
