"""KV tiles of layers with a sliding window: exactly those with a visible slot, by brute force in NumPy."""

import numpy as np
import pytest

from chunkattn.backends.own_sequences import own_sequences
from chunkattn.backends.tiles import cut, spans
from chunkattn.backends.windows import sees_parts, visits
from chunkattn.testing import random_steps


def visible_slots(batch, rows, window):
    """bool `[rows, slots]` by the definition in `AttentionBatch`, and which slots hold a token."""
    seq, slots = batch.row_seq[rows[0]], np.arange(batch.block_tables.shape[1] * batch.block_size)
    page, within = np.divmod(slots, batch.block_size)
    position = batch.page_position[seq, page] + within
    own, start = batch.row_slot[rows, None], batch.row_start[rows, None]
    valid = within < batch.page_len[seq, page]
    visible = valid & (slots <= own) & ((slots < batch.prefix_end[seq]) | (slots >= start))
    return visible & (position > position[own] - window), valid & (slots <= own.max()), visible


@pytest.mark.parametrize(("block_size", "tile_slots"), [(4, 16), (8, 8), (16, 64), (16, 8)])
@pytest.mark.parametrize("window", [1, 9, 50])
@pytest.mark.parametrize("apart", [False, True], ids=["as given", "own sequences"])
def test_visited_tiles_are_those_with_a_visible_pair(block_size, tile_slots, window, apart):
    rng = np.random.default_rng(block_size * tile_slots + window)
    scattered = clear = 0
    for _ in range(5):
        for given in random_steps(rng, block_size=block_size, windowed=True):
            batch = own_sequences(given, 2 * max(block_size, tile_slots)) if apart else given
            several = sees_parts(batch)
            for tile_rows in (8, 32):
                tiles = cut(spans(batch, several.astype(np.int32)), tile_rows)
                found = visits(batch, tiles, several, tile_slots, window)
                assert found.tiles.shape == (len(tiles.row), -(-batch.block_tables.shape[1] * block_size // tile_slots))
                for index, (row, size) in enumerate(zip(*tiles, strict=True)):
                    rows = np.arange(row, row + size)
                    seen, valid, without_window = visible_slots(batch, rows, window)
                    wanted = sorted({*(np.flatnonzero(seen.any(0)) // tile_slots).tolist()})
                    named = found.tiles[index, : found.counts[index]]
                    holes = {tile for tile in (named >> 1).tolist() if not valid[tile * tile_slots :][:tile_slots].any()}
                    assert not holes or tile_slots < block_size
                    assert sorted({*(named >> 1).tolist()} - holes) == wanted
                    assert not found.tiles[index, found.counts[index] :].any()
                    bounds = np.searchsorted(named >> 1, np.arange(found.before.shape[1]))
                    assert found.before[index].tolist() == bounds.tolist()
                    scattered += len(wanted) > 1 and several[row] and np.diff(wanted).max() > 1
                    for tile, masked in zip(named >> 1, named & 1, strict=True):
                        inside = slice(tile * tile_slots, (tile + 1) * tile_slots)
                        # Rows that see all of a tile without the window see less with it only if the tile is said to be cut.
                        whole = (without_window[:, inside] == valid[inside]).all()
                        less = (seen[:, inside] < without_window[:, inside]).any()
                        assert masked or not less or not whole
                        clear += not masked
    assert clear > 0 or window == 1
    assert scattered > 0 or (block_size, tile_slots, window) != (8, 8, 9)
