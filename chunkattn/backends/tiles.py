"""KV tiles that the query tiles of a step visit, computed on the host.

A query tile holds contiguous rows of one sequence. The slots visible to its rows lie in at most two ranges, `[0,
prefix_end)` and `[smallest row_start, last row's slot]`. O(query tiles) numbers therefore describe all the work of a
step, and tiles without a visible slot are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray


class TileRanges(NamedTuple):
    """KV tiles of each query tile: `[0, first_end)` and `[second_start, second_end)`.

    The two ranges are disjoint.
    """

    first_end: Int32[StepArray, " Q"]
    second_start: Int32[StepArray, " Q"]
    second_end: Int32[StepArray, " Q"]

    @property
    def counts(self) -> Int32[StepArray, " Q"]:
        """Return the number of KV tiles that each query tile visits."""
        return self.first_end + self.second_end - self.second_start


class Tiles(NamedTuple):
    """Query tiles: first row and number of rows of each."""

    row: Int32[StepArray, " Q"]
    size: Int32[StepArray, " Q"]

    def pick(self, which: Bool[np.ndarray, " Q"]) -> Tiles:
        """Return the tiles at which `which` is true."""
        return Tiles(self.row[which], self.size[which])


def spans(batch: AttentionBatch, *values: Int32[np.ndarray, " T"]) -> Tiles:
    """Return the runs of rows that belong to one sequence.

    Args:
        batch: the step.
        *values: further values by row, which are equal within a run.
    """
    used = [x[: batch.num_rows] for x in (batch.row_seq, *values)]
    starts = [0] if batch.num_rows else []
    changes = np.flatnonzero(np.any([x[1:] != x[:-1] for x in used], axis=0))
    edges = np.concatenate([starts, changes + 1, [batch.num_rows]]).astype(np.int32)
    return Tiles(edges[:-1], edges[1:] - edges[:-1])


def within(sizes: Int32[np.ndarray, " Q"]) -> Int32[np.ndarray, " rows"]:
    """Return the place of each row in its tile, for tiles that follow each other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def cut(runs: Tiles, rows: int) -> Tiles:
    """Cut runs into query tiles, in order.

    Args:
        runs: runs of rows, see `spans`.
        rows: maximum number of rows of a query tile.
    """
    per_run = -(-runs.size // rows)
    run = np.repeat(np.arange(len(per_run)), per_run)
    offset = within(per_run) * rows
    return Tiles((runs.row[run] + offset).astype(np.int32), np.minimum(rows, runs.size[run] - offset).astype(np.int32))


def cut_at_questions(runs: Tiles, weighing: RowWeighing) -> Tiles:
    """Cut runs where their weighed rows begin, so that a query tile's rows are all weighed or all left as they are.

    Args:
        runs: runs of rows, see `spans`.
        weighing: weighing of every row.
    """
    left = np.append(0, np.cumsum(weighing.end == weighing.begin))
    before = left[runs.row + runs.size] - left[runs.row]
    rows = np.stack([runs.row, runs.row + before], axis=1).ravel()
    sizes = np.stack([before, runs.size - before], axis=1).ravel()
    return Tiles(rows.astype(np.int32), sizes.astype(np.int32)).pick(sizes > 0)


def without_chunks(ranges: TileRanges, tiles: Tiles, weighing: RowWeighing, tile_slots: int) -> TileRanges:
    """Return `tile_ranges` without the KV tiles that hold nothing but the chunk slots of a weighed query tile.

    Args:
        ranges: result of `tile_ranges`.
        tiles: query tiles.
        weighing: weighing of every row.
        tile_slots: slots of a KV tile.
    """
    begin, end = weighing.begin[tiles.row], weighing.end[tiles.row]
    weighed, before = end > begin, -(-begin // tile_slots)
    first_end = np.where(weighed, before, ranges.first_end)
    second_start = np.where(weighed, np.maximum(end // tile_slots, before), ranges.second_start)
    return _ranges(first_end, second_start, ranges.second_end)


def tile_ranges(batch: AttentionBatch, tiles: Tiles, tile_slots: int) -> TileRanges:
    """Return the KV tiles that each query tile visits.

    The result holds exactly the tiles with a slot visible to one of the query tile's rows, under two conditions: a query
    tile's rows are consecutive tokens, like the rows of a span, and `tile_slots` is a multiple of `block_size`. Every page
    holds a token, but a tile smaller than a page may lie in a hole.

    Args:
        batch: the step.
        tiles: query tiles.
        tile_slots: slots of a KV tile.
    """
    start = over_rows(np.minimum, batch.row_start, tiles)
    last = batch.row_slot[tiles.row + tiles.size - 1]
    prefix_end = batch.prefix_end[batch.row_seq[tiles.row]]
    second_start = start // tile_slots
    # A row start inside the prefix, such as a question's 0, merges the two ranges.
    first_end = np.where(start <= prefix_end, 0, -(-prefix_end // tile_slots))
    second_start = np.where(start <= prefix_end, 0, np.maximum(second_start, first_end))
    return _ranges(first_end, second_start, last // tile_slots + 1)


def full_tiles(batch: AttentionBatch, tiles: Tiles, tile_slots: int) -> TileRanges:
    """Return the KV tiles of which every row of a query tile sees every token, so that no mask is needed.

    The result is a subset of `tile_ranges` for the same tiles. It is exact except for tiles whose only invisible slots are
    holes.

    Args:
        batch: the step.
        tiles: query tiles.
        tile_slots: slots of a KV tile.
    """
    start = over_rows(np.maximum, batch.row_start, tiles)
    seen = batch.row_slot[tiles.row] + 1  # the first row sees least of its own part
    prefix_end = batch.prefix_end[batch.row_seq[tiles.row]]
    first_end = np.where(start <= prefix_end, seen, np.minimum(prefix_end, seen)) // tile_slots
    second_start = np.maximum(-(-start // tile_slots), first_end)
    second_end = np.maximum(seen // tile_slots, second_start)
    return _ranges(first_end, second_start, second_end)


def _ranges(*columns: np.ndarray) -> TileRanges:
    return TileRanges(*(column.astype(np.int32) for column in columns))


def over_rows(reduce: np.ufunc, values: Int32[np.ndarray, " T"], tiles: Tiles) -> Int32[np.ndarray, " Q"]:
    """Reduce values over the rows of each query tile."""
    if not len(tiles.row):
        return np.zeros(0, np.int32)
    # Rows between tiles of different runs must not count, so reduceat runs over pairs [row, row + size).
    edges = np.stack([tiles.row, tiles.row + tiles.size], axis=1).ravel()
    return reduce.reduceat(np.append(values, 0), edges)[::2]
