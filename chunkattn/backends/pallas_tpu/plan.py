"""Scalars of the TPU kernels' query tiles and decodes, built on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray
from chunkattn.backends.pallas_tpu import kernel
from chunkattn.backends.tiles import Tiles, over_rows, spans, tile_ranges, without_chunks
from chunkattn.backends.windows import sees_parts, visits


class WindowWalk(NamedTuple):
    """Query tiles and decodes of the layers with one sliding window, see `PallasMetadata` and `kernel.WINDOW`.

    Attributes:
        tiles: scalars of the query tiles.
        num_tiles: query tiles in use.
        tile_visits: KV tiles that each query tile visits, see `windows.Visits`.
        decodes: scalars of the decodes.
        decode_visits: KV tiles that each decode visits.
    """

    tiles: Int32[StepArray, "scalars Q"]
    num_tiles: Int32[StepArray, ""]
    tile_visits: Int32[StepArray, "Q 1 N"]
    decodes: Int32[StepArray, "scalars E"]
    decode_visits: Int32[StepArray, "E 1 N"]


def cut_at_blocks(runs: Tiles, size: int) -> Tiles:
    """Cut runs at the boundaries of blocks of `size` rows, in order."""
    first, last = runs.row // size, (runs.row + runs.size - 1) // size
    run = np.repeat(np.arange(len(first)), last - first + 1)
    block = np.arange(len(run)) - np.searchsorted(run, run) + first[run]
    low = np.maximum(runs.row[run], block * size)
    high = np.minimum((runs.row + runs.size)[run], (block + 1) * size)
    return Tiles(low.astype(np.int32), (high - low).astype(np.int32))


def scalars_of(
    batch: AttentionBatch, weighing: RowWeighing | None, tiles: Tiles, tile_slots: int, size: int
) -> Int32[np.ndarray, "scalars Q"]:
    """Return the kernel's scalars of query tiles, each within one block of `size` rows."""
    fields = len(kernel.SCALARS) + (len(kernel.CHUNKS) if weighing is not None else 0)
    out = np.zeros((fields, len(tiles.row)), np.int32)
    if not len(tiles.row):
        return out
    ranges, seq = tile_ranges(batch, tiles, tile_slots), batch.row_seq[tiles.row]
    if weighing is not None:
        ranges = without_chunks(ranges, tiles, weighing, tile_slots)
        out[kernel.CHUNK_BEGIN], out[kernel.CHUNK_END] = weighing.begin[tiles.row], weighing.end[tiles.row]
    out[kernel.BLOCK] = tiles.row // size
    out[kernel.LOW] = tiles.row % size
    out[kernel.HIGH] = tiles.row % size + tiles.size
    out[kernel.SEQ] = seq
    out[kernel.FIRST_END], out[kernel.SECOND_START], out[kernel.SECOND_END] = ranges
    out[kernel.MIN_SLOT] = batch.row_slot[tiles.row]
    out[kernel.LAST] = batch.row_slot[tiles.row + tiles.size - 1]
    out[kernel.MAX_START] = over_rows(np.maximum, batch.row_start, tiles)
    out[kernel.PREFIX_END] = batch.prefix_end[seq]
    return out


def fill_blocks(
    scalars: Int32[np.ndarray, "scalars Q"], blocks: int
) -> tuple[Int32[np.ndarray, "scalars tiles"], Int64[np.ndarray, " tiles"]]:
    """Add an empty query tile to each block that has none, and sort by block. Return the index of each query tile, too."""
    idle = np.setdiff1d(np.arange(blocks), scalars[kernel.BLOCK])
    nothing = np.zeros((len(scalars), len(idle)), np.int32)
    nothing[kernel.BLOCK] = idle
    filled = np.concatenate([scalars, nothing], axis=1)
    order = np.argsort(filled[kernel.BLOCK], kind="stable")
    return filled[:, order], order


def window_walk(
    batch: AttentionBatch,
    decode_rows: Int32[np.ndarray, " decodes"],
    window: int,
    slots: tuple[int, int],
    size: int,
    blocks: int,
    bound: int,
) -> WindowWalk:
    """Return the query tiles and decodes of layers with a sliding window.

    Args:
        batch: the step.
        decode_rows: rows that are decodes.
        window: window in positions.
        slots: slots of a KV tile of the kernel over query tiles, and of the kernel over decodes.
        size: rows of a block.
        blocks: blocks of rows.
        bound: maximum number of sequences in the step, and so of decodes.
    """
    several = sees_parts(batch)
    runs = spans(batch, several.astype(np.int32))
    prompts = cut_at_blocks(runs.pick(~np.isin(runs.row, decode_rows)), size)
    decodes = Tiles(decode_rows, np.ones_like(decode_rows))

    def walk(tiles: Tiles, tile_slots: int) -> tuple[Int32[np.ndarray, "scalars Q"], Int32[np.ndarray, "Q N"]]:
        found = visits(batch, tiles, several, tile_slots, window)
        scalars = np.pad(scalars_of(batch, None, tiles, tile_slots, size), ((0, len(kernel.WINDOW)), (0, 0)))
        scalars[kernel.FIRST_END] = scalars[kernel.SECOND_START] = 0
        scalars[kernel.SECOND_END], scalars[kernel.FIRST_VISIT] = found.counts, found.tiles[:, 0]
        scalars[kernel.POSITION] = found.lowest
        return scalars, found.tiles

    of_tiles, tile_visits = walk(prompts, slots[0])
    of_decodes, decode_visits = walk(decodes, slots[1])
    of_tiles, order = fill_blocks(of_tiles, blocks)
    most = blocks + 2 * bound
    tile_visits = np.pad(tile_visits, ((0, len(order) - len(tile_visits)), (0, 0)))[order]
    return WindowWalk(
        tiles=pad(of_tiles, most),
        num_tiles=np.int32(len(order)),
        tile_visits=np.pad(tile_visits, ((0, most - len(order)), (0, 0)))[:, None],
        decodes=pad(of_decodes, bound),
        decode_visits=np.pad(decode_visits, ((0, bound - len(decode_visits)), (0, 0)))[:, None],
    )


def factors_of(batch: AttentionBatch, scalars: Int32[np.ndarray, "scalars Q"]) -> Float32[np.ndarray, "2 Q"] | None:
    """Return the kernel's factors of query tiles, or None if the step weighs no chunks anew."""
    if batch.weighing is None:
        return None
    seq = scalars[kernel.SEQ]
    return np.stack([1 / batch.weighing.temperature[seq], batch.weighing.scale[seq]]).astype(np.float32)


def pad(values: Shaped[np.ndarray, "*axes n"], size: int) -> Int32[np.ndarray, "*axes size"]:
    """Pad the last axis with zeros up to `size`."""
    padded = np.zeros((*values.shape[:-1], size), np.int32)  # ten times as fast as `np.pad`
    padded[..., : values.shape[-1]] = values
    return padded
