"""One layer's call of the GPU kernels: its compilation, its memory, and the instructions of its loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import MIB, LayerCase, compile_call
from benchmarks.nvidia.hopper import BANDWIDTH, CLOCK, MULTIPROCESSORS, sharding
from benchmarks.nvidia.kernels import SLOTS, Kernel, UnknownDump, forget_kernels, read_kernels
from chunkattn.backends.base import HeadInputs
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.pallas_gpu.shape import Shape

_SCRATCH_BYTES = 4096
"""Shared memory that barriers and the compiler may add to a kernel's buffers, in bytes."""


class CompiledBackend(PallasGpuBackend):
    """Backend that compiles the kernels for a GPU that need not be there, instead of interpreting them."""

    interpret = False


@dataclass(frozen=True)
class Case(LayerCase):
    """One compilation: a model's heads, the engine's settings, and the sizes of a step."""

    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    heads: int = 16
    kv_heads: int = 8
    rows: int = 2048
    sequences: int = 64
    width: int = 64
    pages: int = 4096
    window: int | None = None
    weighs: bool = False
    """True if the step weighs chunks anew."""
    batch_invariant: bool = False
    decodes: bool = False
    """True for a step of a run of decodes."""
    kv_dtype: str | None = None


def cases() -> Iterator[Case]:
    """Yield the main settings, the common setting first."""
    common = Case()
    yield common
    yield replace(common, weighs=True)
    yield replace(common, rows=64)
    yield replace(common, rows=64, decodes=True)
    yield replace(common, batch_invariant=True)
    yield replace(common, head_dim=64, heads=14, kv_heads=2)
    yield replace(common, rows=16, decodes=True, weighs=True, head_dim=64, heads=14, kv_heads=2)
    yield replace(common, head_dim=256, heads=8, kv_heads=1)
    yield replace(common, block_size=16, pages=16384, width=256)
    yield replace(common, block_size=128, heads=32, pages=2048, width=32)
    yield replace(common, block_size=32, heads=28, kv_heads=4, window=4096)
    yield replace(common, dtype="float16")
    yield replace(common, kv_dtype=FP8.name)
    # 131,072 cached tokens below a step of 8,192 rows, and 131,072 plain causal rows at once.
    yield replace(common, heads=32, rows=8192, sequences=256, width=2048)
    yield replace(common, rows=131072, sequences=1, width=2048)
    yield replace(common, rows=8, sequences=1, width=1)
    yield replace(common, rows=256, heads=32, weighs=True)


def grid() -> Iterator[Case]:
    """Yield every supported head_dim, page size, dtype and dtype of K/V with all three kernels, and every GQA ratio."""
    ratios = iter([(16, 8), (8, 8), (16, 2), (14, 2), (12, 4), (7, 1), (20, 4), (12, 2)] * 100)
    for head_dim in (64, 128, 256):
        for block_size in (16, 32, 64, 128):
            for dtype in ("bfloat16", "float16"):
                for options in ({}, {"kv_dtype": FP8.name}):
                    heads, kv_heads = next(ratios)
                    case = Case(head_dim, block_size, dtype, heads, kv_heads, 4096, 16, 64, 4096, weighs=True, **options)
                    yield from (case, replace(case, rows=16, decodes=True))


def lower(case: Case, backend: PallasGpuBackend) -> jax.stages.Lowered:
    """Lower the call of one layer, with the kernel that prepares heads if there is one; the pool is donated."""

    def there(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding())

    build = backend.build_decodes if case.decodes else backend.build_metadata
    metadata = jax.tree.map(there, build(case.batch()))
    q, k = (
        jax.ShapeDtypeStruct((case.rows, heads, case.head_dim), jnp.dtype(case.dtype)) for heads in (case.heads, case.kv_heads)
    )
    cache = jax.tree.map(there, jax.eval_shape(lambda: backend.allocate(case.pages)))

    prepares = backend.prepares_heads and case.window is None
    scale = jax.ShapeDtypeStruct((case.head_dim,), k.dtype)
    table = jax.ShapeDtypeStruct((case.rows, 1, case.head_dim // 2), jnp.float32)

    def call(heads: Any, cache: Any, metadata: Any) -> Any:
        if case.decodes:
            steps, used = jnp.ones(case.rows, jnp.int32), jnp.ones(case.rows, bool)
            metadata = backend.advance(metadata, steps, used)
        if prepares:
            inputs = HeadInputs(*heads, 1e-6, k.dtype, k.dtype == jnp.bfloat16)
            return backend.forward_inputs(inputs, cache, metadata, scale=case.head_dim**-0.5)
        return backend.forward(*heads, cache, metadata, scale=case.head_dim**-0.5, window=case.window)

    heads = (q, k, k, scale, scale, table, table) if prepares else (q, k, k)
    return jax.jit(call, donate_argnums=1).lower(tuple(map(there, heads)), cache, metadata)


def compile_case(case: Case, dumps: Path) -> dict[str, Any]:
    """Compile a case and return the result for JSON.

    `preparing` are the kernels that prepare heads, none in layers with a window and with FP8 pages. `decode_copy_cycles` is the
    time in which `SLOTS` slots of K and V come from memory, where all multiprocessors copy.

    Args:
        case: the case.
        dumps: folder given to `hopper.prepare`.
    """
    if (refusal := CompiledBackend.supports(case.spec)) is not None:
        return {"kind": "pallas_gpu", **asdict(case), "compiled": False, "error": refusal}
    backend = CompiledBackend(case.spec)
    backend.batch_invariant = case.batch_invariant
    result = {"kind": "pallas_gpu", **asdict(case), "pool_mib": round(case.pool_bytes / MIB, 1)}
    result |= compile_call(lambda: lower(case, backend))
    if not result["compiled"]:
        forget_kernels(dumps)
        return result
    found = read_kernels(dumps)
    kernels, others = ([kernel for kernel in found if (kernel.products > 0) == multiplies] for multiplies in (True, False))
    shapes = {"decodes": backend.decode_shape}
    if not case.decodes:
        metadata, shapes = backend.build_metadata(case.batch()), {"tiles": backend.tile_shape, "blocks": backend.block_shape}
        shapes = {name: shape for name, shape in shapes.items() if getattr(metadata, name) is not None}
    if len(kernels) != len(shapes):
        raise UnknownDump(f"{len(kernels)} kernels were compiled, not {len(shapes)}")
    itemsize = case.spec.cache_dtype.itemsize
    return result | {
        "kernels": {name: facts(kernel, shape) for (name, shape), kernel in zip(shapes.items(), kernels, strict=True)},
        "preparing": [{"registers": kernel.registers, "spill_bytes": kernel.spill_bytes} for kernel in others],
        "decode_copy_cycles": round(2 * itemsize * SLOTS * case.head_dim * MULTIPROCESSORS / BANDWIDTH * CLOCK),
    }


def facts(kernel: Kernel, shape: Shape) -> dict[str, Any]:
    """Return a kernel for JSON, with the sizes that it is compiled for and the products that one turn needs.

    Args:
        kernel: the compiled kernel.
        shape: sizes.

    Raises:
        UnknownDump: the kernel is another one, or its loops are others.
    """
    if not 0 <= kernel.shared_bytes - shape.shared_bytes < _SCRATCH_BYTES:
        raise UnknownDump(f"a kernel has {kernel.shared_bytes} bytes of shared memory, where {shape.shared_bytes} are needed")
    needed = shape.head_dim // 16 + shape.slots // 16
    return kernel.facts(shape.slots) | {"rows": shape.rows, "stages": shape.stages, "products_needed": needed}
