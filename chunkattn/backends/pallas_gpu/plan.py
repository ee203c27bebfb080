"""Work items of a step, built on the host.

Rows go three ways. Single rows behind their whole sequence (`decodes`) are split over their KV slots, because one row alone
would occupy few multiprocessors. Rows whose chunks are weighed anew (`questions`) leave two states, of the chunk slots and
of the rest. All other rows (`tiles`) are computed in one go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray
from chunkattn.backends.pallas_gpu import walk
from chunkattn.backends.pallas_gpu.combine import CHUNK, REST
from chunkattn.backends.pallas_gpu.products import ROWS
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.backends.tiles import Tiles, cut, cut_at_questions, full_tiles, spans, tile_ranges

SPLIT_SLOTS = 512
"""Unit of a split of a decode's slots."""
MOST_SPLITS = 16
"""Splits of a decode, if its chunks are not weighed anew."""


class Work(NamedTuple):
    """Work items of blocks of queries.

    Attributes:
        items: see `walk.ITEM`.
        rows: bounds of each row of an item, see `kernel.attend`; None for decodes.
        tokens: row of the batch of each token of a block, clipped.
        place: place of each row of the batch among the tokens of all blocks, -1 for other rows.
        num_items: items in use; None for tiles.
        kinds: kind of the states of each block, see `combine.UNUSED`; None for tiles.
        factors: factor of each item's scores; None if no chunk is weighed anew.
        scale: chunk scale of each block; None if no chunk is weighed anew.
    """

    items: Int32[StepArray, "I fields"]
    rows: Int32[StepArray, "I 2 warpgroups 64"] | None
    tokens: Int32[StepArray, "E tokens"]
    place: Int32[StepArray, " T"]
    num_items: Int32[StepArray, " 1"] | None = None
    kinds: Int32[StepArray, "E K"] | None = None
    factors: Float32[StepArray, " I"] | None = None
    scale: Float32[StepArray, " E"] | None = None


class Parts(NamedTuple):
    """Runs of rows by the way they are computed."""

    tiles: Tiles
    questions: Tiles
    decodes: Tiles


def divide(batch: AttentionBatch, weighing: RowWeighing | None) -> Parts:
    """Return the runs of a step's rows by the way they are computed."""
    runs = spans(batch)
    single = (runs.size == 1) & (batch.row_start[runs.row] <= batch.prefix_end[batch.row_seq[runs.row]])
    decodes, others = (Tiles(runs.row[x], runs.size[x]) for x in (single, ~single))
    if weighing is None:
        return Parts(others, Tiles(others.row[:0], others.size[:0]), decodes)
    others = cut_at_questions(others, weighing)
    weighed = weighing.end[others.row] > weighing.begin[others.row]
    plain, questions = (Tiles(others.row[x], others.size[x]) for x in (~weighed, weighed))
    return Parts(plain, questions, decodes)


def plan_tiles(batch: AttentionBatch, runs: Tiles, shape: Shape, groups: int) -> Work:
    """Return the work items of rows that are computed in one go."""
    per_block = shape.rows // groups
    tiles, bound = cut(runs, per_block), _blocks(batch, per_block)
    items = _items(batch, tiles, shape)
    rows = _bounds(batch.row_slot, batch.row_start, tiles, shape, groups)
    return Work(_pad(items, bound), _pad(rows, bound), *_tokens(batch, tiles, per_block, bound))


def plan_questions(batch: AttentionBatch, weighing: RowWeighing, runs: Tiles, shape: Shape, groups: int) -> Work:
    """Return the work items of rows whose chunks are weighed anew: two states of each block.

    The rest sees what a chunk's row would see whose chunk began at the question. The chunk slots are seen by all rows alike.
    """
    per_block = shape.rows // groups
    tiles, bound = cut(runs, per_block), _blocks(batch, per_block)
    weighed = weighing.end > weighing.begin
    rest = replace(batch, row_start=np.where(weighed, weighing.end, batch.row_start))
    chunks = replace(
        batch,
        row_slot=np.where(weighed, weighing.end - 1, batch.row_slot),
        row_start=weighing.begin,
        prefix_end=np.zeros_like(batch.prefix_end),
    )
    items = np.stack([_items(x, tiles, shape) for x in (rest, chunks)], axis=1).reshape(-1, len(walk.ITEM))
    items[:, walk.OUT] = np.arange(len(items))
    bounds = [_bounds(x.row_slot, x.row_start, tiles, shape, groups) for x in (rest, chunks)]
    rows = np.stack(bounds, axis=1).reshape(-1, *bounds[0].shape[1:])
    factors = np.stack([np.ones(len(tiles.row)), 1 / weighing.temperature[tiles.row]], axis=1).ravel()
    return Work(
        _pad(items, 2 * bound),
        _pad(rows, 2 * bound),
        *_tokens(batch, tiles, per_block, bound),
        num_items=np.array([len(items)], np.int32),
        kinds=_pad(np.tile(np.array([REST, CHUNK], np.int32), (len(tiles.row), 1)), bound),
        factors=_pad(factors.astype(np.float32), 2 * bound),
        scale=_pad(weighing.scale[tiles.row], bound),
    )


