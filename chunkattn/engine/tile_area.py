"""`tile_area`: the work of attention in a step, without the engine's slow imports."""

from __future__ import annotations

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.tiles import Tiles, cut, spans, tile_ranges

TILE_ROWS, TILE_SLOTS = 256, 256
"""Tile size used to estimate the cost of attention: about the size that `xla` uses. Other sizes differ by a factor."""


def tile_area(batch: AttentionBatch) -> int:
    """Return rows times slots of the tiles that a step visits. Decodes use no tiles and count 0.

    Args:
        batch: attention batch of the step.
    """
    runs = spans(batch)
    several = runs.size > 1
    if not several.any():
        return 0
    tiles = cut(Tiles(runs.row[several], runs.size[several]), TILE_ROWS)
    return int(tile_ranges(batch, tiles, TILE_SLOTS).counts.sum()) * TILE_ROWS * TILE_SLOTS
