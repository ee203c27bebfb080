"""Measure decode step time against the sequences per tile of few rows in the `xla` backend.

    python -m benchmarks.decode --geometry qwen3-0.6b --context 500 --batch 16 --decode-rows 1 4

The settings alternate step by step in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from transformers import Qwen3Config

import chunkattn.backends.xla as xla
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.geometry import GEOMETRIES, make_core
from chunkattn.tools.bench.measure import round_name


def start(core: EngineCore, batch: int, context: int, steps: int) -> None:
    """Bring `batch` sequences of `context` tokens to decoding, with everything compiled."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=steps + 10, ignore_eos=True)
    for i in range(batch):
        core.add(GenerateRequest(str(i), make_layout([], [], rng.integers(0, 700, context)), params))
    while any(s.num_tokens - s.num_computed != 1 for r in core.requests.values() for s in r.samples) or core.scheduler.waiting:
        core.step()
    core.step()


def choose(rows: int) -> None:
    """Set what is read when a step is built."""
    xla.few_runs = lambda: rows


def main() -> None:
    GEOMETRIES["demo"] = Qwen3Config.from_pretrained(DEMO_FOLDER)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="small")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--decode-rows", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pages = args.batch * (args.context + args.steps + 32) // 16 + args.batch
    settings, cores = args.decode_rows, []
    for setting in settings:
        choose(setting)
        options = {"max_num_batched_tokens": 2048, "max_num_seqs": max(8, args.batch), "kv_cache_dtype": args.kv_cache_dtype}
        options["num_scheduler_steps"] = 1
        with timed(f"rows {setting}, prompts of {args.batch} sequences"):
            cores.append(make_core(args.geometry, pages, dtype=args.dtype, backend="xla", **options))
            start(cores[-1], args.batch, args.context, args.steps)
    times: list[list[float]] = [[] for _ in cores]
    for number in range(args.steps):
        with timed(f"all settings, {round_name(number + 1, args.steps)}"):
            for setting, core, taken in zip(settings, cores, times, strict=True):
                choose(setting)
                began = time.perf_counter()
                core.step()
                taken.append(time.perf_counter() - began)
    rows_ms = [
        {"decode_rows": rows, "median_step_ms": round(1000 * statistics.median(taken), 2)}
        for rows, taken in zip(settings, times, strict=True)
    ]
    if args.json:
        print(json.dumps(rows_ms, indent=2))
        return
    print(f"{args.geometry}, {args.batch} sequences of {args.context} tokens\ndecode rows  median step ms")
    for r in rows_ms:
        print(f"{r['decode_rows']:11}  {r['median_step_ms']:14.2f}")


if __name__ == "__main__":
    main()
