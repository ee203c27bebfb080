"""Work items that end in softmax states: what a query tile sees, cut by kind of state and into splits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray
from chunkattn.backends.pallas_gpu import walk
from chunkattn.backends.pallas_gpu.combine import CHUNK, REST
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.backends.tiles import Tiles, within

SPLIT_SLOTS = 512
"""Unit of a split."""


class Splits(NamedTuple):
    """Facts of work items that end in states.

    Attributes:
        num_items: items in use.
        kinds: kind of the states of each query tile, see `combine.UNUSED`.
        factors: factor of each item's scores; None if no chunk is weighed anew.
        scale: chunk scale of each query tile; None if no chunk is weighed anew.
    """

    num_items: Int32[StepArray, " 1"]
    kinds: Int32[StepArray, "E K"]
    factors: Float32[StepArray, " I"] | None
    scale: Float32[StepArray, " E"] | None


class _Ranges(NamedTuple):
    """Ranges of slots that query tiles see.

    Attributes:
        tile: the query tile.
        low: lowest slot.
        high: highest slot.
        prefix_end: slots of the prefix, if the range holds slots of it that rows see beside a later part; else 0.
        kind: kind of the state, see `combine.UNUSED`.
        weighed: whether the rows' chunks are weighed anew.
    """

    tile: np.ndarray
    low: np.ndarray
    high: np.ndarray
    prefix_end: np.ndarray
    kind: np.ndarray
    weighed: np.ndarray

    def at(self, index: np.ndarray) -> _Ranges:
        """Return the ranges of an index."""
        return _Ranges(*(x[index] for x in self))


def split_items(
    base: Int32[np.ndarray, "E fields"],
    batch: AttentionBatch,
    weighing: RowWeighing | None,
    tiles: Tiles,
    shape: Shape,
    most_splits: int,
    most_states: int,
    most_tiles: int,
) -> tuple[Int32[StepArray, "I fields"], Splits]:
    """Return the work items of query tiles, in order of the tiles.

    The slots of a tile are cut where the kind of their state changes and at multiples of a split. The split depends on the
    tile's last slot alone, and so do the rows' results: other rows change no bit.

    Args:
        base: work items that hold all of a query tile each.
        batch: the step.
        weighing: weighing of every row, or None. The rows of a tile are all weighed, or all left as they are.
        tiles: query tiles.
        shape: sizes.
        most_splits: splits of a tile's slots, if they are one range.
        most_states: largest number of items of a tile.
        most_tiles: largest number of tiles of a step.
    """
    ranges = _ranges(base, weighing, tiles)
    last = base[ranges.tile, walk.HIGH]
    split = SPLIT_SLOTS * -(-(last + 1) // (SPLIT_SLOTS * most_splits))
    first = ranges.low // split
    splits = ranges.high // split - first + 1
    of_range = np.repeat(np.arange(len(splits)), splits)
    index = first[of_range] + within(splits)
    order = np.argsort(ranges.tile[of_range], kind="stable")
    of_range, index = of_range[order], index[order]
    ranges, split = ranges.at(of_range), split[of_range]
    tile, low, high = ranges[:3]
    place = np.arange(len(tile)) - np.searchsorted(tile, tile)

    items = base[tile]
    items[:, walk.QUERY], items[:, walk.OUT] = tile, tile * most_states + place
    items[:, walk.FIRST_END] = 0
    items[:, walk.SECOND_START] = np.maximum(low, index * split) // shape.slots
    items[:, walk.SECOND_END] = np.minimum(high, (index + 1) * split - 1) // shape.slots + 1
    items[:, walk.LOW], items[:, walk.HIGH], items[:, walk.PREFIX_END] = low, high, ranges.prefix_end
    seen = np.minimum(high, batch.row_slot[tiles.row][tile]) + 1  # by the first row of a weighed tile, and so by all
    for field, values in zip(walk.FULL, (0, -(-low // shape.slots), seen // shape.slots)):
        items[:, field] = np.where(ranges.weighed, values, items[:, field])
    kinds = np.zeros((most_tiles, most_states), np.int32)
    kinds[tile, place] = ranges.kind
    factors = scale = None
    if weighing is not None:
        factors = np.where(ranges.kind == CHUNK, 1 / weighing.temperature[tiles.row][tile], 1)
        factors = pad(factors.astype(np.float32), most_tiles * most_states)
        scale = pad(weighing.scale[tiles.row], most_tiles)
    number = np.array([len(items)], np.int32)
    return pad(items, most_tiles * most_states), Splits(number, kinds, factors, scale)


def _ranges(base: Int32[np.ndarray, "E fields"], weighing: RowWeighing | None, tiles: Tiles) -> _Ranges:
    """Return what query tiles see: the prefix and the rest, or both as one range. Chunks that are weighed anew are apart."""
    start, last, prefix_end = (base[:, field] for field in (walk.LOW, walk.HIGH, walk.PREFIX_END))
    none = np.zeros_like(start)
    begin = end = none
    if weighing is not None:
        begin, end = weighing.begin[tiles.row], weighing.end[tiles.row]
    weighed = end > begin
    apart, together = ~weighed & (start > prefix_end), ~weighed & (start <= prefix_end)
    candidates = [  # tiles, lowest and highest slot, slots of the prefix, kind
        (apart, none, prefix_end - 1, prefix_end, REST),
        (apart, start, last, none, REST),
        (together, none, last, prefix_end, REST),
        (weighed, none, begin - 1, none, REST),
        (weighed, begin, end - 1, none, CHUNK),
        (weighed, end, last, none, REST),
    ]
    tile = np.arange(len(start))
    parts = [_Ranges(tile, low, high, prefix, none + kind, weighed).at(which) for which, low, high, prefix, kind in candidates]
    ranges = _Ranges(*(np.concatenate(x) for x in zip(*parts)))
    return ranges.at(ranges.high >= ranges.low)


def pad(values: np.ndarray, size: int) -> np.ndarray:
    """Pad the first axis with zeros up to `size`."""
    padded = np.zeros((size, *values.shape[1:]), values.dtype)  # ten times as fast as `np.pad`
    padded[: len(values)] = values
    return padded
