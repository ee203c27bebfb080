"""Measure the fixed cost of a decode step: a model with the layers, heads and vocabulary of a geometry, but narrow matrices.

    python -m benchmarks.step_cost --geometry qwen3-0.6b --dtype bfloat16 float32 --batch 1 16

The weights of such a model take little time to arrive from memory, so a step takes what does not shrink with the weights:
small operations, wake-ups of threads, the readout of tokens, and Python. The engines alternate step by step in one process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from copy import deepcopy
from typing import NamedTuple

from benchmarks.decode import start
from chunkattn.engine.core import EngineCore
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.geometry import GEOMETRIES, make_core
from chunkattn.tools.bench.measure import round_name


class Cost(NamedTuple):
    """Cost of one step.

    Attributes:
        wall_ms: time until the tokens are there.
        cpu_ms: processor time of all threads.
        sleeps: number of times that a thread went to sleep, each followed by a wake-up.
    """

    wall_ms: float
    cpu_ms: float
    sleeps: int


def one_step(core: EngineCore) -> Cost:
    """Run one step and return its cost."""
    sleeps = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    cpu, began = time.process_time(), time.perf_counter()
    core.step()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Cost(1000 * wall, 1000 * cpu, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - sleeps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=[*GEOMETRIES], default="qwen3-0.6b")
    parser.add_argument("--width", type=int, default=64, help="hidden size; the MLP is three times as wide")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    narrow = deepcopy(GEOMETRIES[args.geometry])
    narrow.hidden_size, narrow.intermediate_size = args.width, 3 * args.width
    GEOMETRIES["narrow"] = narrow
    settings = [(dtype, batch) for dtype in args.dtype for batch in args.batch]
    cores = []
    for dtype, batch in settings:
        pages = batch * ((args.context + args.steps + 32) // 16 + 1)
        with timed(f"{dtype}, prompts of {batch} sequences"):
            cores.append(make_core("narrow", pages, dtype=dtype, max_num_seqs=max(8, batch), num_scheduler_steps=1))
            start(cores[-1], batch, args.context, args.steps)
    costs: list[list[Cost]] = [[] for _ in cores]
    for number in range(args.steps):
        with timed(f"all settings, {round_name(number + 1, args.steps)}"):
            for core, of_core in zip(cores, costs, strict=True):
                of_core.append(one_step(core))
    rows = []
    for (dtype, batch), of_core in zip(settings, costs, strict=True):
        wall, cpu, sleeps = zip(*of_core, strict=True)
        row = {"dtype": dtype, "batch": batch, "least_ms": min(wall), "median_ms": statistics.median(wall)}
        rows.append(row | {"median_cpu_ms": statistics.median(cpu), "mean_sleeps": statistics.mean(sleeps)})
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{args.geometry}, {args.width} wide, contexts of {args.context} tokens")
    print("dtype      batch  least ms  median ms  median CPU ms  sleeps a step")
    for r in rows:
        print(
            f"{r['dtype']:9}  {r['batch']:5}  {r['least_ms']:8.2f}  {r['median_ms']:9.2f}  "
            f"{r['median_cpu_ms']:13.2f}  {r['mean_sleeps']:13.1f}"
        )


if __name__ == "__main__":
    main()
