"""The TPU kernels in Pallas' TPU interpreter against `reference`, over hundreds of random ragged batches.

    python -m benchmarks.tpu_interpret [--quick] [--json FILE|-]

Every batch is a step of several sequences (`chunkattn.testing.random_steps`): prefill, decode and scoring rows mixed,
chunks split over steps, empty and one-token chunks, holes, padding; the pool is full of NaN. Some run with the
interpreter's race detection. Exits with 1 when a difference is beyond the tolerance or something races.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from chunkattn.backends import AttentionBatch
from chunkattn.backends.pallas_blocks import TABLE, Blocks
from chunkattn.backends.pallas_tpu import PallasMetadata, PallasTpuBackend
from chunkattn.testing import TOLERANCE, check_backend

SMALL = Blocks(512, 128, 2)
"""Tiles small enough that short sequences have several."""
FP8 = "float8_e4m3fn"


class Setting(NamedTuple):
    """What `check_backend` is asked, and how.

    Attributes:
        options: of `check_backend`.
        cases: sets of sequences; each is several batches.
        tiles: "small", or "chip": those of the table.
        watched: with race detection.
        chip: whose cores and tiles.
    """

    options: dict[str, Any]
    cases: int = 2
    tiles: str = "small"
    watched: bool = False
    chip: str = "v6e"


SETTINGS = [
    Setting({}, 4),
    Setting({"dtype": "bfloat16"}, 4),
    Setting({"head_dim": 64, "num_heads": 7, "num_kv_heads": 1, "dtype": "bfloat16", "block_size": 32}),
    Setting({"head_dim": 64, "num_heads": 9, "num_kv_heads": 3}),
    Setting({"head_dim": 256, "num_heads": 3, "num_kv_heads": 3, "block_size": 32}),
    Setting({"head_dim": 256, "num_heads": 2, "dtype": "bfloat16", "block_size": 64}),
    Setting({"num_heads": 16, "num_kv_heads": 2, "dtype": "bfloat16", "block_size": 128}, 1),
    Setting({"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "dtype": "bfloat16", "block_size": 256}, 1),
    Setting({"window": 19}, 3),
    Setting({"window": 40, "dtype": "bfloat16", "soft_cap": 3.0}, 3),
    Setting({"soft_cap": 1.5}),
    Setting({"kv_dtype": FP8}),
    Setting({"kv_dtype": FP8, "dtype": "bfloat16", "block_size": 32}),
    Setting({"kv_dtype": FP8, "dtype": "bfloat16", "head_dim": 64}),
    Setting({}, 2, "chip"),
    Setting({"dtype": "bfloat16"}, 2, "chip", chip="v5e"),
    Setting({}, 2, watched=True),
    Setting({"dtype": "bfloat16", "kv_dtype": FP8}, 1, watched=True),
    Setting({}, 1, watched=True, chip="v5p"),
]


def run(setting: Setting, seed: int) -> dict[str, Any]:
    """One setting's batches: the largest difference, and whether anything raced (None: not watched)."""
    batches = 0

    class Judged(PallasTpuBackend):
        chip = setting.chip
        most_rows = 32 if setting.tiles == "small" else PallasTpuBackend.most_rows
        table = dict.fromkeys(TABLE, (SMALL, SMALL)) if setting.tiles == "small" else TABLE
        cores = 2 if setting.chip == "v5p" else 1
        interpret = pltpu.InterpretParams(detect_races=setting.watched, num_cores_or_threads=cores)

        def build_metadata(self, batch: AttentionBatch) -> PallasMetadata:
            nonlocal batches
            batches += 1
            return super().build_metadata(batch)

    options = {"head_dim": 128, "block_size": 16, "dtype": "float32", **setting.options}
    began, difference, error = time.perf_counter(), None, None
    try:
        difference = check_backend(Judged, cases=setting.cases, seed=seed, **options)
    except AssertionError as wrong:
        error = str(wrong)
    races = bool(interpret_pallas_call.races.races_found) if setting.watched else None
    return {
        **options,
        "tiles": setting.tiles,
        "chip": setting.chip,
        "batches": batches,
        "difference": difference,
        "error": error,
        "races": races,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first two settings")
    parser.add_argument("--json", metavar="FILE", help="write the results there; - is standard output, without the table")
    args = parser.parse_args()
    results = []
    for seed, setting in enumerate(SETTINGS[: 2 if args.quick else None]):
        results.append(run(setting, seed))
        if args.json != "-":
            r = results[-1]
            asked = ", ".join(f"{k} {v}" for k, v in setting.options.items()) or "defaults"
            seen = r["error"] or f"largest difference {r['difference']:.1e} of {TOLERANCE[r['dtype']]:.0e}"
            races = "" if r["races"] is None else ", RACES" if r["races"] else ", no races"
            print(f"{r['batches']:4} batches, {r['tiles']:5} tiles, {r['chip']}: {asked}: {seen}{races} ({r['seconds']} s)")
    if args.json == "-":
        print(json.dumps(results, indent=2))
    else:
        watched = sum(r["batches"] for r in results if r["races"] is not None)
        print(f"{sum(r['batches'] for r in results)} batches, {watched} of them with race detection")
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(r["error"] or r["races"] for r in results))


if __name__ == "__main__":
    main()
