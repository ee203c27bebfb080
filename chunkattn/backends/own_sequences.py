"""Batches in which every part of a prompt is a sequence of its own, for backends that count portions from absolute slots."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from chunkattn.backends.base import NO_QUESTION, AttentionBatch, Weighing
from chunkattn.backends.tiles import spans


def own_sequences(batch: AttentionBatch, tile_slots: int) -> AttentionBatch:
    """Return a batch with the same attention in which a row's place among KV tiles depends on its own part alone.

    Every run of rows with one own part becomes a sequence. Its page table holds the prefix's pages, empty pages up to a
    multiple of `tile_slots`, and the pages from the start of the own part, `max(row_start, prefix_end)`. If own parts begin on
    pages, a backend that visits KV tiles of `tile_slots` from slot 0 thus counts its portions from the start of the prefix and
    from the start of the own part.

    Args:
        batch: the step, of `T` rows and page tables of `W` entries.
        tile_slots: slots of a KV tile, a multiple of the block size.

    Returns:
        The batch, with `T` sequences and `tile_slots / block_size` more entries in page tables.
    """
    block, rows, width = batch.block_size, len(batch.row_seq), batch.block_tables.shape[1]
    per_tile = tile_slots // block
    row_prefix = batch.prefix_end[batch.row_seq]
    # Runs of rows of one sequence that lie in its prefix, or have one own part.
    runs = spans(batch, np.where(batch.row_slot < row_prefix, -1, np.maximum(batch.row_start, row_prefix)))
    seq = batch.row_seq[runs.row]
    prefix_end = batch.prefix_end[seq]
    lead = -(-prefix_end // block)
    # A part that sees all begins at the prefix's end, or on the next page if the rest of the prefix's page is a hole.
    hole = batch.page_len[seq, np.maximum(lead - 1, 0)] <= prefix_end - (lead - 1) * block
    start = np.maximum(batch.row_start[runs.row], np.where(hole, lead * block, prefix_end))
    own = batch.row_slot[runs.row] >= prefix_end
    first = start // block
    at = np.where(own, -(-prefix_end // tile_slots) * per_tile, lead)
    first = np.where(own, first, lead)
    shift = (at - first) * block

    column = np.arange(width + per_tile, dtype=np.int32)
    source = np.where(column < lead[:, None], column, column - (at - first)[:, None])
    empty = (column >= lead[:, None]) & (column < at[:, None])
    inside = (source < width) & ~empty
    source = np.where(inside, source, 0)
    tables = np.zeros((2, rows, width + per_tile), np.int32)
    tables[1] = block
    tables[0, : len(seq)] = np.where(inside, batch.block_tables[seq[:, None], source], 0)
    page_len = np.where(empty, 0, np.where(inside, batch.page_len[seq[:, None], source], block))
    # Later slots of the prefix's last page may be unwritten, and come before the own part now.
    cut = np.flatnonzero(own & (prefix_end % block > 0))
    page_len[cut, lead[cut] - 1] = np.minimum(page_len[cut, lead[cut] - 1], prefix_end[cut] % block)
    tables[1, : len(seq)] = page_len

    positions = np.zeros((rows, width + per_tile), np.int32)
    if batch.page_position is not None:
        positions[: len(seq)] = np.where(inside, batch.page_position[seq[:, None], source], 0)

    run = np.repeat(np.arange(len(seq)), runs.size)
    padding = rows - len(run)
    return AttentionBatch(
        num_rows=batch.num_rows,
        row_seq=np.pad(run, (0, padding)).astype(np.int32),
        row_slot=batch.row_slot + np.pad(shift[run], (0, padding)).astype(np.int32),
        row_start=np.where(np.pad(own[run], (0, padding)), np.pad((start + shift)[run], (0, padding)), 0).astype(np.int32),
        prefix_end=np.pad(prefix_end, (0, rows - len(seq))).astype(np.int32),
        block_tables=tables[0],
        page_len=tables[1],
        block_size=block,
        weighing=None if batch.weighing is None else _weighing(batch.weighing, seq, shift, rows),
        page_position=None if batch.page_position is None else positions,
    )


def _weighing(weighing: Weighing, seq: Int32[np.ndarray, " R"], shift: Int32[np.ndarray, " R"], sequences: int) -> Weighing:
    """Return the weighing of the runs, padded with sequences that weigh nothing."""
    question = weighing.question_start[seq]
    question = np.where(question == NO_QUESTION, NO_QUESTION, question + shift)
    padding = (0, sequences - len(seq))
    return Weighing(
        np.pad(question, padding, constant_values=NO_QUESTION).astype(np.int32),
        np.pad(weighing.temperature[seq], padding, constant_values=1),
        np.pad(weighing.scale[seq], padding, constant_values=1),
    )
