"""Pieces of walks: the schedule of a recurrent layer's step in plain XLA operations.

A *piece* is the part of a walk in one block. Groups of any pieces are prepared together. Then a *lane* carries the state
through the pieces of one walk in consecutive iterations, and takes the next walk. An *extended row* is an input row of the
convolution: the window of each walk, then the walk's rows.

Axes that `recurrence` does not define: `C` pieces of a group, `S` groups, `E` extended rows, `G` lanes, `I` iterations, `W` =
`taps - 1`.
"""

from __future__ import annotations

from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from chunkattn.backends.base import StepArray
from chunkattn.backends.recurrence import BLOCK, RecurrentSpec, Walk

_VECTOR = 16
"""Divisor of the size of a last axis. XLA:CPU computes what remains after the last full vector with other instructions."""
_NOWHERE = np.iinfo(np.int32).max
"""Index of a write that is dropped."""
OF_LANE, OF_ZEROS = -2, -1
"""Sources of a piece's state beside slots: the lane's last piece, or nothing."""


class Piece(NamedTuple):
    """Rows of a walk in one block, one entry per piece.

    Attributes:
        walk: number of the walk.
        first: extended row of the block's first row.
        row: row in the step of the block's first row, plus `BLOCK`.
        begin: first row of the piece in the block; the rows before it come from the walk's seat.
        end: row after the last in the block; at most `begin` for an entry without a piece.
        source: slot of the state before the block, `OF_LANE` or `OF_ZEROS`.
        slot: slot that gets the state before the open block, if it changes.
        keep_slot: slot that gets the state after the piece.
        open_seat: seat that gets the rows of the block.
    """

    walk: Int32[StepArray, " n"]
    first: Int32[StepArray, " n"]
    row: Int32[StepArray, " n"]
    begin: Int32[StepArray, " n"]
    end: Int32[StepArray, " n"]
    source: Int32[StepArray, " n"]
    slot: Int32[StepArray, " n"]
    keep_slot: Int32[StepArray, " n"]
    open_seat: Int32[StepArray, " n"]


_NO_PIECE = Piece(0, 0, 0, BLOCK, 0, OF_ZEROS, _NOWHERE, _NOWHERE, _NOWHERE)


class Saved(NamedTuple):
    """Windows to write: `index` in the pool, and the extended row of the window's first entry."""

    index: Int32[StepArray, " B"]
    first: Int32[StepArray, " B"]


class Pieces(NamedTuple):
    """A step's pieces and extended rows.

    Attributes:
        groups: the fields of `Piece`, of all pieces. The last entry is no piece.
        num_groups: groups in use.
        turns: piece of each lane in each iteration, counted over `groups`.
        iterations: iterations in use.
        row: row in the step of each extended row; `T` for none.
        head: extended rows of each walk's window.
        from_seat: seat of each walk's window; -1 for none.
        from_slot: slot of each walk's window where `from_seat` is -1; -1 for none.
        of_slots: windows before the open blocks.
        of_keeps: windows of the kept states.
        of_seats: windows before the next tokens.
    """

    groups: Int32[StepArray, "S C 9"]
    num_groups: Int32[StepArray, ""]
    turns: Int32[StepArray, "I G"]
    iterations: Int32[StepArray, ""]
    row: Int32[StepArray, " E"]
    head: Int32[StepArray, "B W"]
    from_seat: Int32[StepArray, " B"]
    from_slot: Int32[StepArray, " B"]
    of_slots: Saved
    of_keeps: Saved
    of_seats: Saved


