"""One layer's call of the kernels: its compilation, its memory, and the cost of its inner loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import MIB, LayerCase, compile_call
from benchmarks.tpu.chips import CHIPS, Chip
from benchmarks.tpu.schedule import Block, Schedule, UnknownSchedule, pick, read_schedules, unknown
from chunkattn.backends.pallas_tpu.backend import PallasTpuBackend
from chunkattn.backends.pallas_tpu.blocks import Shape

TILE = 128 * 128
"""Rows times slots of the tile that bundles are counted per, for one query head."""


@dataclass(frozen=True)
class Case(LayerCase):
    """One compilation: a chip, a model's heads, and the sizes of a step."""

    chip: str
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    heads: int = 16
    kv_heads: int = 8
    rows: int = 2048
    sequences: int = 64
    width: int = 256
    pages: int = 4096
    window: int | None = None
    kv_dtype: str | None = None
    weighs: bool = False
    """True if the step weighs chunks anew."""
    batch_invariant: bool = False


def compiled_backend(chip: str) -> type[PallasTpuBackend]:
    """Return the backend class that compiles the kernels for `chip` instead of interpreting them."""
    return type("PallasTpuBackend", (PallasTpuBackend,), {"interpret": False, "chip": chip})


FP8 = "float8_e4m3fn"


def cases(chip: str) -> Iterator[Case]:
    """Yield the settings compiled for a chip, the common setting first."""
    common = Case(chip)
    yield common
    yield replace(common, weighs=True)
    yield replace(common, batch_invariant=True)
    yield replace(common, weighs=True, head_dim=64, heads=9, kv_heads=3, kv_dtype=FP8)
    yield replace(common, kv_dtype=FP8)
    yield replace(common, head_dim=64, heads=14, kv_heads=2)
    yield replace(common, head_dim=256, heads=8, kv_heads=1)
    yield replace(common, block_size=32, heads=28, kv_heads=4, window=4096)
    yield replace(common, block_size=128, heads=32, pages=1024)
    yield replace(common, block_size=256, heads=40, kv_heads=40, pages=256)
    yield replace(common, dtype="float32")
    yield replace(common, head_dim=64, block_size=32, dtype="float32", heads=9, kv_heads=3)
    # 131,072 cached tokens below a step of 8,192 rows, and 131,072 plain causal rows at once.
    yield replace(common, heads=32, rows=8192, sequences=256, width=16384, pages=16384)
    yield replace(common, rows=131072, sequences=1, width=8192, pages=8192)
    yield replace(common, rows=1, sequences=1, width=1)


def grid(chip: str) -> Iterator[Case]:
    """Yield every supported head_dim, page size and dtype, with GQA ratios from 1 to 16."""
    ratios = iter([(16, 8), (8, 8), (16, 1), (14, 2), (12, 4), (7, 1), (32, 8)] * 100)
    for head_dim in (64, 128, 256):
        for block_size in (16, 32, 64, 128, 256):
            for dtype, kept in (("bfloat16", None), ("float32", None), ("bfloat16", FP8), ("float32", FP8)):
                heads, kv_heads = next(ratios)
                yield Case(chip, head_dim, block_size, dtype, heads, kv_heads, 512, 16, 64, 512, kv_dtype=kept)
    # Many KV heads and many rows are bounded by vector memory.
    for head_dim, block_size, dtype, heads in ((256, 16, "bfloat16", 32), (128, 256, "bfloat16", 40), (256, 32, "float32", 16)):
        yield Case(chip, head_dim, block_size, dtype, heads, heads, 4096, 16, 64, 512)
    yield Case(chip, heads=71, kv_heads=1, rows=4096)
    yield Case(chip, width=1 << 15, pages=1 << 15)


def compile_kernels(lower: Callable[[], Any]) -> dict[str, Any]:
    """Compile a call of kernels and return its success and its use of HBM and vector memory."""
    return compile_call(lower, lambda compiled: {"vmem_mib": _vector_memory(compiled.as_text())})


def _vector_memory(hlo: str) -> dict[str, float]:
    """Return the MiB of vector memory of each kernel, by name."""
    used = {}
    for line in hlo.splitlines():
        kernel = re.search(r"%(\w+?)[.\d]* = .*tpu_custom_call", line)
        size = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', line)
        if kernel and size:
            used[kernel[1]] = round(int(size[1]) / MIB, 2)
    return used


def lower(case: Case, backend: PallasTpuBackend) -> Any:
    """Lower the call of one layer for the case's chip; the pool is donated."""
    where, dtype = CHIPS[case.chip].sharding(), jnp.dtype(case.dtype)
    metadata = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), backend.build_metadata(case.batch()))
    q, k = (jax.ShapeDtypeStruct((case.rows, heads, case.head_dim), dtype) for heads in (case.heads, case.kv_heads))
    cache = jax.eval_shape(lambda: backend.allocate(case.pages))

    def call(*arrays: Any) -> Any:
        return backend.forward(*arrays, scale=case.head_dim**-0.5, window=case.window)

    return jax.jit(call, in_shardings=where, out_shardings=where, donate_argnums=3).lower(q, k, k, cache, metadata)


