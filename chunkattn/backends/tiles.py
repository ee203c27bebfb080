"""Which KV tiles a step visits, computed on the host.

A query tile holds neighbouring rows of one sequence. The slots its rows see lie in at
most two ranges, `[0, prefix_end)` and `[smallest row_start, last row's slot]`, so O(query
tiles) numbers describe all the work of a step, and a tile with nothing visible in it is
never named.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from chunkattn.backends.base import AttentionBatch, StepArray


class TileRanges(NamedTuple):
    """KV tiles of a query tile: `[0, first_end)` and `[second_start, second_end)`, int32 `[Q]` each.

    The ranges do not overlap.
    """

    first_end: Int32[StepArray, " Q"]
    second_start: Int32[StepArray, " Q"]
    second_end: Int32[StepArray, " Q"]

    @property
    def counts(self) -> Int32[StepArray, " Q"]:
        """int32 `[Q]`: KV tiles visited."""
        return self.first_end + self.second_end - self.second_start


class Tiles(NamedTuple):
    """Query tiles: the first row and the number of rows of each, int32 `[Q]`."""

    row: Int32[StepArray, " Q"]
    size: Int32[StepArray, " Q"]


def spans(batch: AttentionBatch) -> Tiles:
    """The runs of rows that belong to one sequence."""
    seq = batch.row_seq[: batch.num_rows]
    starts = [0] if len(seq) else []
    edges = np.concatenate([starts, np.flatnonzero(seq[1:] != seq[:-1]) + 1, [len(seq)]]).astype(np.int32)
    return Tiles(edges[:-1], edges[1:] - edges[:-1])


def cut(runs: Tiles, rows: int) -> Tiles:
    """Cut runs into query tiles of at most `rows` rows, in order."""
    per_run = -(-runs.size // rows)
    run = np.repeat(np.arange(len(per_run)), per_run)
    within = (np.arange(len(run)) - np.repeat(np.cumsum(per_run) - per_run, per_run)) * rows
    return Tiles((runs.row[run] + within).astype(np.int32), np.minimum(rows, runs.size[run] - within).astype(np.int32))


def tile_ranges(batch: AttentionBatch, tiles: Tiles, tile_slots: int) -> TileRanges:
    """The KV tiles of `tile_slots` slots that each query tile visits.

    Exactly those that hold a slot one of its rows sees, if a tile's rows are consecutive tokens, as
    a span's are, and `tile_slots` is a multiple of `block_size`: every page holds a token, but a
    smaller tile may be all hole.
    """
    start = _over_rows(np.minimum, batch, tiles)
    last = batch.row_slot[tiles.row + tiles.size - 1]
    prefix_end = batch.prefix_end[batch.row_seq[tiles.row]]
    second_start = start // tile_slots
    # A row start inside the prefix, as a question's 0 is, makes one range of the two.
    first_end = np.where(start <= prefix_end, 0, -(-prefix_end // tile_slots))
    second_start = np.where(start <= prefix_end, 0, np.maximum(second_start, first_end))
    return TileRanges(*(a.astype(np.int32) for a in (first_end, second_start, last // tile_slots + 1)))


def full_tiles(batch: AttentionBatch, tiles: Tiles, tile_slots: int) -> TileRanges:
    """The KV tiles of which every row of a query tile sees every token: they need no mask.

    Among those `tile_ranges` names for the same tiles, and exactly those but for tiles that hold an invisible slot which
    is a hole.
    """
    start = _over_rows(np.maximum, batch, tiles)
    seen = batch.row_slot[tiles.row] + 1  # by the first row, which sees least of its own part
    prefix_end = batch.prefix_end[batch.row_seq[tiles.row]]
    first_end = np.where(start <= prefix_end, seen, np.minimum(prefix_end, seen)) // tile_slots
    second_start = np.maximum(-(-start // tile_slots), first_end)
    second_end = np.maximum(seen // tile_slots, second_start)
    return TileRanges(*(a.astype(np.int32) for a in (first_end, second_start, second_end)))


def _over_rows(reduce: np.ufunc, batch: AttentionBatch, tiles: Tiles) -> Int32[np.ndarray, " Q"]:
    """The least or largest `row_start` of each query tile, int32 `[Q]`."""
    if not len(tiles.row):
        return np.zeros(0, np.int32)
    # Tiles cover the rows from the first to the last without gaps only within a run, so
    # it is taken over [row, row + size), pairwise with reduceat.
    edges = np.stack([tiles.row, tiles.row + tiles.size], axis=1).ravel()
    return reduce.reduceat(np.append(batch.row_start, 0), edges)[::2]
