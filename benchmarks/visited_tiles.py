"""Count the KV tiles that attention visits, against the tiles of a causal kernel.

    python -m benchmarks.visited_tiles [--json FILE|-]
    python -m benchmarks.visited_tiles --png FILE

The host counts the tile ranges that every backend loops over, in tiles of 128x128 and in the Pallas kernel's own, for one
prompt in one step. "seen" counts the tiles that hold a visible pair of tokens, by brute force over all pairs. The causal
kernel has the same number of tokens, and each sees all tokens before it. "invariant" counts the tiles under
`batch_invariant=True`, where every part is a sequence of its own. The command fails if a tile is visited in vain or left
out. `--png` draws a small prompt's tiles and the walk of one query tile instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.tile_picture import BLOCK, batch_of, draw
from chunkattn.backends import AttentionSpec
from chunkattn.backends.own_sequences import own_sequences
from chunkattn.backends.pallas_tpu.backend import PallasTpuBackend
from chunkattn.backends.tiles import cut, spans, tile_ranges
from chunkattn.cache.slots import SlotPlan, plan_slots
from chunkattn.layout import PREFIX_ID, QUESTION_ID, ChunkLayout
from chunkattn.rope.positions import make_layout

STEP = 2048
"""Rows of a full step, which determine the Pallas kernel's tile size."""


class Tile(NamedTuple):
    """Rows of a query tile and slots of a KV tile."""

    rows: int
    slots: int


def layout_of(prefix: int, chunks: int, chunk: int, question: int) -> ChunkLayout:
    """Return a layout with these numbers of tokens; all chunks have one length."""
    return make_layout(np.zeros(prefix), [np.zeros(chunk)] * chunks, np.zeros(question))


WORKLOADS = {
    "query of 2000, 500 items of 20": (layout_of(2000, 500, 20, 0), False),
    "64 documents of 500, question of 50": (layout_of(0, 64, 500, 50), True),
    "the same behind a prompt of 100": (layout_of(100, 64, 500, 50), True),
    "plain, 12000 tokens": (layout_of(0, 0, 0, 12_000), False),
}
"""Layouts, and whether their parts begin on pages of their own, as documents do and items do not."""


def pallas_tile() -> Tile:
    """Return the Pallas kernel's own tiles, for 16 heads of 128 over 8 KV heads in bfloat16."""
    backend = PallasTpuBackend(AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), BLOCK))
    rows = backend.block(STEP)
    return Tile(rows, backend.shape(rows).slots)


def visited_tiles(plan: SlotPlan, tile: Tile) -> list[set[int]]:
    """Return the KV tiles of every query tile, as the backends walk them."""
    batch = batch_of(plan)
    ranges = tile_ranges(batch, cut(spans(batch), tile.rows), tile.slots)
    return [{*range(a), *range(b, c)} for a, b, c in zip(*ranges, strict=True)]


def invariant_tiles(layout: ChunkLayout, tile: Tile) -> int:
    """Return the number of KV tiles that the query tiles visit if every part is a sequence of its own."""
    batch = own_sequences(batch_of(plan_slots(layout, BLOCK, aligned=True)), tile.slots)
    return int(tile_ranges(batch, cut(spans(batch), tile.rows), tile.slots).counts.sum())


def seen_tiles(layout: ChunkLayout, plan: SlotPlan, tile: Tile) -> tuple[list[set[int]], int]:
    """Return every query tile's KV tiles with a pair visible by the parts' names, and the number of visible pairs."""
    part, kv_tile = layout.chunk_ids, plan.slots // tile.slots
    seen, pairs = [], 0
    for first in range(0, len(layout), tile.rows):
        i = np.arange(first, min(first + tile.rows, len(layout)))[:, None]
        k = np.arange(i[-1, 0] + 1)
        visible = (k <= i) & ((part[k] == PREFIX_ID) | (part[k] == part[i]) | (part[i] == QUESTION_ID))
        seen.append(set(kv_tile[k[visible.any(0)]].tolist()))
        pairs += np.count_nonzero(visible)
    return seen, pairs


def causal_tiles(tokens: int, tile: Tile) -> int:
    """Return the number of KV tiles that a causal kernel visits on `tokens` tokens."""
    ends = np.minimum(np.arange(tile.rows, tokens + tile.rows, tile.rows), tokens)
    return int((-(-ends // tile.slots)).sum())


def measure(name: str, tile: Tile) -> dict[str, Any]:
    """Return one row of the table."""
    layout, aligned = WORKLOADS[name]
    plan, tokens = plan_slots(layout, BLOCK, aligned=aligned), len(layout)
    visited, (seen, pairs) = visited_tiles(plan, tile), seen_tiles(layout, plan, tile)
    total, causal = sum(map(len, visited)), causal_tiles(tokens, tile)
    return {
        "workload": name,
        "tokens": tokens,
        "tile_rows": tile.rows,
        "tile_slots": tile.slots,
        "visited": total,
        "seen": sum(map(len, seen)),
        "exact": visited == seen,
        "invariant": invariant_tiles(layout, tile),
        "causal": causal,
        "visited_percent": round(100 * total / causal, 2),
        "visible_pairs_percent": round(100 * pairs / (tokens * (tokens + 1) // 2), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    parser.add_argument("--png", metavar="FILE", type=Path, help="only draw a picture to FILE; needs matplotlib")
    args = parser.parse_args()
    if args.png is not None:
        draw(args.png)
        return
    rows = [measure(name, tile) for tile in (Tile(128, 128), pallas_tile()) for name in WORKLOADS]
    text = json.dumps(rows, indent=2)
    if args.json == "-":
        print(text)
    else:
        print(f"{'prompt':36} tokens     tile  visited    seen   causal  invariant  visited/causal  visible pairs")
        for r in rows:
            print(
                f"{r['workload']:36} {r['tokens']:6}  {r['tile_rows']}x{r['tile_slots']}  {r['visited']:7} {r['seen']:7}  "
                f"{r['causal']:7}  {r['invariant']:9}  {r['visited_percent']:13.2f}% {r['visible_pairs_percent']:13.2f}%"
            )
    if args.json and args.json != "-":
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    sys.exit(not all(r["exact"] for r in rows))


if __name__ == "__main__":
    main()