def compile_case(case: Case, schedules: Path | None = None) -> dict[str, Any]:
    """Compile a case and return the result for JSON.

    Args:
        case: the case.
        schedules: folder of the schedules. The result then holds the loops' costs, or `unread`, the reason for their absence.
    """
    backend = compiled_backend(case.chip)(case.spec)
    backend.batch_invariant = case.batch_invariant
    result = {"kind": "attention", **asdict(case), "pool_mib": round(case.pool_bytes / MIB, 1)}
    result |= compile_kernels(lambda: lower(case, backend))
    if schedules is not None:
        try:
            by_name = read_schedules(schedules)
            if result["compiled"]:
                result["smem_kib"] = {name: schedule.smem_bytes / 1024 for name, schedule in by_name.items()}
                result["prefill"] = prefill_cost(
                    pick(by_name, "chunk_attention"), backend.shape(backend.block(case.rows)), case
                )
            if result["compiled"] and not case.batch_invariant:
                result["decode"] = decode_cost(pick(by_name, "chunk_decode"), backend.shape(1), case)
        except UnknownSchedule as error:
            result["unread"] = str(error)
    return result


@dataclass(frozen=True)
class Walk:
    """Bundles of one KV tile's turn in the loop over KV tiles, from a kernel's schedule.

    Attributes:
        clear: block that multiplies a tile without a mask, a few heads at a time.
        masked: block that multiplies a tile with a mask, a few heads at a time.
        around: bundles that start the copies of the next tile's pages and wait.
        mask: bundles that build a mask, holes in the last page of a part included.
        setup: bundles of a query tile before its first KV tile and after its last.
    """

    clear: Block
    masked: Block
    around: int
    mask: int
    setup: int


def walk_of(schedule: Schedule) -> Walk:
    """Identify the parts by their order: before, the clear tile, the mask and its tile, the end.

    Raises:
        UnknownSchedule: the schedule lacks two inner loops that multiply, or other blocks multiply as well.
    """
    inside = [block for block in schedule.multiplying if block.depth >= 2]
    if len(inside) < 2:
        raise unknown(f"{schedule.kernel} has {len(inside)} inner loops that multiply, not 2")
    clear, masked = sorted(sorted(inside, key=lambda block: block.slots["MXU"])[-2:], key=lambda block: block.first)
    rest = sum(block.slots["MXU"] for block in schedule.multiplying) - clear.slots["MXU"] - masked.slots["MXU"]
    if rest > 0.2 * clear.slots["MXU"]:
        raise unknown(f"{schedule.kernel}: {rest} MXU slots lie outside its two inner loops")
    depth2 = [block for block in schedule.blocks if block.depth == 2]
    before = sum(block.bundles for block in depth2 if block.last <= clear.first)
    mask = sum(block.bundles for block in depth2 if clear.last <= block.first and block.last <= masked.first)
    setup = sum(block.bundles for block in schedule.blocks if block.depth == 1)
    # The next tile belongs to the same query tile or to the next query tile: two equally long branches, one of them taken.
    return Walk(clear, masked, before // 2, mask, setup)


def prefill_cost(schedule: Schedule, shape: Shape, case: Case) -> dict[str, Any]:
    """Return the bundles per 128 rows times 128 slots of one query head, and the slots that the inner loop spends them on.

    `bundles_per_tile` counts the loop that multiplies. `with_copies` adds starting the copies of the next tile's pages and
    waiting. `masked_with_copies` counts the same for a tile with a mask, and building the mask.
    """
    walk, chip = walk_of(schedule), CHIPS[case.chip]
    turns = shape.heads // shape.together
    tiles = shape.together * shape.groups * shape.rows * shape.slots / TILE
    return {
        "rows": shape.rows,
        "slots": shape.slots,
        "heads_together": shape.together,
        "bundles_per_tile": round(walk.clear.bundles / tiles, 2),
        "bundles_per_masked_tile": round((walk.masked.bundles + walk.mask / turns) / tiles, 2),
        "with_copies": round((walk.clear.bundles + walk.around / turns) / tiles, 2),
        "masked_with_copies": round((walk.masked.bundles + (walk.mask + walk.around) / turns) / tiles, 2),
        "slots_per_tile": {unit: round(count / tiles, 2) for unit, count in walk.clear.slots.items()},
        "slot_shares": walk.clear.shares(schedule.capacity),
        "inner_loop_mxu_peak_share": peak_share(2 * TILE * case.head_dim * tiles, walk.clear.bundles, chip),
    }


def peak_share(macs: float, bundles: int, chip: Chip) -> float:
    """Return an upper bound of the share of the MXU's peak: multiplications over possible multiplications in the same bundles.

    If the bundles wait for the MXU itself, they take several cycles, and the share is 1.
    """
    return round(min(1.0, macs / (bundles * chip.macs_per_bundle)), 3)


def decode_cost(schedule: Schedule, shape: Shape, case: Case) -> dict[str, Any]:
    """Return the bundles of one sequence's KV tile, and the bundles that pass while its bytes come from HBM."""
    chip, walk = CHIPS[case.chip], walk_of(schedule)
    bundles = walk.clear.bundles * (shape.heads // shape.together) + walk.around
    size = shape.heads * shape.slots * shape.lanes * case.spec.cache_dtype.itemsize
    share = chip.cores if shape.head_blocks == chip.cores else 1  # busy cores share the bandwidth
    copying = size * share / chip.hbm_bandwidth * chip.clock
    return {
        "slots": shape.slots,
        "kib": size / 1024,
        "bundles": bundles,
        "bundles_while_copying": round(copying),
        "slot_shares": walk.clear.shares(schedule.capacity),
        "hbm_bandwidth_share": round(min(1.0, copying / bundles), 3),
    }
