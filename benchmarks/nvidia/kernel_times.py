"""Times of one layer's attention by backend, page size and tile, and the rates that this device reaches.

    python -m benchmarks.nvidia.kernel_times [--rates | --setting N] [--small]

The command prints lines of JSON: first the rates of matrix products and of reads, then each call's times as soon as they are
known. `benchmarks.gpu` runs it once for the rates and once for each setting, because a kernel that hangs or breaks the device
ends its process. Standard error names a call before it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.nvidia.workloads import CALLS, Call, Setting, calls, settings
from chunkattn.backends import AttentionBackend, AttentionBatch, AttentionSpec, make_backend
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.pallas_gpu.shape import Shape
from chunkattn.config import EngineConfig
from chunkattn.engine.scheduler import EXTRA_SPANS
from chunkattn.engine.step_sizes import SMALLEST_STEP, bucket_for, buckets
from chunkattn.errors import BackendError
from chunkattn.tools.bench.peak_rates import matmul_rate, read_rate

BUDGET = 8192
"""Token budget of a step, which limits the rows of a call."""
LONGEST = 32768
"""Slots of the longest sequence that the engine's page tables hold."""
TRACEBACK_LINES = 40


def tiled(setting: Setting) -> type[PallasGpuBackend]:
    """Return the GPU backend with the KV tile of a setting."""
    assert setting.slots
    assert setting.stages
    slots, stages = setting.slots, setting.stages

    def shape(self: PallasGpuBackend, rows: int, *, states: bool) -> Shape:
        shape_of_card = PallasGpuBackend.shape(self, rows, states=states)
        return replace(shape_of_card, slots=slots, stages=stages) if states == setting.states else shape_of_card

    return type("PallasGpuBackend", (PallasGpuBackend,), {"shape": shape})


def make(setting: Setting, spec: AttentionSpec) -> AttentionBackend:
    """Return the backend of a setting.

    Raises:
        BackendError: the backend cannot serve `spec` on this device.
    """
    if setting.slots is None:
        return make_backend(setting.backend, spec)
    kind = tiled(setting)
    if (refusal := kind.supports(spec)) is not None:
        raise BackendError(refusal)
    return kind(spec)


def uses_tile(call: Call, setting: Setting) -> bool:
    """Return whether a call's rows are computed with the KV tile of a setting; see `Setting.states`."""
    if setting.slots is None:
        return True
    spec = AttentionSpec(call.heads, call.kv_heads, call.head_dim, jnp.dtype("bfloat16"), setting.block_size)
    splits = call.decodes or PallasGpuBackend(spec).build_metadata(batch_of(call, setting.block_size)).tiles is None
    return splits == setting.states


def batch_of(call: Call, block_size: int, copy: int = 0) -> AttentionBatch:
    """Return the step of a call, with arrays as large as the engine's.

    Args:
        call: the call.
        block_size: slots per page.
        copy: which of the call's copies of K and V the step reads. Every sequence of every copy has pages of its own.
    """
    rows, pages = call.sequences * call.rows, -(-call.slots // block_size)
    padded = bucket_for(rows, buckets(SMALLEST_STEP, BUDGET, 2))
    row_seq, row_slot, row_start = np.zeros((3, padded), np.int32)
    row_seq[:rows] = np.repeat(np.arange(call.sequences), call.rows)
    row_slot[:rows] = np.tile(call.row_slot(), call.sequences)
    row_start[:rows] = np.tile(call.row_start(), call.sequences)
    spans = EngineConfig().max_num_seqs + EXTRA_SPANS
    table = np.zeros((spans, bucket_for(pages, buckets(32, LONGEST // block_size, 8))), np.int32)
    first = copy * call.sequences * pages
    table[: call.sequences, :pages] = first + np.arange(call.sequences * pages).reshape(call.sequences, pages)
    length, prefix = np.full_like(table, block_size), np.zeros(spans, np.int32)
    length[: call.sequences, :pages] = np.clip(call.slots - np.arange(pages) * block_size, 0, block_size)
    prefix[: call.sequences] = call.prefix
    return AttentionBatch(rows, row_seq, row_slot, row_start, prefix, table, length, block_size)


def measure(call: Call, backend: AttentionBackend, repeats: int, count: int) -> list[float]:
    """Return the seconds of a call in every round. Decodes are a step of a run, whose metadata is computed before.

    Args:
        call: the call.
        backend: backend of the call's heads.
        repeats: number of rounds, after one that compiles.
        count: number of calls of a round.
    """
    spec = backend.spec
    batches = [batch_of(call, spec.block_size, copy) for copy in range(call.copies)]
    steps = [jax.device_put(backend.build_metadata(batch)) for batch in batches]
    if call.decodes and backend.advances:
        used = jnp.arange(len(batches[0].row_seq)) < batches[0].num_rows
        advance = jax.jit(backend.advance)
        steps = [
            advance(jax.device_put(backend.build_decodes(batch)), jnp.zeros(len(used), jnp.int32), used) for batch in batches
        ]
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (len(batches[0].row_seq), heads, spec.head_dim), spec.dtype)
        for key, heads in zip(keys, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True)
    )
    run = jax.jit(partial(backend.forward, scale=spec.head_dim**-0.5), donate_argnums=3)
    cache = backend.allocate(int(batches[-1].block_tables.max()) + 1)
    seconds = []
    for number in range(1 + repeats):
        began = time.perf_counter()
        for turn in range(count if number else 1):
            out, cache = run(q, k, v, cache, steps[turn % len(steps)])
        out.block_until_ready()
        seconds.append((time.perf_counter() - began) / count)
    return seconds[1:]


def row_of(call: Call, setting: Setting, repeats: int, count: int = CALLS) -> dict[str, Any]:
    """Return the times of a call for JSON, or its error.

    Args:
        call: the call.
        setting: backend, page size and tile.
        repeats: number of rounds.
        count: number of calls of a round.
    """
    row: dict[str, Any] = {**setting.facts(), "call": call.name}
    spec = AttentionSpec(call.heads, call.kv_heads, call.head_dim, jnp.dtype("bfloat16"), setting.block_size)
    try:
        seconds = measure(call, make(setting, spec), repeats, count)
    except Exception as error:  # a kernel that fails must not hide the times of the others
        text = f"{type(error).__name__}: {error}"
        return row | {"error": text.splitlines()[0], "traceback": traceback.format_exc().splitlines()[-TRACEBACK_LINES:]}
    return row | {"seconds": seconds, "median_s": statistics.median(seconds), "bound": "memory" if call.decodes else "products"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--rates", action="store_true", help="measure only the rates")
    only.add_argument("--setting", type=int, metavar="N", help="measure only the calls of one setting, and no rates")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of every call")
    parser.add_argument("--small", action="store_true", help="a few rows, to see that the command runs")
    args = parser.parse_args()
    if args.setting is None:
        rates = {"matmul_flops": matmul_rate("bfloat16"), "read_bytes_per_s": read_rate(16 if args.small else None)}
        print(json.dumps(rates), flush=True)
    if args.rates:
        return
    chosen = settings(small=args.small)
    for setting in chosen if args.setting is None else [chosen[args.setting]]:
        for call in calls(small=args.small):
            if uses_tile(call, setting):
                print(f"timing {call.name}", file=sys.stderr, flush=True)
                row = row_of(call, setting, args.repeats, 1 if args.small else CALLS)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
