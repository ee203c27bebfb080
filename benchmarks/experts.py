"""Measure a layer of experts in Qwen3-30B-A3B's shape on a CPU, against what its weights and its operations take.

    python -m benchmarks.experts [--packed Q4_K]

The command computes one row, and compares it with reading the weights of its experts once; then many rows, and compares them
with a dense MLP of equal work. Rounds take turns, with other rows each. The weights are random, in bfloat16 or, with
`--packed`, in blocks of a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.cpu import library
from chunkattn.backends.cpu import packed as native
from chunkattn.models.experts import mix, route
from chunkattn.models.linear import gated, multiply, multiply_several, rows_dtype
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.spec import Experts
from chunkattn.tools.bench.random_gguf import random_rows

HIDDEN, SPEC = 2048, Experts(count=128, used=8, size=768)
WIDTH = SPEC.used * SPEC.size
"""Width of a dense MLP whose rows take the operations of an expert layer's."""
DTYPE = jnp.dtype("bfloat16")
ROUNDS = 8
"""Inputs that take turns."""


def weight(shape: tuple[int, ...], form: str | None, seed: int) -> Weight:
    """Return random weights, `[out, in]` or `[experts, out, in]`."""
    if form is None:
        return jax.random.normal(jax.random.key(seed), shape, DTYPE) * shape[-1] ** -0.5
    *stacked, outputs, depth = shape
    rows = random_rows(form, (int(np.prod(shape[:-1])), depth), np.random.default_rng(seed))
    data = np.zeros(native.FORMATS[form].packed_bytes(len(rows), depth), np.uint8)
    native.pack(form, rows, data)
    return Packed(jnp.asarray(data), form, outputs, depth, 2, stacked[0] if stacked else None)


def timed(calls: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median wall time and CPU time of each call in milliseconds; calls take turns, and the first round warms up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call(number % ROUNDS))  # type: ignore[no-untyped-call]
            if number:
                times[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    return {
        name: dict(zip(("wall_ms", "cpu_ms"), map(statistics.median, zip(*taken, strict=True)), strict=True))
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of many rows; one row has 20 times as many")
    parser.add_argument("--packed", choices=native.FORMATS, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    assert library.refusal() is None, library.refusal()
    inward, outward = (SPEC.size, HIDDEN), (HIDDEN, SPEC.size)
    router = weight((SPEC.count, HIDDEN), None, 0)
    experts = [weight((SPEC.count, *shape), args.packed, n) for n, shape in enumerate((inward, inward, outward), 1)]
    dense = [weight(shape, args.packed, n) for n, shape in enumerate(((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), 4)]

    @jax.jit
    def layer(x: jax.Array, router: Weight, gate: Weight, up: Weight, down: Weight) -> jax.Array:
        chosen, factors = route(multiply(x, router), SPEC)
        return mix(x, chosen, factors, gate, up, down, SPEC, DTYPE)

    @jax.jit
    def mlp(x: jax.Array, gate: Weight, up: Weight, down: Weight) -> jax.Array:
        return multiply(gated(*multiply_several(x, [gate, up]), rows_dtype([down], DTYPE)), down)

    row_bytes = sum(each.nbytes for each in experts) * SPEC.used // SPEC.count
    blocks = [np.full(row_bytes // 8, n, np.uint64) for n in range(ROUNDS)]
    threads = ThreadPoolExecutor(count := len(os.sched_getaffinity(0)))

    def read(number: int) -> list[np.uint64]:
        return list(threads.map(np.bitwise_or.reduce, np.array_split(blocks[number], count)))

    results = []
    for rows in (1, args.rows):
        x = [jax.random.normal(jax.random.key(100 + n), (rows, HIDDEN), DTYPE) for n in range(ROUNDS)]
        calls: dict[str, Callable[[int], Any]] = {"experts": lambda n, x=x: layer(x[n], router, *experts)}  # type: ignore[misc]
        if rows == 1:
            calls["read"] = read
        calls["dense"] = lambda n, x=x: mlp(x[n], *dense)  # type: ignore[misc]
        taken = timed(calls, args.rounds * (20 if rows == 1 else 1))
        results.append({"rows": rows, "mib_of_a_row": row_bytes / 2**20, **taken})
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(f"{result['rows']} rows" + (f", {result['mib_of_a_row']:.0f} MiB of weights" if result["rows"] == 1 else ""))
        for name, taken in result.items():
            if isinstance(taken, dict):
                ratios = ", ".join(f"{result['experts'][kind] / taken[kind]:.2f} x its {kind[:-3]}" for kind in taken)  # type: ignore[index]
                print(f"  {name:8} wall {taken['wall_ms']:8.2f} ms  CPU {taken['cpu_ms']:8.2f} ms  experts take {ratios}")


if __name__ == "__main__":
    main()
