"""Measure step time against the size of the KV pool, to detect a pool that is copied.

    python -m benchmarks.pool_size

The command decodes 8 sequences over a small and a large pool, alternating step by step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.geometry import make_core


def start(core: EngineCore, steps: int) -> None:
    """Bring 8 sequences to decoding, with everything compiled."""
    rng = np.random.default_rng(0)
    for i in range(8):
        layout = make_layout([], [], rng.integers(0, 1000, 100))
        params = SamplingParams(temperature=0, max_tokens=steps + 10, ignore_eos=True)
        core.add(GenerateRequest(str(i), layout, params))
    for _ in range(5):
        core.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="small")
    parser.add_argument("--pages", type=int, nargs=2, default=(512, 32768))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cores = [make_core(args.geometry, pages, dtype=args.dtype, max_num_batched_tokens=1024) for pages in args.pages]
    for core, pages in zip(cores, args.pages, strict=True):
        with timed(f"{pages} pages, prompts"):
            start(core, args.steps)
    times: list[list[float]] = [[], []]
    with timed(f"{args.steps} steps of both pools"):
        for _ in range(args.steps):
            for core, taken in zip(cores, times, strict=True):
                began = time.perf_counter()
                core.step()
                taken.append(time.perf_counter() - began)
    rows = []
    for core, pages, taken in zip(cores, args.pages, times, strict=True):
        pool = sum(a.nbytes for layer in core.runner.pool.caches for a in layer)
        rows.append({"pages": pages, "pool_mib": pool / 2**20, "median_step_ms": 1000 * statistics.median(taken)})
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("pages   pool MiB  median step ms")
    for r in rows:
        print(f"{r['pages']:5}  {r['pool_mib']:9.1f}  {r['median_step_ms']:14.2f}")
    ratio = rows[1]["median_step_ms"] / rows[0]["median_step_ms"]
    print(f"ratio {ratio:.2f} for a pool {args.pages[1] / args.pages[0]:.0f} times as large")


if __name__ == "__main__":
    main()