def plan_decodes(batch: AttentionBatch, weighing: RowWeighing | None, runs: Tiles, shape: Shape) -> Work:
    """Return the work items of single rows: ranges of slots, cut at multiples of a split that depends on the row's slot alone.

    The split and so the result of a row is independent of the other rows of the step.
    """
    number, row = len(runs.row), runs.row
    bound, last = min(len(batch.prefix_end), len(batch.row_seq)), batch.row_slot[row]
    none, own = np.zeros(number, np.int32), np.arange(number)
    pieces = [(own, none, last, none + REST)]  # decode, lowest and highest slot, kind
    if weighing is not None:
        begin, end = weighing.begin[row], weighing.end[row]
        weighed = end > begin
        rest = np.where(weighed, end, 0)
        pieces = [(own, none, begin - 1, none + REST), (own, begin, end - 1, none + CHUNK), (own, rest, last, none + REST)]
    decode, low, high, kind = (np.concatenate(x).astype(np.int32) for x in zip(*pieces))
    kept = high >= low
    decode, low, high, kind = decode[kept], low[kept], high[kept], kind[kept]

    split = SPLIT_SLOTS * -(-(last + 1) // (SPLIT_SLOTS * MOST_SPLITS))[decode]
    first_split, splits = low // split, high // split - low // split + 1
    piece = np.repeat(np.arange(len(decode)), splits)
    index = first_split[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(splits) - splits, splits)
    order = np.argsort(decode[piece], kind="stable")
    piece, index = piece[order], index[order]
    decode, low, high, kind, split = (x[piece] for x in (decode, low, high, kind, split))
    most = MOST_SPLITS + (2 if weighing is not None else 0)
    place = np.arange(len(decode)) - np.searchsorted(decode, decode)

    items = np.zeros((len(decode), len(walk.ITEM)), np.int32)
    items[:, walk.SEQ] = batch.row_seq[row][decode]
    items[:, walk.QUERY], items[:, walk.OUT] = decode, decode * most + place
    items[:, walk.SECOND_START] = np.maximum(low, index * split) // shape.slots
    items[:, walk.SECOND_END] = np.minimum(high, (index + 1) * split - 1) // shape.slots + 1
    items[:, walk.FULL_START], items[:, walk.FULL_STOP] = -(-low // shape.slots), (high + 1) // shape.slots
    items[:, walk.LOW], items[:, walk.HIGH] = low, high
    kinds = np.zeros((bound, most), np.int32)
    kinds[decode, place] = kind
    factors = scale = None
    if weighing is not None:
        factors = np.where(kind == CHUNK, 1 / weighing.temperature[row][decode], 1).astype(np.float32)
        factors, scale = _pad(factors, bound * most), _pad(weighing.scale[row], bound)
    tokens = _tokens(batch, runs, 1, bound)
    return Work(_pad(items, bound * most), None, *tokens, np.array([len(items)], np.int32), kinds, factors, scale)


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


def _blocks(batch: AttentionBatch, per_block: int) -> int:
    """Return the largest number of blocks of queries of a step."""
    rows = len(batch.row_seq)
    return rows // per_block + min(rows, len(batch.prefix_end))


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


def _bounds(
    row_slot: Int32[np.ndarray, " T"], row_start: Int32[np.ndarray, " T"], tiles: Tiles, shape: Shape, groups: int
) -> Int32[np.ndarray, "I 2 warpgroups 64"]:
    """Return the largest slot and the row start of each folded row of query tiles. Rows beyond a tile's see no slot."""
    token = np.arange(shape.rows) // groups
    row = np.minimum(tiles.row[:, None] + token, len(row_slot) - 1)
    within = token < np.minimum(tiles.size, shape.rows // groups)[:, None]
    bounds = np.stack([np.where(within, row_slot[row], -1), np.where(within, row_start[row], 0)], axis=1)
    return bounds.astype(np.int32).reshape(-1, 2, shape.warpgroups, ROWS)


def _tokens(
    batch: AttentionBatch, tiles: Tiles, per_block: int, bound: int
) -> tuple[Int32[np.ndarray, "E tokens"], Int32[np.ndarray, " T"]]:
    """Return `Work.tokens` and `Work.place` of query tiles."""
    rows = len(batch.row_seq)
    tokens = np.minimum(tiles.row[:, None] + np.arange(per_block), rows - 1)
    tile = np.repeat(np.arange(len(tiles.row)), tiles.size)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(tiles.size) - tiles.size, tiles.size)
    place = np.full(rows, -1, np.int32)
    place[tiles.row[tile] + within] = tile * per_block + within
    return _pad(tokens.astype(np.int32), bound), place


def _pad(values: np.ndarray, size: int) -> np.ndarray:
    """Pad the first axis with zeros up to `size`."""
    return np.pad(values, [(0, size - len(values))] + [(0, 0)] * (values.ndim - 1))
