"""Measure a model with recurrent layers: a decode against its bytes, prefill against its length, questions on one state.

    python -m benchmarks.hybrids decode [--context 100] [--steps 20]
    python -m benchmarks.hybrids prefill [--lengths 1500 3000 6000 12000] [--rounds 3]
    python -m benchmarks.hybrids decide [--state 8000] [--questions 50] [--rounds 3] [--transformers 1]

Weights are random, in the shape of Qwen3.5-0.8B. `decode` reads the memory's rate in turn with the steps. `prefill` has a
decoder whose layers are all recurrent, and counts the products of the recurrence from the walks of every step. `decide` scores
questions behind one state, cold and warm, and runs the steps of the warm call again by themselves. With `--transformers`, its
model of the same shape answers that many whole prompts in every round, as its pipelines do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.recurrence import BLOCK, RecurrentSpec
from chunkattn.config import EngineConfig
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest, ScoreRequest
from chunkattn.engine.step import Step
from chunkattn.models.mixers import GatedDeltaNet
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.progress import say, timed
from chunkattn.tools.bench import geometry
from chunkattn.tools.bench.peak_rates import read_rate

SHAPE = "qwen3.5-0.8b"


def make_core(**options: Any) -> EngineCore:
    """Return an engine over random weights, with room for the benchmarks."""
    return geometry.make_core(SHAPE, 2048, max_num_seqs=64, **options)


@contextmanager
def watched(core: EngineCore) -> Iterator[list[Step]]:
    """Collect the steps that an engine builds."""
    steps, build = list[Step](), core.builder.build

    def building(spans: Any) -> Step:
        steps.append(build(spans))
        return steps[-1]

    core.builder.build = building  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        core.builder.build = build  # type: ignore[method-assign]


def finish(core: EngineCore) -> float:
    """Run an engine until it has no work, and return the seconds."""
    began = time.perf_counter()
    while core.requests:
        core.step()
    return time.perf_counter() - began


def products(spec: RecurrentSpec, steps: list[Step]) -> int:
    """Return the multiplications of one recurrent layer over steps, as the kernel does them.

    Every row reads the state twice and the rows of its block before it, and every whole block is written to the state.
    """
    total = 0
    for step in steps:
        for _, count, at, *_ in np.asarray(step.arrays.walks).tolist():
            before = sum((at + row) % BLOCK for row in range(count))
            blocks = (at + count) // BLOCK - at // BLOCK
            state = spec.key_dim * spec.value_dim
            pairs = (before + count) * (2 * spec.key_dim + 2 * spec.value_dim)
            total += spec.value_heads * (2 * count * state + pairs + blocks * BLOCK * state)
    return total


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a decode of one, and the share of what its bytes allow."""
    core = make_core(max_num_batched_tokens=128)
    ids, params = list(range(1, args.context + 1)), SamplingParams(temperature=0, max_tokens=4 * args.steps, ignore_eos=True)
    core.add(GenerateRequest("a", make_layout([], [], ids), params))
    while not core.step():
        pass
    times, rates = list[float](), list[float]()
    for _ in range(args.steps):
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
        rates.append(read_rate(repeats=1))
    runner = core.runner
    assert runner.states is not None
    states = sum(cache.slots.state[0].nbytes for cache in runner.states.caches)
    kv = args.context * runner.pool.page_bytes // core.limits.block_size
    needed, step, rate = runner.weight_bytes + states + kv, statistics.median(times), statistics.median(rates)
    share = needed / rate / step
    return {"step ms": round(1e3 * step, 1), "MiB": needed >> 20, "GB/s": round(rate / 1e9, 1), "share": round(share, 3)}


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Return the microseconds and the products of a token by the length of the prompt, without attention layers."""
    spec = geometry.spec_of(SHAPE)
    recurrent = next(layer for layer in spec.layers if isinstance(layer.mixer, GatedDeltaNet))
    model = geometry.random_decoder(replace(spec, layers=(recurrent,) * args.layers), jnp.dtype("bfloat16"))
    options = EngineConfig(dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=512)
    core = geometry.core_of(model, options, 2048)
    spent: dict[int, list[float]] = {length: [] for length in args.lengths}
    counted: dict[int, int] = {}
    rng = np.random.default_rng(0)
    for number in range(args.rounds + 1):
        for length in args.lengths:
            ids = rng.integers(0, 1000, length).tolist()
            core.add(GenerateRequest(str(length), make_layout([], [], ids), SamplingParams(max_tokens=1, temperature=0)))
            with watched(core) as steps:
                seconds = finish(core)
            if number:  # the first round compiles
                spent[length].append(seconds)
            assert core.runner.states is not None
            counted[length] = products(core.runner.states.recurrence.spec, steps)
            core.reset_prefix_cache()
        say(f"round {number} of {args.rounds}")
    return {
        f"{length} tokens": {
            "us a token": round(1e6 * statistics.median(spent[length]) / length, 1),
            "products a token": round(counted[length] / length),
        }
        for length in args.lengths
    }


def load_transformers() -> Callable[[list[int]], None]:
    """Return a function that computes the logits after a whole prompt with transformers' model of the same shape."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(geometry.GEOMETRIES[SHAPE], dtype=torch.bfloat16).eval()

    def run(ids: list[int]) -> None:
        with torch.no_grad():
            model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)

    return run


