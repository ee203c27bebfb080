"""Measure the parts of a step: the spans of the scheduler's textbook case, and the host's share of a step.

    python -m benchmarks.steps --running 64 --context 200 --geometry qwen3-0.6b

The textbook case is two requests of 250 and 300 tokens under a budget of 256 and spans of 128, step by step, compared with
one span per step. Then the command measures the host's work (admission, spans, tile ranges, metadata, bookkeeping) and the
device's, while `--running` requests generate and, every other step, a new prompt replaces one of them. The arrays of the
readouts are counted apart, because the host makes them while the device computes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from chunkattn.engine import readout
from chunkattn.engine.messages import GenerateRequest
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.geometry import make_core


def textbook() -> list[dict[str, Any]]:
    """Return the steps of two prompts."""
    core = make_core("small", 64, max_num_batched_tokens=256, long_prefill_token_threshold=128)
    rng = np.random.default_rng(0)
    for name, length in (("R1", 250), ("R2", 300)):
        core.add(GenerateRequest(name, make_layout([], [], rng.integers(0, 4096, length)), SamplingParams(max_tokens=1)))
    steps, build = [], core.builder.build

    def note(spans: list) -> Any:
        step = build(spans)
        steps.append(
            {
                "spans": ", ".join(f"{s.sample.request.request_id}[{s.start}:{s.end}]" for s in spans),
                "tokens": step.num_rows,
                "budget_used": step.num_rows / 256,
                "padding": len(step.arrays.token_ids) - step.num_rows,
            }
        )
        return step

    core.builder.build = note  # type: ignore[method-assign]
    while core.has_work:
        core.step()
    return steps


class Clock:
    """A sum of the time spent in some of an object's methods."""

    def __init__(self) -> None:
        self.spent = 0.0

    def watch(self, owner: object, name: str) -> None:
        """Time the method `name` of `owner` from now on."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args)
            finally:
                self.spent += time.perf_counter() - began

        setattr(owner, name, timed)


def host_share(geometry: str, running: int, context: int, steps: int, chunks: int) -> dict[str, float]:
    """Return the median milliseconds of a step and of the host's work in it."""
    per_request = (context + chunks * 16 + 2 * steps + 64) // 16
    options = {"max_num_seqs": running + 1, "enable_prefix_caching": True, "num_scheduler_steps": 1}
    core = make_core(geometry, running * per_request + 256, **options)
    rng = np.random.default_rng(0)

    def add(number: int) -> None:
        ids = rng.integers(0, 4096, context).tolist()
        size = context // (chunks + 1)
        parts = [ids[i * size : (i + 1) * size] for i in range(chunks + 1)]
        layout = make_layout(parts[0][: size // 2], parts[:-1], parts[-1]) if chunks else make_layout([], [], ids)
        params = SamplingParams(temperature=0, max_tokens=2 * steps, ignore_eos=True)
        core.add(GenerateRequest(str(number), layout, params))

    for number in range(running):
        add(number)
    while any(not s.output_ids for r in core.requests.values() for s in r.samples):
        core.step()
    device, readouts, plan, tables, commit = Clock(), Clock(), Clock(), Clock(), Clock()
    for name in ("forward", "sample", "fetch"):
        device.watch(core.runner, name)
    device.watch(core.runner.pool, "copy_pages")
    readouts.watch(readout, "sampling_blocks")
    for name in ("admit", "plan"):
        plan.watch(core.scheduler, name)
    tables.watch(core.builder, "build")
    commit.watch(core.scheduler.fills, "commit")
    parts: dict[str, list[float]] = {"placement and spans": [], "arrays, tile ranges": [], "commit": [], "the rest": []}
    totals, hosts, beside = [], [], []
    for step in range(steps + 4):
        if step % 2:
            core.abort(str(step // 2))
            add(running + step)
        device.spent = readouts.spent = plan.spent = tables.spent = commit.spent = 0.0
        began = time.perf_counter()
        core.step()
        totals.append(time.perf_counter() - began)
        beside.append(readouts.spent)
        hosts.append(totals[-1] - device.spent - readouts.spent)
        known = plan.spent, tables.spent, commit.spent
        for values, spent in zip(parts.values(), (*known, hosts[-1] - sum(known)), strict=True):
            values.append(spent)
    totals, hosts = totals[4:], hosts[4:]  # the first steps compile
    core_steps = {
        "step_ms": 1000 * statistics.median(totals),
        "host_ms": 1000 * statistics.median(hosts),
        "host_ms_p90": 1000 * sorted(hosts)[int(0.9 * len(hosts))],
    }
    split = {f"host_ms, {name}": 1000 * statistics.median(values[4:]) for name, values in parts.items()}
    split["readout arrays beside the device, ms"] = 1000 * statistics.median(beside[4:])
    return core_steps | {"host_share": core_steps["host_ms"] / core_steps["step_ms"]} | split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="small")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=4, help="chunks of every prompt; 0 for a plain prompt")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with timed("spans of two prompts"):
        steps = textbook()
    with timed(f"{args.running} sequences, {args.steps} steps"):
        host = host_share(args.geometry, args.running, args.context, args.steps, args.chunks)
    if args.json:
        print(json.dumps({"textbook": steps, "host": host}, indent=2))
        return
    print("250 and 300 tokens, budget 256, spans of 128\nstep  tokens  budget  padding  spans")
    for number, step in enumerate(steps, 1):
        print(f"{number:4}  {step['tokens']:6}  {step['budget_used']:6.1%}  {step['padding']:7}  {step['spans']}")
    spans = -(-250 // 128) + -(-300 // 128)
    print(f"{len(steps)} steps; one span a step: {spans}\n")
    print(f"{args.geometry}, {args.running} running, {args.context} tokens in {args.chunks} chunks each")
    share = f"{host['host_share']:.1%}"
    print(f"step {host['step_ms']:.1f} ms, host {host['host_ms']:.2f} ms (p90 {host['host_ms_p90']:.2f}), {share}")
    for name, value in host.items():
        if "," in name:
            print(f"  {name.partition(', ')[2]:22} {value:.2f} ms")


if __name__ == "__main__":
    main()
