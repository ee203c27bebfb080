"""A whole decoder step with every layer of a real geometry, compiled for an H100 and compared with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.aot import MIB, MODELS, Step, collectives, compile_call, lower_step, planned
from benchmarks.nvidia.attention import CompiledBackend
from benchmarks.nvidia.hopper import JAX_BYTES, devices, sharding
from chunkattn.backends import make_backend


@dataclass(frozen=True)
class GpuStep(Step):
    """One step on H100s.

    Attributes:
        backend: name of the attention backend.
        gpus: number of GPUs that share the model.
    """

    backend: str = "xla"
    gpus: int = 1


SHARED = (("llama-3-8b", 2), ("llama-3-70b", 4))
"""Models that several GPUs share, with the number of GPUs."""


def steps(layers: int | None = None) -> Iterator[GpuStep]:
    """Yield a prefill and a decode step of every model that fits a GPU, on every backend for GPUs, and shared decode steps.

    Args:
        layers: number of layers; None for all of the model.
    """
    for backend, block_size in (("pallas_gpu", 64), ("xla", 16)):
        for model in (name for name in MODELS if planned(name, JAX_BYTES).free_bytes > 0):
            for rows in (2048, 64):
                yield GpuStep("h100", model, rows, 4096 // block_size, block_size=block_size, layers=layers, backend=backend)
    for model, gpus in SHARED:
        yield GpuStep("h100", model, 64, 64, block_size=64, layers=layers, backend="pallas_gpu", gpus=gpus)


def compile_step(step: GpuStep) -> dict[str, Any]:
    """Compile a step with the pool that the engine would allocate beside the weights, and return the result for JSON."""
    backend = CompiledBackend if step.backend == CompiledBackend.name else partial(make_backend, step.backend)
    sizes, lower = lower_step(step, backend, JAX_BYTES, sharding() if step.gpus == 1 else devices(step.gpus))
    result = {"kind": "step", **asdict(step), **sizes, **compile_call(lower, collectives)}
    if result["compiled"]:
        result["hbm_limit_mib"] = JAX_BYTES // MIB
        result["fits"] = result["hbm_mib"] <= result["hbm_limit_mib"]
    return result
