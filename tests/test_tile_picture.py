"""The picture of the TPU kernel's walk shows what the kernel does."""

import numpy as np
import pytest

from benchmarks.tile_picture import BLOCK, LAYOUT, ROWS, SLOTS, batch_of, draw, walks
from benchmarks.visited_tiles import Tile, seen_tiles
from chunkattn.cache.slots import plan_slots


@pytest.mark.ci
def test_walks_are_the_visible_tiles_and_whole_ones_those_without_an_invisible_pair():
    plan = plan_slots(LAYOUT, BLOCK, aligned=True)
    found = walks(batch_of(plan))
    assert [{v.tile for v in w.visits} for w in found] == seen_tiles(LAYOUT, plan, Tile(ROWS, SLOTS))[0]
    pairs = np.zeros((len(LAYOUT), (found[-1].visits[-1].tile + 1) * SLOTS), bool)
    pairs[:, plan.slots] = LAYOUT.visible()
    for walk in found:
        for visit in walk.visits:
            tile = pairs[walk.low : walk.high, visit.tile * SLOTS : (visit.tile + 1) * SLOTS]
            assert visit.whole == tile.all()
    assert any(len(w.ranges) == 2 and len({v.whole for v in w.visits}) == 2 for w in found)


@pytest.mark.ci
def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(tmp_path / "tiles.png")
    assert 20_000 < (tmp_path / "tiles.png").stat().st_size < 150_000
