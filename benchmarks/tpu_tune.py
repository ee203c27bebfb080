"""Choose the tile sizes of the TPU kernels: `chunkattn.backends.pallas_tpu.blocks.TABLE`.

    make .cache/libtpu/.installed    # the libtpu of the installed JAX
    PYTHONPATH=.cache/libtpu python -m benchmarks.tpu_tune [--chip v6e] [--head-dim 128] [--json FILE]

The command compiles every candidate. Its static schedule gives the bundles of a KV tile (with and without a mask), of the
code around it, and of a query tile. The host's own metadata of three workloads give the number of each in a step: a part of
2,000 + 500 x 20 tokens of scoring, 8 documents of 500 with a question of 50, and 2,048 causal rows over 6,144 cached rows.
The candidate with the smallest total of the three sums, each relative to the best, wins.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

from benchmarks.tpu.schedule import dump_schedules

SCHEDULES = dump_schedules()

import numpy as np  # noqa: E402

from benchmarks.tpu.attention import Case, compiled_backend, lower, walk_of  # noqa: E402
from benchmarks.tpu.chips import CHIPS  # noqa: E402
from benchmarks.tpu.schedule import read_schedules  # noqa: E402
from chunkattn.backends import AttentionBatch  # noqa: E402
from chunkattn.backends.pallas_tpu import kernel  # noqa: E402
from chunkattn.backends.pallas_tpu.backend import PallasTpuBackend  # noqa: E402
from chunkattn.backends.pallas_tpu.blocks import Blocks  # noqa: E402
from chunkattn.terminal.progress import timed  # noqa: E402

FOLDED, SLOTS, TOGETHER = (256, 512), (256, 512, 1024), (1, 4)
HEADS = {64: (14, 2), 128: (16, 8), 256: (16, 8)}
"""Query and KV heads of a usual model, by head size."""
PAGES = (16, 128)
"""Page sizes measured: a small size and a large size."""
ROWS = 2048


def step_of(block_size: int, spans: list[tuple[int, int, int, int]]) -> AttentionBatch:
    """Return a step of `ROWS` rows from spans `(first slot, rows, first row start, prefix end)`, each a sequence."""
    row_seq, row_slot, row_start = np.zeros((3, ROWS), np.int32)
    prefix_end = np.zeros(len(spans), np.int32)
    at = 0
    for seq, (slot, rows, start, prefix) in enumerate(spans):
        rows = min(rows, ROWS - at)
        row_seq[at : at + rows], row_slot[at : at + rows] = seq, np.arange(slot, slot + rows)
        row_start[at : at + rows], prefix_end[seq] = start, prefix
        at += rows
    width = int(row_slot.max()) // block_size + 1
    table = np.zeros((len(spans), width), np.int32)
    return AttentionBatch(at, row_seq, row_slot, row_start, prefix_end, table, np.full_like(table, block_size), block_size)


def workloads(block_size: int) -> dict[str, AttentionBatch]:
    """Return the steps that count toward the sum of costs."""
    items = step_of(block_size, [(2000, ROWS, 0, 2000)])
    items.row_start[:] = 2000 + np.arange(ROWS) // 20 * 20
    page = 512
    documents = [(page * (n + 1), 500, page * (n + 1), 200) for n in range(4)]
    return {
        "items": items,
        "documents": step_of(block_size, [*documents, (page * 9, 48, 0, 200)]),
        "causal": step_of(block_size, [(6144, ROWS, 0, 0)]),
    }


def cost(backend: PallasTpuBackend, bundles: dict[str, float], batch: AttentionBatch) -> float:
    """Return the bundles of a step's prefill rows."""
    metadata = backend.build_metadata(batch)
    tiles = metadata.tiles[:, : int(metadata.num_tiles)]
    visits = tiles[kernel.FIRST_END] + tiles[kernel.SECOND_END] - tiles[kernel.SECOND_START]
    # KV tiles on the diagonal or across a chunk's edge need a mask: about two per query tile.
    masked = np.minimum(visits, 2)
    total = visits * bundles["around"] + masked * bundles["masked"] + (visits - masked) * bundles["clear"]
    return float((total + bundles["query_tile"]).sum())


