"""Work items of a step, built on the host.

Rows go three ways. Single rows behind their whole sequence (`decodes`) are split over their KV slots, because one row alone
would occupy few multiprocessors. So are blocks of rows (`blocks`) in steps of few rows, and where chunks are weighed anew,
which needs a state of the chunk slots and one of the rest. All other rows (`tiles`) are computed in one go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray
from chunkattn.backends.pallas_gpu import walk
from chunkattn.backends.pallas_gpu.products import ROWS
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.backends.pallas_gpu.splits import Splits, pad, split_items
from chunkattn.backends.tiles import Tiles, cut, cut_at_questions, full_tiles, spans, tile_ranges, within
from chunkattn.backends.windows import Visits, visits

MOST_SPLITS = 16
"""Splits of a row's slots, if they are one range."""
_MOST_STATE_BYTES = 128 << 20
"""Bytes of states that splits of blocks may take in a step."""


class Work(NamedTuple):
    """Work items of blocks of queries.

    Attributes:
        items: see `walk.ITEM`.
        rows: bounds of each row of a block, see `kernel.attend`; None for decodes.
        visits: KV tiles that each block visits, see `windows.Visits`; None without a window.
        tokens: row of the batch of each token of a block, clipped.
        place: place of each row of the batch among the tokens of all blocks, -1 for other rows.
        splits: further facts of items that end in states; None for tiles.
    """

    items: Int32[StepArray, "I fields"]
    rows: Int32[StepArray, "E fields warpgroups 64"] | None
    tokens: Int32[StepArray, "E tokens"]
    place: Int32[StepArray, " T"]
    splits: Splits | None = None
    visits: Int32[StepArray, "E N"] | None = None


class Near(NamedTuple):
    """A sliding window.

    Attributes:
        window: window in positions.
        several: result of `windows.sees_parts` for the step.
    """

    window: int
    several: Bool[np.ndarray, " T"]


class Parts(NamedTuple):
    """Runs of rows by the way they are computed."""

    tiles: Tiles
    blocks: Tiles
    decodes: Tiles


def divide(
    batch: AttentionBatch, weighing: RowWeighing | None, near: Near | None = None, *, split: bool, decodes: bool = True
) -> Parts:
    """Return the runs of a step's rows by the way they are computed.

    Args:
        batch: the step.
        weighing: weighing of every row, or None.
        near: the window, or None.
        split: whether all blocks are split, else only those whose chunks are weighed anew.
        decodes: whether single rows go a way of their own.
    """
    runs = spans(batch)
    single = (runs.size == 1) & (batch.row_start[runs.row] <= batch.prefix_end[batch.row_seq[runs.row]]) & decodes
    singles, others = map(runs.pick, (single, ~single))
    if near is not None:
        runs = spans(batch, near.several.astype(np.int32))
        others = runs.pick(~np.isin(runs.row, singles.row))
    apart = np.full(len(others.row), split)
    if weighing is not None:
        others = cut_at_questions(others, weighing)
        apart = split | (weighing.end[others.row] > weighing.begin[others.row])
    tiles, blocks = map(others.pick, (~apart, apart))
    return Parts(tiles, blocks, singles)


