"""Work items of a step, built on the host.

Rows go two ways. Blocks of rows (`blocks`) are split over their KV slots in steps of few rows, which would occupy few
multiprocessors, and where chunks are weighed anew, which needs a state of the chunk slots and one of the rest. All other rows
(`tiles`) are computed in one go. Decodes are blocks of one row; `run` plans steps that hold nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray
from chunkattn.backends.pallas_gpu import walk
from chunkattn.backends.pallas_gpu.products import ROWS
from chunkattn.backends.pallas_gpu.shape import UNIT, Shape
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
        items: see `walk.WIDTH`.
        rows: bounds of each row of a block, see `kernel.attend`; None for decodes.
        visits: KV tiles that each block visits, see `windows.Visits`; None without a window.
        source: see `Layout`; None if block `i` holds row `i` alone.
        folded: `Layout.place`; None with `source`.
        place: `Layout.token`; None for tiles, and with `source`.
        splits: further facts of items that end in states; None for tiles.
    """

    items: Int32[StepArray, "I fields"]
    rows: Int32[StepArray, "E fields warpgroups 64"] | None
    source: Int32[StepArray, " R"] | None
    folded: Int32[StepArray, " T"] | None
    place: Int32[StepArray, " T"] | None
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


def divide(batch: AttentionBatch, weighing: RowWeighing | None, near: Near | None = None, *, split: bool) -> Parts:
    """Return the runs of a step's rows by the way they are computed.

    Args:
        batch: the step.
        weighing: weighing of every row, or None.
        near: the window, or None.
        split: whether all blocks are split, else only those whose chunks are weighed anew.
    """
    runs = spans(batch) if near is None else spans(batch, near.several.astype(np.int32))
    apart = np.full(len(runs.row), split)
    if weighing is not None:
        runs = cut_at_questions(runs, weighing)
        apart = split | (weighing.end[runs.row] > weighing.begin[runs.row])
    return Parts(*map(runs.pick, (~apart, apart)))


