"""Compile every step program of an engine for a TPU that is absent, and count what a first start takes.

    make .cache/libtpu/.installed    # the libtpu of the installed JAX
    PYTHONPATH=.cache/libtpu python -m benchmarks.tpu_start [--chip v6e] [--model qwen3-0.6b] [--rows 8 64 2048] [--json FILE|-]

An engine on the chip has one program for each token bucket and page-table bucket. The command compiles them one after the
other for all token buckets and the narrowest page table, and for one bucket with every other page table; the time of the
others is estimated from these. Times are those of this machine's processors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benchmarks.tpu  # noqa: F401  sets libtpu's environment
from benchmarks.aot import MODELS, Step, planned
from benchmarks.tpu.chips import CHIPS
from benchmarks.tpu.step import WIDEST, compile_step
from chunkattn.backends.pallas_tpu.backend import PallasTpuBackend
from chunkattn.config import EngineConfig
from chunkattn.engine.step_sizes import buckets
from chunkattn.terminal.progress import say

FORMER = 32
"""Pages of the narrowest page table that every backend had once."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the programs of an engine, and the seconds that those compiled took."""
    pages = planned(args.model, CHIPS[args.chip].hbm_bytes).num_pages
    widest = min(1 << (pages - 1).bit_length(), WIDEST)
    sizes = buckets(8, EngineConfig().max_num_batched_tokens, 2)
    widths = {
        name: buckets(first, widest, 8) for name, first in (("former", FORMER), ("now", PallasTpuBackend.narrowest_table))
    }
    narrowest, *wider = widths["now"]
    cases = [(rows, narrowest) for rows in args.rows or sizes] + [(sizes[0], width) for width in wider]
    programs = []
    for rows, width in cases:
        result = compile_step(Step(args.chip, args.model, rows, width=width))
        if not result["compiled"]:
            raise RuntimeError(f"{rows} rows, {width} pages: {result['error']}")
        programs.append({name: result[name] for name in ("rows", "width", "seconds", "fits")})
        say(json.dumps(programs[-1]))
    return {
        "chip": args.chip,
        "model": args.model,
        "programs": {name: len(sizes) * len(listed) for name, listed in widths.items()},
        "page_tables": widths,
        "of_the_first_page_table_s": round(sum(row["seconds"] for row in programs if row["width"] == narrowest), 1),
        "compiled": programs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--rows", nargs="+", type=int, help="token buckets to compile; by default all")
    parser.add_argument("--json", help="write JSON to FILE; - prints it")
    args = parser.parse_args()
    text = json.dumps(measure(args), indent=2)
    if args.json in (None, "-"):
        print(text)
    else:
        Path(args.json).write_text(text)


if __name__ == "__main__":
    main()
