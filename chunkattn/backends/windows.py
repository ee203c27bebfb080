"""KV tiles that the query tiles of a step visit in layers with a sliding window, computed on the host.

A window counts positions, so a row that sees several parts sees the end of each, which is more than the two ranges of
`tiles`. The KV tiles of every query tile are listed instead: exactly those with a slot that one of its rows sees, under the
conditions of `tiles.tile_ranges`.

Axes that `base` does not define: `N` KV tiles of a page table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.tiles import Tiles, over_rows, within

_FAR = np.iinfo(np.int32).max


class Visits(NamedTuple):
    """KV tiles of each query tile.

    Attributes:
        tiles: KV tiles in ascending order, each times 2, plus 1 if it holds a token before the window of a row; then zeros.
        before: number of visited KV tiles before each KV tile, up to the last visited one and beyond it.
        lowest: lowest position of the query tile's rows.
        start: lowest slot behind the prefix that one of the rows sees; 0 if they see several parts, or none.
    """

    tiles: Int32[np.ndarray, "Q N"]
    before: Int64[np.ndarray, "Q n"]
    lowest: Int32[np.ndarray, " Q"]
    start: Int32[np.ndarray, " Q"]

    @property
    def counts(self) -> Int64[np.ndarray, " Q"]:
        """Return the number of KV tiles that each query tile visits."""
        return self.before[:, -1]


def sees_parts(batch: AttentionBatch) -> Bool[np.ndarray, " T"]:
    """Return whether a row sees several parts behind the prefix. Between its first slot there and its own, positions jump.

    Rows of a query tile must agree on it; the rows of a span change once at most.
    """
    block, prefix_end = batch.block_size, batch.prefix_end[batch.row_seq]
    own = batch.row_slot // block
    first = np.minimum(np.maximum(batch.row_start // block, -(-prefix_end // block)), own)
    positions = batch.page_positions()
    jumps = positions[batch.row_seq, own] - positions[batch.row_seq, first] != (own - first) * block
    return (batch.row_slot >= prefix_end) & jumps


def visits(batch: AttentionBatch, tiles: Tiles, several: Bool[np.ndarray, " T"], tile_slots: int, window: int) -> Visits:
    """Return the KV tiles that each query tile visits.

    Args:
        batch: the step.
        tiles: query tiles, whose rows agree on `several`.
        several: result of `sees_parts`.
        tile_slots: slots of a KV tile.
        window: window in positions.
    """
    most = -(-batch.block_tables.shape[1] * batch.block_size // tile_slots)
    count = len(tiles.row)
    if not count:
        return Visits(np.zeros((0, most), np.int32), np.zeros((0, 1), np.int64), *np.zeros((2, 0), np.int32))
    prefix_of_row, positions = batch.prefix_end[batch.row_seq], batch.row_positions()
    own_start = np.maximum(batch.row_start, prefix_of_row)
    behind = batch.row_slot >= prefix_of_row
    seen_from = np.where(behind, np.maximum(own_start, batch.row_slot - window + 1), _FAR)
    lowest, highest = over_rows(np.minimum, positions, tiles), over_rows(np.maximum, positions, tiles)
    last, prefix_end = batch.row_slot[tiles.row + tiles.size - 1], prefix_of_row[tiles.row]
    start, parts = over_rows(np.minimum, seen_from, tiles), several[tiles.row]

    begin = np.arange(last.max() // tile_slots + 1) * tile_slots
    end, unseen, cut_off = begin + tile_slots, lowest - window, highest - window  # last positions before the windows
    seen, cut = np.zeros((2, count, len(begin)), bool)
    stop, first = np.minimum(prefix_end, last + 1), over_rows(np.minimum, np.where(behind, own_start, _FAR), tiles)
    for low, high, origin, before in ((unseen + 1, stop, 0 * first, cut_off), (start, last + 1, first, last - window)):
        visited = np.maximum(begin, low[:, None]) < np.minimum(end, high[:, None])
        seen |= visited
        cut |= visited & (np.maximum(begin, origin[:, None]) <= before[:, None])
    if parts.any():
        seen[parts], cut[parts] = _by_page(batch, tiles.pick(parts), unseen[parts], cut_off[parts], tile_slots, len(begin))
    before = np.pad(np.cumsum(seen, axis=1), ((0, 0), (1, 0)))
    query, tile = np.nonzero(seen)
    listed = np.zeros((count, most), np.int32)
    listed[query, within(before[:, -1])] = tile << 1 | cut[query, tile]
    own_from = np.where(parts | (start == _FAR), 0, start)
    return Visits(listed, before, lowest.astype(np.int32), own_from.astype(np.int32))


def _by_page(
    batch: AttentionBatch,
    tiles: Tiles,
    unseen: Int32[np.ndarray, " Q"],
    cut_off: Int32[np.ndarray, " Q"],
    tile_slots: int,
    count: int,
) -> tuple[Bool[np.ndarray, "Q n"], Bool[np.ndarray, "Q n"]]:
    """Return which of the first `count` KV tiles hold a token that a row sees, and which hold one before a row's window.

    Args:
        batch: the step.
        tiles: query tiles whose rows see all earlier slots but for the window, and are tokens of one part.
        unseen: last position before the window of the first row of each query tile.
        cut_off: last position before the window of its last row.
        tile_slots: slots of a KV tile.
        count: number of KV tiles.
    """
    size = min(batch.block_size, tile_slots)  # a page, or a KV tile that is smaller
    slot = np.arange(count * tile_slots // size) * size
    page, offset = np.divmod(slot, batch.block_size)
    page = np.minimum(page, batch.block_tables.shape[1] - 1)
    seq, last = batch.row_seq[tiles.row][:, None], batch.row_slot[tiles.row + tiles.size - 1][:, None]
    tokens = np.minimum(np.minimum(batch.page_len[seq, page] - offset, size), last + 1 - slot)
    first = batch.page_positions()[seq, page] + offset
    seen = (tokens > 0) & (first + tokens - 1 > unseen[:, None])
    cut = (tokens > 0) & (first <= cut_off[:, None])
    by_tile = (len(tiles.row), count, tile_slots // size)
    return seen.reshape(by_tile).any(axis=2), cut.reshape(by_tile).any(axis=2)