def measure(chip: str, head_dim: int, block_size: int, blocks: Blocks) -> dict[str, Any] | None:
    """Compile and measure one candidate; return None if it does not compile (vector memory runs out)."""
    heads, kv_heads = HEADS[head_dim]
    case = Case(chip, head_dim, block_size, heads=heads, kv_heads=kv_heads, rows=ROWS, pages=65536 // block_size)
    cls = compiled_backend(chip)
    cls.table = {(chip, head_dim): (blocks, blocks)}  # type: ignore[attr-defined]
    backend = cls(case.spec)
    try:
        lower(case, backend).compile()
    except Exception as error:  # the compiler may raise anything
        print(f"{chip} {head_dim} {block_size} {blocks}: {str(error).splitlines()[0]}")
        read_schedules(SCHEDULES)
        return None
    schedule = read_schedules(SCHEDULES)["chunk_attention"]
    shape = backend.shape(backend.block(ROWS))
    walk, turns = walk_of(schedule), shape.heads // shape.together
    bundles = {
        "clear": walk.clear.bundles * turns,
        "masked": walk.masked.bundles * turns + walk.mask,
        "around": walk.around,
        "query_tile": walk.setup,
    }
    cores = shape.head_blocks
    costs = {name: cost(backend, bundles, batch) / cores for name, batch in workloads(block_size).items()}
    return {
        "chip": chip,
        "head_dim": head_dim,
        "block_size": block_size,
        **blocks._asdict(),
        "tile": (shape.rows, shape.slots, shape.together),
        **bundles,
        "costs": {name: round(value) for name, value in costs.items()},
    }


def choose(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the candidate with the smallest sum of relative costs, and set the `score` of every candidate."""
    least = {name: min(f["costs"][name] for f in results) for name in results[0]["costs"]}
    for f in results:
        f["score"] = round(sum(f["costs"][name] / least[name] for name in least) / len(least), 3)
    return min(results, key=lambda f: f["score"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, action="append", help="repeatable; default: all")
    parser.add_argument("--head-dim", type=int, choices=HEADS, action="append", help="repeatable; default: all")
    for name in Blocks._fields:
        parser.add_argument(f"--{name}", type=int, action="append", help="size to try; repeatable")
    parser.add_argument("--json", metavar="FILE", help="write every candidate to FILE as JSON")
    args = parser.parse_args()
    table, everything = {}, []
    for chip, head_dim in product(args.chip or CHIPS, args.head_dim or HEADS):
        best = []
        for block_size in PAGES:
            results, tiles = [], set()
            for blocks in map(Blocks._make, product(args.folded or FOLDED, args.slots or SLOTS, args.together or TOGETHER)):
                with timed(f"{chip}, head_dim {head_dim}, pages of {block_size}, {blocks}"):
                    result = measure(chip, head_dim, block_size, blocks)
                if result and result["tile"] not in tiles:
                    tiles.add(result["tile"])
                    results.append(result)
            chosen = choose(results)
            for f in sorted(results, key=lambda f: f["score"]):
                print(
                    f"{chip} {head_dim:3} {block_size:3}  {f['folded']:4} {f['slots']:4} {f['together']}  tile {f['tile']}  "
                    f"clear {f['clear']:6} masked {f['masked']:6} around {f['around']:5} query tile {f['query_tile']:5}  "
                    f"score {f['score']}",
                    flush=True,
                )
            best.append(Blocks(chosen["folded"], chosen["slots"], chosen["together"]))
            everything += results
        table[chip, head_dim] = tuple(best)
    print("TABLE = {")
    for key, blocks in table.items():
        print(f"    {key}: ({', '.join(f'Blocks{tuple(b)}' for b in blocks)}),")
    print("}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=2)


if __name__ == "__main__":
    main()