def cut(spec: RecurrentSpec, walks: Int32[np.ndarray, "B 8"], num_rows: int, together: int, lanes: int) -> Pieces:
    """Cut walks into pieces and assign them to lanes.

    Args:
        spec: sizes of the layer.
        walks: the walks, see `Recurrence.build`.
        num_rows: rows of the step.
        together: pieces of a group.
        lanes: maximum number of lanes.
    """
    of: Any = Walk(*walks.T.astype(np.int64))  # every field of all walks
    window, used = spec.taps - 1, of.length > 0
    extended = np.where(used, of.length + window, 0)
    head = BLOCK + np.cumsum(extended) - extended
    body = head + window
    row = np.full(rounded(2 * BLOCK + num_rows + len(walks) * window), num_rows, np.int32)
    lengths = np.where(used, of.length, 0)
    walk, within = np.repeat(np.arange(len(walks)), lengths), _counted(lengths)
    row[body[walk] + within] = of.row[walk] + within

    inside = of.at % BLOCK
    blocks = np.where(used, (inside + of.length - 1) // BLOCK + 1, 0)
    end = of.at + of.length
    opened = end // BLOCK * BLOCK  # token of the part that begins the open block

    def saved(index: np.ndarray, token: np.ndarray, wanted: np.ndarray) -> Saved:
        return Saved(_int32(np.where(wanted, index, _NOWHERE)), _int32(np.where(wanted, head + token - of.at, 0)))

    return Pieces(
        *_schedule(of, blocks, body - inside, num_rows, together, lanes),
        row,
        head=_int32(np.where(used[:, None], head[:, None] + np.arange(window), _NOWHERE)),
        from_seat=_int32(np.where(used & (of.source == of.slot) & (of.at > 0), of.seat, -1)),
        from_slot=_int32(np.where(used, of.source, -1)),
        of_slots=saved(of.slot, opened, used & (of.slot >= 0) & (opened >= of.at)),
        of_keeps=saved(of.keep_slot, of.keep_at, used & (of.keep_slot >= 0) & (of.keep_at > of.at)),
        of_seats=saved(of.seat, end, used & (of.seat >= 0)),
    )


def _schedule(
    of: Any, blocks: np.ndarray, first: np.ndarray, num_rows: int, together: int, lanes: int
) -> tuple[Int32[np.ndarray, "S C 9"], Int32[np.ndarray, ""], Int32[np.ndarray, "I G"], Int32[np.ndarray, ""]]:
    """Return the groups of pieces, the number of groups in use, the turns, and the number of iterations in use."""
    num_walks = len(blocks)
    num_lanes = min(lanes, num_walks)
    walk = np.repeat(np.arange(num_walks), blocks)
    number = _counted(blocks)
    lane, start = _assign(blocks, num_lanes)

    inside = of.at[walk] % BLOCK
    last = number == blocks[walk] - 1
    begin = np.where(number == 0, inside, 0)
    end = np.minimum(inside + of.length[walk] - number * BLOCK, BLOCK)
    before = of.at[walk] - inside + number * BLOCK
    kept = (of.keep_slot[walk] >= 0) & (of.keep_at[walk] > before + begin) & (of.keep_at[walk] <= before + end)
    moved = (end == BLOCK) | (number > 0) | (of.source[walk] != of.slot[walk])
    has_seat = last & (end < BLOCK) & (of.seat[walk] >= 0)
    pieces = Piece(
        walk,
        first[walk] + number * BLOCK,
        of.row[walk] - inside + (number + 1) * BLOCK,
        begin,
        end,
        np.where(number == 0, np.maximum(of.source[walk], OF_ZEROS), OF_LANE),
        np.where(last & moved & (of.slot[walk] >= 0), of.slot[walk], _NOWHERE),
        np.where(kept, of.keep_slot[walk], _NOWHERE),
        np.where(has_seat, of.seat[walk], _NOWHERE),
    )
    pairs = min(num_walks, num_rows // 2)  # a walk of two rows may touch two blocks
    most = num_walks + pairs + (num_rows - 2 * pairs) // BLOCK
    longest = (num_rows + BLOCK - 2) // BLOCK + 1
    groups = np.empty((most // together + 1, together, len(_NO_PIECE)), np.int32)
    groups[:] = _NO_PIECE
    table = groups.reshape(-1, len(_NO_PIECE))
    table[: len(walk)] = np.stack(pieces, -1)
    turns = np.full((min(most, most // num_lanes + longest), num_lanes), len(table) - 1, np.int32)
    iteration = start[walk] + number
    turns[iteration, lane[walk]] = np.arange(len(walk))
    num_groups, iterations = -(-len(walk) // together), iteration.max(initial=-1) + 1
    return groups, np.array(num_groups, np.int32), turns, np.array(iterations, np.int32)


def _assign(blocks: np.ndarray, num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lane and the first iteration of each walk, the longest walks first and each on the lane that ends first."""
    lane, start = np.zeros_like(blocks), np.zeros_like(blocks)
    ends = [(0, lane) for lane in range(num_lanes)]
    for walk in np.argsort(-blocks, kind="stable"):
        start[walk], lane[walk] = ends[0]
        heapreplace(ends, (ends[0][0] + int(blocks[walk]), ends[0][1]))
    return lane, start


def _counted(counts: np.ndarray) -> np.ndarray:
    """Return `0 ... count - 1` of every count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def rounded(size: int) -> int:
    """Return the size of an axis with whole vectors of XLA:CPU."""
    return -(-size // _VECTOR) * _VECTOR


def _int32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32)
