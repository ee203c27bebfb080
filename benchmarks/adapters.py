"""Measure what adapters by request cost a decode: steps of one engine with them and of one without take turns.

    python -m benchmarks.adapters [--geometry qwen3-0.6b] [--rows 16] [--adapters 4] [--rank 16] [--steps 60] [--json FILE]

Weights and adapters are random, and every matrix of a layer has factors. The rows take the adapters in turn. The table has the
milliseconds of a step, with the sampling of its tokens, as medians, and the ratio of both with its quartiles over the pairs of
neighbouring steps. `idle` is the engine with adapters, of which no row names one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from chunkattn import SamplingParams, make_layout
from chunkattn.adapter_salt import salted
from chunkattn.backends import make_backend
from chunkattn.config import EngineConfig
from chunkattn.engine.adapters import LoadedAdapters
from chunkattn.engine.build import attention_spec, enable_compile_cache
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import GenerateRequest
from chunkattn.engine.runner import Runner
from chunkattn.models.adapter_slots import AdapterSlots, SlotShape
from chunkattn.models.adapters import Adapter, Delta, layer_matrices
from chunkattn.models.decoder import Decoder, random_decoder
from chunkattn.models.shards import ONE_DEVICE
from chunkattn.models.spec import DecoderSpec
from chunkattn.terminal.progress import say
from chunkattn.tools.bench.geometry import spec_of

PROMPT = 100


def random_adapter(spec: DecoderSpec, rank: int, seed: int) -> Adapter:
    """Return an adapter of every matrix of the layers."""
    rng, deltas = np.random.default_rng(seed), {}
    for name, shape in layer_matrices(spec).items():
        a, b = rng.standard_normal((rank, shape[1]), np.float32), rng.standard_normal((shape[0], rank), np.float32)
        deltas[name, None] = Delta(a * shape[1] ** -0.5, b * 0.01, 1.0)
    return Adapter(Path(f"adapter-{seed}"), deltas)


def make_core(model: Decoder, args: argparse.Namespace, adapters: int) -> EngineCore:
    """Return an engine over a model, with a number of adapters."""
    options = {"max_num_seqs": args.rows, "max_num_batched_tokens": 512, "num_scheduler_steps": 1}
    config, loaded = EngineConfig(dtype="bfloat16", **options), None
    if adapters:
        shape = SlotShape(adapters, args.rank, layer_matrices(model.spec))
        slots = AdapterSlots(shape, model.dtype, ONE_DEVICE)
        listed = {f"a{seed}": random_adapter(model.spec, args.rank, seed) for seed in range(adapters)}
        loaded = LoadedAdapters(slots, model.spec, listed, is_open=False)
    backend = make_backend("auto", attention_spec(config, model.spec, model.dtype))
    pages = args.rows * (-(-(PROMPT + 3 * args.steps) // backend.spec.block_size) + 1)
    runner = Runner(model, backend, pages, config.max_logprobs, slots=loaded and loaded.slots)
    return EngineCore(runner, config, model.spec.max_model_len, None, loaded)


def fill(core: EngineCore, args: argparse.Namespace, name: str) -> None:
    """Give an engine its rows, and compute their prompts."""
    params = SamplingParams(temperature=0, max_tokens=2 * args.steps, ignore_eos=True)
    for row in range(args.rows):
        ids = np.random.default_rng(row).integers(0, 1000, PROMPT).tolist()
        adapter = f"a{row % args.adapters}" if name == "adapters" else None
        core.add(GenerateRequest(f"{name}{row}", make_layout([], [], ids), params, salt_key=salted(adapter, None)))
    while len(core.step()) < args.rows:
        pass


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of the steps, and the ratios."""
    enable_compile_cache()
    model = random_decoder(spec_of(args.geometry), jnp.dtype("bfloat16"))
    cores = {"none": make_core(model, args, 0), "adapters": make_core(model, args, args.adapters)}
    cores["idle"] = cores["adapters"]
    spent: dict[str, list[float]] = {}
    for pair in (("none", "adapters"), ("none", "idle")):
        for name in pair:
            fill(cores[name], args, name)
        for _ in range(args.steps):
            for name in pair:
                began = time.perf_counter()
                cores[name].step()
                spent.setdefault(name if name != "none" else f"none beside {pair[1]}", []).append(time.perf_counter() - began)
        for name in pair:
            for request_id in list(cores[name].requests):
                cores[name].abort(request_id)
        say(f"{pair[1]}: measured")
    result: dict[str, Any] = {name: round(1000 * float(np.median(values)), 2) for name, values in spent.items()}
    for name in ("adapters", "idle"):
        ratios = np.asarray(spent[name]) / np.asarray(spent[f"none beside {name}"])
        result[f"ratio of {name}"] = [round(float(value), 3) for value in np.quantile(ratios, (0.5, 0.25, 0.75))]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", help="write JSON to FILE")
    args = parser.parse_args()
    result = measure(args)
    for name, value in result.items():
        print(f"{name:22} {value}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
