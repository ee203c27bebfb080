"""Times of one layer's attention by backend, page size and tile, against the device's peaks.

    python -m benchmarks.nvidia.kernel_times [--small]

The command prints JSON: the rates of matrix products and of reads that this device reaches, and each call's time with its
share of the rate that bounds it. `benchmarks.gpu` runs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.nvidia.workloads import Call, calls
from chunkattn.backends import AttentionBackend, AttentionBatch, AttentionSpec, make_backend
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.bench.score import matmul_rate, read_rate
from chunkattn.errors import BackendError

PAGES = 16, 32, 64, 128
TILES = {False: ((128, 2), (64, 6), (64, 3)), True: ((128, 2), (64, 4), (64, 3))}
"""Slots and stages of the KV tile tried at head_dim 128, beside the backend's own, by whether a call decodes."""
_CALLS = 20
"""Calls of one round. A round's time hides the time that the host takes to start a call."""


def tiled(decodes: bool, slots: int, stages: int) -> type[PallasGpuBackend]:
    """Return the GPU backend with another KV tile.

    Args:
        decodes: whether the tile is that of decodes, else that of query tiles.
        slots: slots of the tile.
        stages: tiles in flight.
    """

    def shape(self: PallasGpuBackend, rows: int, *, states: bool) -> Shape:
        own = PallasGpuBackend.shape(self, rows, states=states)
        return replace(own, slots=slots, stages=stages) if states == decodes else own

    return type("PallasGpuBackend", (PallasGpuBackend,), {"shape": shape})


def settings(decodes: bool, *, small: bool) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield settings with a function that makes their backend from a spec.

    Args:
        decodes: whether the settings are for calls that decode.
        small: whether to yield one setting of each backend.
    """
    for name, pages in (("pallas_gpu", PAGES), ("xla", PAGES[:1])):
        for block_size in pages[: 1 if small else None]:
            yield {"backend": name, "block_size": block_size}, partial(make_backend, name)
    if not small:
        for slots, stages in TILES[decodes]:
            setting = {"backend": "pallas_gpu", "block_size": 64, "slots": slots, "stages": stages}
            yield setting, tiled(decodes, slots, stages)


def batch_of(call: Call, block_size: int) -> AttentionBatch:
    """Return the step of a call. Every sequence has pages of its own."""
    rows, pages = call.sequences * call.rows, -(-call.slots // block_size)
    padded = -(-rows // 128) * 128
    row_seq, row_slot, row_start = np.zeros((3, padded), np.int32)
    row_seq[:rows] = np.repeat(np.arange(call.sequences), call.rows)
    row_slot[:rows] = np.tile(call.row_slot(), call.sequences)
    row_start[:rows] = np.tile(call.row_start(), call.sequences)
    table = np.arange(call.sequences * pages, dtype=np.int32).reshape(call.sequences, pages)
    length = np.clip(call.slots - np.arange(pages) * block_size, 0, block_size).astype(np.int32)
    prefix = np.full(call.sequences, call.prefix, np.int32)
    return AttentionBatch(rows, row_seq, row_slot, row_start, prefix, table, np.tile(length, (call.sequences, 1)), block_size)


def measure(call: Call, backend: AttentionBackend, repeats: int) -> list[float]:
    """Return the seconds of a call in every round.

    Args:
        call: the call.
        backend: backend of the call's heads.
        repeats: number of rounds, after one that compiles.
    """
    spec, batch = backend.spec, batch_of(call, backend.spec.block_size)
    metadata = jax.device_put(backend.build_metadata(batch))
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (len(batch.row_seq), heads, spec.head_dim), spec.dtype)
        for key, heads in zip(keys, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True)
    )
    run = jax.jit(partial(backend.forward, scale=spec.head_dim**-0.5), donate_argnums=3)
    cache = backend.allocate(batch.block_tables.size)
    found = []
    for number in range(1 + repeats):
        began = time.perf_counter()
        for _ in range(_CALLS if number else 1):
            out, cache = run(q, k, v, cache, metadata)
        out.block_until_ready()
        found.append((time.perf_counter() - began) / _CALLS)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of every call")
    parser.add_argument("--small", action="store_true", help="a few rows, to see that the command runs")
    args = parser.parse_args()
    products, reads = matmul_rate("bfloat16"), read_rate(16 if args.small else None)
    found = []
    for call in calls(small=args.small):
        for setting, make in settings(call.decodes, small=args.small):
            heads = (call.heads, call.kv_heads, call.head_dim)
            row: dict[str, Any] = {**setting, "call": call.name}
            try:
                backend = make(AttentionSpec(*heads, jnp.dtype("bfloat16"), setting["block_size"]))
                seconds = measure(call, backend, args.repeats)
            except (BackendError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                found.append(row | {"error": str(error).strip().splitlines()[0]})
                continue
            best = statistics.median(seconds)
            needed = call.bytes / reads if call.decodes else call.flops / products
            row |= {"seconds": seconds, "median_s": best, "peak_share": needed / best}
            found.append(row | {"bound": "memory" if call.decodes else "products"})
    print(json.dumps({"matmul_flops": products, "read_bytes_per_s": reads, "calls": found}))


if __name__ == "__main__":
    main()
