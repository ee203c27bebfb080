"""Check the TPU kernels in Pallas' TPU interpreter against `reference`, over hundreds of random ragged batches.

    python -m tests.soak.tpu_interpret [--quick] [--json FILE|-]

Every batch is a step of several sequences (`chunkattn.testing.random_steps`): mixed prefill, decode and scoring rows,
chunks split over steps, empty and one-token chunks, holes and padding. The pool is full of NaN. Some batches run with the
interpreter's race detection. The exit status is 1 if a difference exceeds the tolerance, a race occurs, or the batches lack
the required cases: walks of three and more KV tiles, tiles without a mask, and more pieces of writes than are in flight at
once.
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

import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from chunkattn.backends import AttentionBatch
from chunkattn.backends.pallas_tpu import kernel
from chunkattn.backends.pallas_tpu.backend import PallasMetadata, PallasTpuBackend
from chunkattn.backends.pallas_tpu.blocks import TABLE, Blocks
from chunkattn.backends.pallas_tpu.write import DEPTH
from chunkattn.terminal.progress import timed
from chunkattn.testing import TOLERANCE, check_backend
from chunkattn.tools.bench.measure import round_name

SMALL = Blocks(512, 128, 2)
"""Tiles small enough that short sequences have several."""
FP8 = "float8_e4m3fn"


class Setting(NamedTuple):
    """Arguments of one call of `check_backend`, and its environment.

    Attributes:
        options: options of `check_backend`.
        cases: number of sets of sequences; each set is several batches.
        tiles: "small", or "chip" for the tiles of the table.
        watched: whether race detection is on.
        chip: chip that gives the number of cores and the tile sizes.
    """

    options: dict[str, Any]
    cases: int = 2
    tiles: str = "small"
    watched: bool = False
    chip: str = "v6e"


LONG = {"scale": 5}
"""Options for walks of several tiles in every case. Short sequences, of one or two tiles, cover the edges."""

SETTINGS = [
    Setting(LONG, 3),
    Setting({**LONG, "dtype": "bfloat16"}, 3),
    Setting({}, 3),
    Setting({"dtype": "bfloat16"}),
    Setting({**LONG, "head_dim": 64, "num_heads": 7, "num_kv_heads": 1, "dtype": "bfloat16"}),
    Setting({"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "block_size": 32}),
    Setting({**LONG, "head_dim": 256, "num_heads": 3, "num_kv_heads": 3}),
    Setting({"head_dim": 256, "num_heads": 2, "dtype": "bfloat16", "block_size": 64}),
    Setting({"num_heads": 16, "num_kv_heads": 2, "dtype": "bfloat16", "block_size": 128}, 1),
    Setting({"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "dtype": "bfloat16", "block_size": 256}, 1),
    Setting({**LONG, "window": 200}, 6),
    Setting({"window": 40, "dtype": "bfloat16"}, 3),
    Setting({**LONG, "weighs": True}, 3),
    Setting({"weighs": True, "dtype": "bfloat16", "head_dim": 64, "num_heads": 3, "num_kv_heads": 1}, 3),
    Setting({**LONG, "kv_dtype": FP8}),
    Setting({"kv_dtype": FP8, "dtype": "bfloat16", "block_size": 32}),
    Setting({"kv_dtype": FP8, "dtype": "bfloat16", "head_dim": 64}),
    Setting({"scale": 10}, 1, "chip"),
    Setting({"scale": 10, "dtype": "bfloat16"}, 1, "chip", chip="v5e"),
    Setting(LONG, 2, watched=True),
    Setting({**LONG, "dtype": "bfloat16", "kv_dtype": FP8}, 1, watched=True),
    Setting({}, 1, watched=True, chip="v5p"),
    Setting({**LONG, "weighs": True}, 1, watched=True),
]


class Seen:
    """Counts of the cases that a setting's batches covered."""

    def __init__(self) -> None:
        self.batches = self.walk = self.whole = self.pieces = 0

    def add(self, metadata: PallasMetadata, slots: int) -> None:
        """Count a step."""
        self.batches += 1
        tiles = np.concatenate([metadata.tiles[:, : metadata.num_tiles], metadata.decodes[:, : metadata.num_decodes]], axis=1)
        visits = tiles[kernel.FIRST_END] + tiles[kernel.SECOND_END] - tiles[kernel.SECOND_START]
        self.walk = max(self.walk, int(visits.max(initial=0)))
        sees_prefix = np.minimum(tiles[kernel.PREFIX_END], tiles[kernel.MIN_SLOT] + 1) // slots
        self.whole += int(np.minimum(sees_prefix, visits).sum())
        self.pieces = max(self.pieces, int(metadata.num_pieces.max(initial=0)))


