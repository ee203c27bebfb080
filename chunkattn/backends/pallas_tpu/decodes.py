"""Runs of decodes on a TPU: what a later decode of every row reads and writes, computed on the chip.

Decode `i` is row `i`. All of a run's pages are in the page table from its beginning, so a row's slot gives all the rest.

Axes that `base` does not define: `E` decodes, `N` KV tiles of a page table.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from chunkattn.backends.base import AttentionBatch, StepArray
from chunkattn.backends.pallas_tpu import kernel
from chunkattn.backends.pallas_tpu.pages import LENGTH_BITS
from chunkattn.backends.pallas_tpu.plan import factors_of, pad, scalars_of
from chunkattn.backends.pallas_tpu.write import DEPTH, GROUP
from chunkattn.backends.tiles import Tiles

_NO_TILE = np.iinfo(np.int32).max


class Decodes(NamedTuple):
    """The first step of a run of decodes.

    Attributes:
        scalars: scalars of the decodes, see `kernel.SCALARS`.
        count: decodes in use.
        table: see `PallasMetadata`.
        factors: factors of the decodes, see `kernel.FACTORS`; None weighs no chunks anew.
        shifts: position minus slot of every page; None without windows.
    """

    scalars: Int32[StepArray, "scalars E"]
    count: Int32[StepArray, ""]
    table: Int32[StepArray, "S 1 W"]
    factors: Float32[StepArray, "2 E"] | None
    shifts: Int32[StepArray, "S 1 W"] | None


class WindowDecodes(NamedTuple):
    """Decodes of layers with one sliding window.

    Attributes:
        scalars: scalars of the decodes, see `kernel.WINDOW`.
        visits: see `kernel.Window`.
    """

    scalars: Int32[Array, "scalars E"]
    visits: Int32[Array, "E 1 N"]


def first_decodes(batch: AttentionBatch, table: np.ndarray, shifts: np.ndarray | None, tile_slots: int) -> Decodes:
    """Return the first step of a run, on the host.

    Args:
        batch: the step, see `AttentionBackend.build_decodes`.
        table: see `PallasMetadata`.
        shifts: see `PallasMetadata`.
        tile_slots: slots of a KV tile.
    """
    rows = np.arange(batch.num_rows, dtype=np.int32)
    scalars = scalars_of(batch, batch.row_weighing(), Tiles(rows, np.ones_like(rows)), tile_slots, len(batch.row_seq))
    scalars = pad(scalars, min(len(batch.row_seq), len(batch.prefix_end)))
    return Decodes(scalars, np.int32(batch.num_rows), table, factors_of(batch, scalars), shifts)


def move(
    scalars: Int32[Array, "scalars E"], steps: Int32[Array, " E"], used: Bool[Array, " E"], tile_slots: int
) -> Int32[Array, "scalars E"]:
    """Return the scalars of decodes `steps` slots later."""
    last = scalars[kernel.LAST] + steps
    second_end = jnp.where(used, last // tile_slots + 1, 0)
    return scalars.at[kernel.SECOND_END].set(second_end).at[kernel.MIN_SLOT].set(last).at[kernel.LAST].set(last)


def plan_decode_writes(
    last: Int32[Array, " E"], table: Int32[Array, "S 1 W"], count: Int32[Array, ""], block_size: int, size: int, blocks: int
) -> tuple[Int32[Array, "blocks 6 size"], Int32[Array, " blocks"]]:
    """Return the pieces of decodes, as `write.plan_writes`: one each, since no two decodes write to one page.

    Args:
        last: slot of each decode.
        table: see `PallasMetadata`.
        count: decodes in use.
        block_size: slots per page.
        size: rows of a block.
        blocks: blocks of the step's rows.
    """
    page = jnp.take_along_axis(table[: len(last), 0], (last // block_size)[:, None], axis=1)[:, 0] >> LENGTH_BITS
    flat = page * block_size + last % block_size
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (blocks, size))
    one = jnp.ones_like(place)
    dest, offset = (jnp.pad(x, (0, blocks * size - len(last))).reshape(blocks, size) for x in (flat // GROUP, flat % GROUP))
    pieces = jnp.stack([dest, place, offset, one, place % DEPTH, one], axis=1)  # in the order of write.plan_writes' fields
    return pieces, jnp.clip(count - jnp.arange(blocks, dtype=jnp.int32) * size, 0, size)


def window_decodes(
    scalars: Int32[Array, "scalars E"],
    table: Int32[Array, "S 1 W"],
    shifts: Int32[Array, "S 1 W"],
    window: int,
    block_size: int,
    tile_slots: int,
) -> WindowDecodes:
    """Return the decodes of layers with a sliding window, as `plan.window_walk`.

    Args:
        scalars: scalars of the decodes in full attention.
        table: see `PallasMetadata`.
        shifts: see `PallasMetadata`.
        window: window in positions.
        block_size: slots per page.
        tile_slots: slots of a KV tile.
    """
    last, decodes, width = scalars[kernel.LAST], scalars.shape[1], table.shape[2]
    lengths, shifts = (x[:decodes, 0] for x in (table & ((1 << LENGTH_BITS) - 1), shifts))
    position = last + jnp.take_along_axis(shifts, (last // block_size)[:, None], axis=1)[:, 0]
    slot = jnp.arange(width, dtype=jnp.int32) * block_size
    tokens = jnp.minimum(lengths, last[:, None] + 1 - slot)
    first, unseen = shifts + slot, (position - window)[:, None]  # last position before the window
    seen, cut = ((tokens > 0) & x for x in (first + tokens - 1 > unseen, first <= unseen))
    per_tile = tile_slots // block_size
    seen, cut = (jnp.pad(x, ((0, 0), (0, -width % per_tile))).reshape(decodes, -1, per_tile).any(axis=2) for x in (seen, cut))
    tile = jnp.arange(seen.shape[1], dtype=jnp.int32)
    listed = jnp.sort(jnp.where(seen, tile << 1 | cut, _NO_TILE), axis=1)
    listed = jnp.where(listed == _NO_TILE, 0, listed)
    nothing = jnp.zeros_like(last)
    moved = scalars.at[kernel.FIRST_END].set(nothing).at[kernel.SECOND_START].set(nothing)
    moved = moved.at[kernel.SECOND_END].set(seen.sum(axis=1, dtype=jnp.int32))[: len(kernel.SCALARS)]
    return WindowDecodes(jnp.concatenate([moved, jnp.stack([listed[:, 0], position])]), listed[:, None])
