"""Devices that the GPU kernel runs on: Hopper, and Pallas' GPU interpreter where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

CAPABILITY = "9.0"
"""Compute capability of Hopper: `wgmma`, which the kernel is made of, exists on no other generation."""
INTERPRETER_SINCE = (0, 11)
"""First version of JAX whose GPU interpreter runs the kernel."""
INTERPRETER_THREADS = 8
"""Threads of XLA's pool on a CPU that the interpreter needs: each warpgroup holds one while it waits for another."""


def has_gpu() -> bool:
    """Return whether JAX computes on a GPU in this process."""
    return jax.default_backend() == "gpu"


def refusal(interpret: Any) -> str | None:
    """Return the reason why the kernel cannot run in this process, or None if it can.

    Args:
        interpret: `PallasGpuBackend.interpret`; False compiles for a Hopper GPU that need not be here.
    """
    if interpret is False:
        return None
    if has_gpu():
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "unknown")
        if capability != CAPABILITY:
            return f"a {device.device_kind} has compute capability {capability}; the kernel needs {CAPABILITY} (Hopper)"
        return None
    if jax.__version_info__ < INTERPRETER_SINCE:
        needed = ".".join(map(str, INTERPRETER_SINCE))
        return f"there is no GPU, and the GPU interpreter of JAX {jax.__version__} does not run the kernel; {needed} does"
    threads = int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1
    if threads < INTERPRETER_THREADS:
        return f"there is no GPU, and its interpreter hangs on {threads} threads; set the environment variable NPROC to 16"
    return None


def interpreter() -> Any:
    """Return the argument of `plgpu.kernel` that runs a kernel in the GPU interpreter."""
    return plgpu.InterpretGPUParams()  # type: ignore[attr-defined, unused-ignore]  # JAX 0.11
