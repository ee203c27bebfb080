"""A whole decoder step with every layer of a real geometry, compiled for an H100 and compared with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.aot import MIB, MODELS, Step, compile_call, lower_step, planned
from benchmarks.nvidia.attention import CompiledBackend
from benchmarks.nvidia.hopper import JAX_BYTES, sharding
from chunkattn.backends import make_backend


@dataclass(frozen=True)
class GpuStep(Step):
    """One step on an H100.

    Attributes:
        backend: name of the attention backend.
    """

    backend: str = "xla"


def steps(layers: int | None = None) -> Iterator[GpuStep]:
    """Yield a prefill and a decode step of every model that fits, on every backend for GPUs.

    Args:
        layers: number of layers; None for all of the model.
    """
    for backend, block_size in (("pallas_gpu", 64), ("xla", 16)):
        for model in (name for name in MODELS if planned(name, JAX_BYTES).free_bytes > 0):
            for rows in (2048, 64):
                yield GpuStep("h100", model, rows, 4096 // block_size, block_size=block_size, layers=layers, backend=backend)


def compile_step(step: GpuStep) -> dict[str, Any]:
    """Compile a step with the pool that the engine would allocate beside the weights, and return the result for JSON."""
    backend = CompiledBackend if step.backend == CompiledBackend.name else partial(make_backend, step.backend)
    sizes, lower = lower_step(step, backend, JAX_BYTES, sharding())
    result = {"kind": "step", **asdict(step), **sizes, **compile_call(lower)}
    if result["compiled"]:
        result["hbm_limit_mib"] = JAX_BYTES // MIB
        result["fits"] = result["hbm_mib"] <= result["hbm_limit_mib"]
    return result