class Races:
    """The race records of all kernel calls. The interpreter itself keeps only the last call's record."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self._made = interpret_pallas_call.RaceDetectionState

    def __enter__(self) -> Races:
        def make(*args: Any, **options: Any) -> Any:
            self.states.append(self._made(*args, **options))
            return self.states[-1]

        interpret_pallas_call.RaceDetectionState = make
        return self

    def __exit__(self, *_: object) -> None:
        interpret_pallas_call.RaceDetectionState = self._made

    @property
    def found(self) -> bool:
        """Return whether any call raced."""
        return any(state.races_found for state in self.states)


def run(setting: Setting, seed: int) -> dict[str, Any]:
    """Run one setting's batches; return the largest difference, and whether a race occurred (None without detection)."""
    seen = Seen()

    class Judged(PallasTpuBackend):
        chip = setting.chip
        most_rows = 32 if setting.tiles == "small" else PallasTpuBackend.most_rows
        table = dict.fromkeys(TABLE, (SMALL, SMALL)) if setting.tiles == "small" else TABLE
        cores = 2 if setting.chip == "v5p" else 1
        interpret = pltpu.InterpretParams(detect_races=setting.watched, num_cores_or_threads=cores)

        def build_metadata(self, batch: AttentionBatch) -> PallasMetadata:
            metadata = super().build_metadata(batch)
            seen.add(metadata, self.shape(self.block(len(batch.row_seq))).slots)
            return metadata

    options = {"head_dim": 128, "block_size": 16, "dtype": "float32", **setting.options}
    began, difference, error = time.perf_counter(), None, None
    with Races() as races:
        try:
            difference = check_backend(Judged, cases=setting.cases, seed=seed, **options)
        except AssertionError as wrong:
            error = str(wrong)
    return {
        **options,
        "tiles": setting.tiles,
        "chip": setting.chip,
        **vars(seen),
        "difference": difference,
        "error": error,
        "races": races.found if setting.watched else None,
        "watched_calls": len(races.states) if setting.watched else None,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run only the first two settings")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    results = []
    settings = SETTINGS[: 2 if args.quick else None]
    for seed, setting in enumerate(settings):
        with timed(f"{setting.tiles} tiles, {setting.chip}, {round_name(seed + 1, len(settings))}"):
            results.append(run(setting, seed))
        if args.json != "-":
            r = results[-1]
            asked = ", ".join(f"{k} {v}" for k, v in setting.options.items()) or "defaults"
            text = r["error"] or f"largest difference {r['difference']:.1e} of {TOLERANCE[r['dtype']]:.0e}"
            races = "" if r["races"] is None else ", RACES" if r["races"] else ", no races"
            print(
                f"{r['batches']:4} batches, {r['tiles']:5} tiles, {r['chip']}: {asked}: {text}{races}; "
                f"walks to {r['walk']}, {r['whole']} tiles whole, {r['pieces']} pieces ({r['seconds']} s)",
                flush=True,
            )
    if args.json == "-":
        print(json.dumps(results, indent=2))
    else:
        watched = sum(r["batches"] for r in results if r["races"] is not None)
        print(f"{sum(r['batches'] for r in results)} batches, {watched} of them with race detection")
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    long = [r for r in results if r["tiles"] == "small" and r.get("scale", 1) > 1]
    walked = all(r["walk"] >= 3 and r["pieces"] > DEPTH for r in long)
    thorough = args.quick or (walked and sum(r["whole"] for r in long) >= 50)
    if not thorough:
        seen = [{k: r[k] for k in ("walk", "whole", "pieces")} for r in long]
        print(f"the long batches were not long enough: {seen}", file=sys.stderr)
    sys.exit(not thorough or any(r["error"] or r["races"] for r in results))


if __name__ == "__main__":
    main()