def block_splits(batch: AttentionBatch, shape: Shape, groups: int, kv_heads: int) -> int:
    """Return the splits of a block's slots: 1 if the rows of a step may fill tiles for half of the multiprocessors.

    The number follows from the sizes of the step's arrays, so it is a constant of a compiled program.
    """
    if len(batch.row_seq) * groups * kv_heads > ROWS * shape.blocks:
        return 1
    most_blocks = _most_blocks(batch, shape.rows // groups, len(batch.prefix_end))
    one_each = 4 * shape.rows * shape.head_dim * kv_heads * most_blocks
    splits = min(MOST_SPLITS, -(-shape.blocks // kv_heads), _MOST_STATE_BYTES // one_each - _more_states(batch))
    return max(splits, 1)


def plan_tiles(batch: AttentionBatch, runs: Tiles, shape: Shape, groups: int, near: Near | None = None) -> Work:
    """Return the work items of rows that are computed in one go."""
    per_block = shape.rows // groups
    tiles, bound = cut(runs, per_block), _most_blocks(batch, per_block, len(batch.prefix_end))
    items, rows = _items(batch, tiles, shape), _bounds(batch, tiles, shape, groups, near)
    items, found = _near(items, batch, tiles, shape, near)
    items, listed = _visit(items, found, bound)
    return Work(pad(items, bound), pad(rows, bound), *_tokens(batch, tiles, per_block, bound), visits=listed)


def plan_blocks(
    batch: AttentionBatch,
    weighing: RowWeighing | None,
    runs: Tiles,
    shape: Shape,
    groups: int,
    most_splits: int,
    sequences: int,
    near: Near | None = None,
) -> Work:
    """Return the work items of blocks of rows that end in states.

    Args:
        batch: the step.
        weighing: weighing of every row, or None. The rows of a run are all weighed, or all left as they are.
        runs: runs of rows.
        shape: sizes.
        groups: query heads per KV head.
        most_splits: see `block_splits`.
        sequences: largest number of sequences whose rows are in `runs`.
        near: the window, or None.
    """
    per_block = shape.rows // groups
    tiles, bound = cut(runs, per_block), _most_blocks(batch, per_block, sequences)
    most = most_splits + _more_states(batch)
    base, found = _near(_items(batch, tiles, shape), batch, tiles, shape, near)
    items, splits = split_items(base, batch, weighing, tiles, shape, most_splits, most, bound)
    items, listed = _visit(items, found, bound)
    rows = pad(_bounds(batch, tiles, shape, groups, near), bound)
    return Work(items, rows, *_tokens(batch, tiles, per_block, bound), splits, listed)


def plan_decodes(
    batch: AttentionBatch, weighing: RowWeighing | None, runs: Tiles, shape: Shape, near: Near | None = None
) -> Work:
    """Return the work items of single rows that see one range of slots."""
    bound = min(len(batch.prefix_end), len(batch.row_seq))
    most = MOST_SPLITS + (0 if weighing is None else 2)
    base, found = _near(_items(batch, runs, shape), batch, runs, shape, near)
    items, splits = split_items(base, batch, weighing, runs, shape, MOST_SPLITS, most, bound)
    items, listed = _visit(items, found, bound)
    return Work(items, None, *_tokens(batch, runs, 1, bound), splits, listed)


def pack_table(batch: AttentionBatch, shape: Shape) -> tuple[Int32[np.ndarray, "S W"], Int32[np.ndarray, "S tiles"]]:
    """Return the entries of the page tables, and whether a page of a KV tile is not full."""
    sequences, width = batch.block_tables.shape
    entries = (batch.block_tables | batch.page_len << walk.LENGTH_SHIFT).astype(np.int32)
    short = (batch.page_len < batch.block_size).astype(np.int32)
    if shape.block_size > shape.slots:
        return entries, np.repeat(short, shape.block_size // shape.slots, axis=1)
    missing = -width % shape.boxes
    entries, short = (np.pad(x, ((0, 0), (0, missing))) for x in (entries, short))
    return entries, short.reshape(sequences, -1, shape.boxes).max(axis=2)


def _most_blocks(batch: AttentionBatch, per_block: int, sequences: int) -> int:
    """Return the largest number of blocks of queries of a step. A run may be cut in two where its question begins."""
    rows, runs = len(batch.row_seq), sequences * (1 if batch.weighing is None and batch.page_position is None else 2)
    return rows // per_block + min(rows, runs)


def _more_states(batch: AttentionBatch) -> int:
    """Return the states of a block beyond its splits. It sees up to two ranges of slots, or three if it weighs chunks anew."""
    return 1 if batch.weighing is None else 2


def _items(batch: AttentionBatch, tiles: Tiles, shape: Shape) -> Int32[np.ndarray, "I fields"]:
    """Return the work items of query tiles, one a tile."""
    items = np.zeros((len(tiles.row), len(walk.ITEM)), np.int32)
    if not len(items):
        return items
    seq = batch.row_seq[tiles.row]
    items[:, walk.SEQ] = seq
    items[:, walk.QUERY] = items[:, walk.OUT] = np.arange(len(items))
    ranges, full = tile_ranges(batch, tiles, shape.slots), full_tiles(batch, tiles, shape.slots)
    for fields, values in (((walk.FIRST_END, walk.SECOND_START, walk.SECOND_END), ranges), (walk.FULL, full)):
        items[:, fields] = np.stack(values, axis=1)
    edges = np.stack([tiles.row, tiles.row + tiles.size], axis=1).ravel()
    items[:, walk.LOW] = np.minimum.reduceat(np.append(batch.row_start, 0), edges)[::2]
    items[:, walk.HIGH] = batch.row_slot[tiles.row + tiles.size - 1]
    items[:, walk.PREFIX_END] = batch.prefix_end[seq]
    return items


def _near(
    items: Int32[np.ndarray, "I fields"], batch: AttentionBatch, tiles: Tiles, shape: Shape, near: Near | None
) -> tuple[Int32[np.ndarray, "I fields"], Visits | None]:
    """Return the work items of query tiles with what a window changes, and their visits."""
    if near is None:
        return items, None
    found = visits(batch, tiles, near.several, shape.slots, near.window)
    items = np.concatenate([items, found.lowest[:, None]], axis=1)
    items[:, walk.LOW] = found.start
    return items, found


def _visit(
    items: Int32[np.ndarray, "I fields"], found: Visits | None, bound: int
) -> tuple[Int32[np.ndarray, "I fields"], Int32[np.ndarray, "E N"] | None]:
    """Replace the ranges of KV tiles of work items by ranges of visits; return the padded visits, too."""
    if found is None:
        return items, None
    query, last = items[:, walk.QUERY], found.before.shape[1] - 1
    if len(found.tiles):
        first = np.where(items[:, walk.FIRST_END] > 0, 0, np.minimum(items[:, walk.SECOND_START], last))
        items[:, walk.SECOND_START] = found.before[query, first]
        items[:, walk.SECOND_END] = found.before[query, np.minimum(items[:, walk.SECOND_END], last)]
        items[:, walk.FIRST_END] = 0
    return items, pad(found.tiles, bound)


def _bounds(
    batch: AttentionBatch, tiles: Tiles, shape: Shape, groups: int, near: Near | None
) -> Int32[np.ndarray, "I fields warpgroups 64"]:
    """Return the largest slot and the row start of each folded row of query tiles, and its position if there is a window.

    Rows beyond a tile's see no slot.
    """
    token = np.arange(shape.rows) // groups
    row = np.minimum(tiles.row[:, None] + token, len(batch.row_seq) - 1)
    used = token < np.minimum(tiles.size, shape.rows // groups)[:, None]
    fields = [np.where(used, batch.row_slot[row], -1), np.where(used, batch.row_start[row], 0)]
    if near is not None:
        fields.append(batch.row_positions()[row])
    return np.stack(fields, axis=1).astype(np.int32).reshape(-1, len(fields), shape.warpgroups, ROWS)


def _tokens(
    batch: AttentionBatch, tiles: Tiles, per_block: int, bound: int
) -> tuple[Int32[np.ndarray, "E tokens"], Int32[np.ndarray, " T"]]:
    """Return `Work.tokens` and `Work.place` of query tiles."""
    rows = len(batch.row_seq)
    tokens = np.minimum(tiles.row[:, None] + np.arange(per_block), rows - 1)
    tile = np.repeat(np.arange(len(tiles.row)), tiles.size)
    offset, place = within(tiles.size), np.full(rows, -1, np.int32)
    place[tiles.row[tile] + offset] = tile * per_block + offset
    return pad(tokens.astype(np.int32), bound), place
