"""A backend visits exactly the KV tiles that hold a visible pair: brute force in NumPy over what may be seen."""

import numpy as np
import pytest

from benchmarks.visited_tiles import Tile, measure, pallas_tile
from chunkattn.backends.tiles import cut, full_tiles, spans, tile_ranges
from chunkattn.testing import random_steps


@pytest.mark.parametrize(
    ("workload", "most"),
    [
        ("query of 2000, 500 items of 20", 36),
        ("64 documents of 500, question of 50", 5),
        # Its question begins inside a query tile, so two query tiles see everything rather than one.
        ("the same behind a prompt of 100", 6),
        ("plain, 12000 tokens", 100),
    ],
)
def test_share_of_the_tiles_of_a_causal_kernel(workload, most):
    result = measure(workload, Tile(128, 128))
    assert result["exact"]
    assert result["visible_pairs_percent"] <= result["visited_percent"] <= most


def test_exact_in_the_tiles_of_the_pallas_kernel():
    assert measure("query of 2000, 500 items of 20", pallas_tile())["exact"]


def visible_slots(batch, rows):
    """bool `[rows, slots]` by the definition in `AttentionBatch`."""
    seq, slots = batch.row_seq[rows[0]], np.arange(batch.block_tables.shape[1] * batch.block_size)
    own, start = batch.row_slot[rows, None], batch.row_start[rows, None]
    valid = slots % batch.block_size < batch.page_len[seq, slots // batch.block_size]
    return valid & (slots <= own) & ((slots < batch.prefix_end[seq]) | (slots >= start))


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("pages", [1, 2, 3, 8])
def test_visited_tiles_are_those_with_a_visible_pair(block_size, pages):
    """Random ragged batches; KV tiles are whole pages."""
    rng = np.random.default_rng(block_size * pages)
    batches = [batch for _ in range(8) for batch in random_steps(rng, block_size=block_size)]
    assert len(batches) >= 20
    tile_slots = pages * block_size
    mixed = whole = 0
    for batch in batches:
        for tile_rows in (8, 32):
            tiles = cut(spans(batch), tile_rows)
            ranges = tile_ranges(batch, tiles, tile_slots)
            full = full_tiles(batch, tiles, tile_slots)
            seen = np.zeros(len(batch.row_seq), int)
            for index, (row, size) in enumerate(zip(*tiles, strict=True)):
                rows = np.arange(row, row + size)
                seen[rows] += 1
                assert size <= tile_rows
                assert len(set(batch.row_seq[rows])) == 1
                visible = visible_slots(batch, rows)
                wanted = np.flatnonzero(visible.any(0)) // tile_slots
                first_end, second_start, second_end = (r[index] for r in ranges)
                assert [*range(first_end), *range(second_start, second_end)] == sorted(set(wanted.tolist()))
                first_end, second_start, second_end = (r[index] for r in full)
                named = {*range(first_end), *range(second_start, second_end)}
                lens = batch.page_len[batch.row_seq[row]]
                hole = (np.arange(block_size) >= lens[:, None]).ravel() & np.repeat(lens > 0, block_size)
                seen_by_all = visible.all(0) | hole
                tile_of = np.arange(len(hole)) // tile_slots
                without_mask = {t for t in set(wanted.tolist()) if seen_by_all[tile_of == t].all()}
                assert named <= without_mask
                assert all(hole[tile_of == t].any() for t in without_mask - named)
                whole += len(named)
                mixed += len(set(batch.row_start[rows])) > 1
            assert (seen == (np.arange(len(seen)) < batch.num_rows)).all()
    assert mixed > 20  # query tiles across several parts are the hard ones
    assert whole > 0 or tile_slots == 128  # longer than any part of these