def decide(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens and seconds of questions behind one state: cold, again, and other questions on it."""
    core = make_core(max_num_batched_tokens=512)
    rng = np.random.default_rng(0)
    state = rng.integers(0, 1000, args.state).tolist()

    def ask(name: str) -> tuple[float, list[Step]]:
        for number in range(args.questions):
            question = rng.integers(0, 1000, args.tokens).tolist()
            layout = make_layout(state, [], question)
            row = np.asarray([len(layout) - 1])
            core.add(ScoreRequest(f"{name}{number}", layout, row, ((3, 4),), share_prefix=True))
        with watched(core) as steps:
            seconds = finish(core)
        return seconds, steps

    def alone(steps: list[Step]) -> float:
        """Seconds of the device for the same steps."""
        began = time.perf_counter()
        for step in steps:
            jax.block_until_ready(core.runner.forward(step.arrays))  # type: ignore[no-untyped-call]
        return time.perf_counter() - began

    peer = load_transformers() if args.transformers else None
    with timed("compiling"):
        ask("warm-up")
    core.reset_prefix_cache()
    cold, cold_steps = ask("cold")
    warm, bare, peers = list[float](), list[float](), list[float]()
    computed = 0
    for number in range(args.rounds):
        seconds, steps = ask(f"warm{number}-")
        computed = sum(step.num_rows for step in steps)
        warm.append(seconds)
        bare.append(alone(steps))
        for _ in range(args.transformers):
            began = time.perf_counter()
            assert peer is not None
            peer([*state, *rng.integers(0, 1000, args.tokens).tolist()])
            peers.append(time.perf_counter() - began)
        say(f"round {number + 1} of {args.rounds}")
    facts: dict[str, Any] = (
        {}
        if not peers
        else {
            "transformers, a question s": round(statistics.median(peers), 1),
            "transformers / cold": round(args.questions * statistics.median(peers) / cold, 1),
            "transformers / warm": round(args.questions * statistics.median(peers) / statistics.median(warm), 1),
        }
    )
    return facts | {
        "tokens of the state": args.state,
        "tokens of the questions": args.questions * args.tokens,
        "computed cold": sum(step.num_rows for step in cold_steps),
        "computed warm": computed,
        "cold s": round(cold, 2),
        "warm s": round(statistics.median(warm), 3),
        "steps alone s": round(statistics.median(bare), 3),
        "warm / steps alone": [round(a / b, 3) for a, b in zip(sorted(warm), sorted(bare), strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("decode")
    one.add_argument("--context", type=int, default=100)
    one.add_argument("--steps", type=int, default=20)
    two = parts.add_parser("prefill")
    two.add_argument("--lengths", type=int, nargs="+", default=[1500, 3000, 6000, 12000])
    two.add_argument("--layers", type=int, default=6)
    two.add_argument("--rounds", type=int, default=3)
    three = parts.add_parser("decide")
    three.add_argument("--state", type=int, default=8000)
    three.add_argument("--questions", type=int, default=50)
    three.add_argument("--tokens", type=int, default=20)
    three.add_argument("--rounds", type=int, default=3)
    three.add_argument("--transformers", type=int, default=0)
    args = parser.parse_args()
    runs: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"decode": decode, "prefill": prefill, "decide": decide}
    for name, value in runs[args.part](args).items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