def block_splits(batch: AttentionBatch, shape: Shape, kv_heads: int) -> int:
    """Return the splits of a block's slots: 1 if the rows of a step may fill tiles for half of the multiprocessors.

    The number follows from the sizes of the step's arrays, so it is a constant of a compiled program.
    """
    if len(batch.row_seq) * shape.groups * kv_heads > ROWS * shape.blocks:
        return 1
    most_blocks = _most_blocks(batch, shape, len(batch.prefix_end))
    one_each = 4 * shape.rows * shape.head_dim * kv_heads * most_blocks
    splits = min(MOST_SPLITS, -(-shape.blocks // kv_heads), _MOST_STATE_BYTES // one_each - _more_states(batch))
    return max(splits, 1)


def plan_tiles(batch: AttentionBatch, runs: Tiles, shape: Shape, near: Near | None = None) -> Work:
    """Return the work items of rows that are computed in one go."""
    tiles = cut(runs, shape.block_tokens)
    bound = _most_blocks(batch, shape, len(batch.prefix_end))
    layout = _layout(batch, tiles, shape, bound)
    items, rows = _items(batch, tiles, shape, layout.start), _bounds(batch, tiles, shape, near)
    items, found = _near(items, batch, tiles, shape, near)
    items, listed = _visit(items, found, bound)
    return Work(pad(items, bound), pad(rows, bound), layout.source, layout.place, None, visits=listed)


def plan_blocks(
    batch: AttentionBatch,
    weighing: RowWeighing | None,
    runs: Tiles,
    shape: Shape,
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
        most_splits: see `block_splits`.
        sequences: largest number of sequences whose rows are in `runs`.
        near: the window, or None.
    """
    tiles, bound = cut(runs, shape.block_tokens), _most_blocks(batch, shape, sequences)
    most = most_splits + _more_states(batch)
    layout = _layout(batch, tiles, shape, bound)
    base, found = _near(_items(batch, tiles, shape, layout.start), batch, tiles, shape, near)
    items, splits = split_items(base, batch, weighing, tiles, shape, most_splits, most, bound)
    items, listed = _visit(items, found, bound)
    rows = pad(_bounds(batch, tiles, shape, near), bound)
    return Work(items, rows, layout.source, layout.place, layout.token, splits, listed)


def decode_states(weighs: bool, *, windowed: bool) -> int:
    """Return the largest number of states of a decode. Each further range of slots may cut one more split in two."""
    return MOST_SPLITS + (2 if weighs else int(windowed))


def pack_table(
    tables: Int32[StepArray, "S W"], page_len: Int32[StepArray, "S W"], shape: Shape, xp: Any = np
) -> tuple[Int32[StepArray, "S W"], Int32[StepArray, "S tiles"]]:
    """Return the entries of the page tables, and whether a page of a KV tile is not full.

    Args:
        tables: page tables.
        page_len: valid slots of every page.
        shape: sizes of a KV tile.
        xp: `numpy`, or `jax.numpy` for arrays on the device.
    """
    width = tables.shape[1]
    entries = (tables | page_len << walk.LENGTH_SHIFT).astype(np.int32)
    short = page_len < shape.block_size
    if shape.block_size > shape.slots:
        return entries, xp.repeat(short, shape.block_size // shape.slots, axis=1).astype(np.int32)
    if missing := -width % shape.boxes:
        entries, short = (xp.pad(x, ((0, 0), (0, missing))) for x in (entries, short))
    holes = short[:, :: shape.boxes]
    for box in range(1, shape.boxes):  # much faster than a reduction over a short axis
        holes = holes | short[:, box :: shape.boxes]
    return entries, holes.astype(np.int32)


def _most_blocks(batch: AttentionBatch, shape: Shape, sequences: int) -> int:
    """Return the largest number of blocks of queries of a step. A run may be cut in two where its question begins."""
    rows, runs = len(batch.row_seq), sequences * (1 if batch.weighing is None and batch.page_position is None else 2)
    return rows // shape.block_tokens + min(rows, runs)


def _more_states(batch: AttentionBatch) -> int:
    """Return the states of a block beyond its splits. It sees up to two ranges of slots, or three if it weighs chunks anew."""
    return 1 if batch.weighing is None else 2


def _items(batch: AttentionBatch, tiles: Tiles, shape: Shape, start: Int32[np.ndarray, " I"]) -> Int32[np.ndarray, "I fields"]:
    """Return the work items of query tiles, one a tile."""
    items = np.zeros((len(tiles.row), walk.WIDTH), np.int32)
    if not len(items):
        return items
    seq = batch.row_seq[tiles.row]
    items[:, walk.SEQ] = seq
    items[:, walk.QUERY] = items[:, walk.OUT] = np.arange(len(items))
    items[:, walk.START], items[:, walk.SIZE] = start, tiles.size
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
    items[:, walk.LOW], items[:, walk.POSITION] = found.start, found.lowest
    return items[:, : walk.POSITION + 1], found


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
    batch: AttentionBatch, tiles: Tiles, shape: Shape, near: Near | None
) -> Int32[np.ndarray, "I fields warpgroups 64"]:
    """Return the largest slot and the row start of each folded row of query tiles, and its position if there is a window.

    Rows beyond a tile's see no slot.
    """
    warpgroup, place = np.divmod(np.arange(shape.rows), ROWS)
    token = place // shape.groups
    used = token < np.minimum(tiles.size[:, None] - warpgroup * shape.tokens, shape.tokens)
    row = np.minimum(tiles.row[:, None] + warpgroup * shape.tokens + token, len(batch.row_seq) - 1)
    fields = [np.where(used, batch.row_slot[row], -1), np.where(used, batch.row_start[row], 0)]
    if near is not None:
        fields.append(batch.row_positions()[row])
    return np.stack(fields, axis=1).astype(np.int32).reshape(-1, len(fields), shape.warpgroups, ROWS)


class Layout(NamedTuple):
    """Folded rows of blocks of queries: a token's query heads of one KV head, token by token, block by block.

    The tokens of each warpgroup begin at a multiple of `UNIT`, because copies move whole units.

    Attributes:
        start: first folded row of each block.
        source: token and query head of each folded row, `token * groups + head`; any for rows of no token.
        place: first folded row of each row of the batch, or -1.
        token: block times tokens of a block plus place in the block of each row of the batch, or -1.
    """

    start: Int32[np.ndarray, " E"]
    source: Int32[np.ndarray, " R"]
    place: Int32[np.ndarray, " T"]
    token: Int32[np.ndarray, " T"]


def _layout(batch: AttentionBatch, tiles: Tiles, shape: Shape, bound: int) -> Layout:
    """Return the folded rows of query tiles, at most `bound` of them."""
    rows, groups, ragged = len(batch.row_seq), shape.groups, shape.tokens * shape.groups % UNIT > 0
    first = np.minimum(tiles.size, shape.tokens)
    units = shape.units(first) + shape.units(tiles.size - first)
    start = UNIT * (np.cumsum(units) - units)
    token = within(tiles.size)
    warpgroup, place = np.divmod(token, shape.tokens)
    folded = np.repeat(start, tiles.size) + UNIT * shape.units(shape.tokens) * warpgroup + groups * place
    row = np.repeat(tiles.row, tiles.size) + token
    # Full blocks fill their units unless they are ragged, so only the last block of a run leaves a unit in part.
    partial = bound * shape.warpgroups if ragged else bound - rows // shape.block_tokens
    source = np.zeros(UNIT * (shape.units(rows) + partial) + shape.rows, np.int32)
    head = np.arange(groups)
    source[folded[:, None] + head] = row[:, None] * groups + head
    places = np.full((2, rows), -1, np.int32)
    places[:, row] = folded, np.repeat(np.arange(len(tiles.row)), tiles.size) * shape.block_tokens + token
    return Layout(start.astype(np.int32), source, *places)
