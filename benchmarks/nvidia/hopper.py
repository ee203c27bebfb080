"""An H100 that need not be there: `prepare` sets the compiler up, and `sharding` places arrays on the GPU compiled for.

    python tests/gpu/install.py FOLDER    # JAX and the CUDA compilers

JAX compiles for a GPU given by its figures. The code is that of a real H100, with two differences: cuBLAS kernels are not
tuned, and products run in cuBLAS instead of Triton.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MEMORY_BYTES = 84_929_347_584
"""Memory of an H100 of 80 GB, in bytes."""
JAX_BYTES = MEMORY_BYTES * 3 // 4
"""Share of the memory that JAX takes unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise, in bytes."""
SHARED_MEMORY_BYTES = 232_448
"""Shared memory that one block of threads may have, in bytes."""
MULTIPROCESSORS = 132
CLOCK = 1.98e9
"""Highest clock in cycles per second."""
BANDWIDTH = 3_352_320_000_000
"""Bytes per second of the memory."""
NAME = "NVIDIA H100 80GB HBM3"
TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {MULTIPROCESSORS}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {BANDWIDTH}
  l2_cache_size: 52428800
  clock_rate_ghz: {CLOCK / 1e9}
  device_memory_size: {MEMORY_BYTES}
  shared_memory_per_block_optin: {SHARED_MEMORY_BYTES}
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{NAME}"
"""
"""Figures of the H100 SXM5, in XLA's text format `GpuTargetConfigProto`.

XLA puts library calls and custom calls into CUDA graphs only for drivers of CUDA 12.3 and newer.
"""
_FLAGS = "--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"
"""Autotuning times kernels, so it needs a GPU. Without it, Triton's products are of no known quality."""


class NoCompiler(RuntimeError):
    """The environment has no CUDA compiler."""


def prepare(dumps: Path | None = None, thunks: Path | None = None) -> None:
    """Set the process up to compile for an H100; call it before JAX is imported.

    Args:
        dumps: folder into which Mosaic writes what the compilers say about every kernel; None writes nothing.
        thunks: folder into which XLA writes HLO and thunks of every program; None writes nothing.

    Raises:
        NoCompiler: JAX's CUDA plugin or a CUDA compiler is not installed.
    """
    if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda13") is None:
        raise NoCompiler("JAX's CUDA plugin is not installed; `make test-gpu` installs it into .cache/gpu-env")
    # The folder has no `__init__.py`: `nvidia` is a namespace that the CUDA packages share.
    nvidia = find_spec("nvidia")
    roots = [Path(folder) / "cu13" for folder in (nvidia and nvidia.submodule_search_locations) or ()]
    root = next((root for root in roots if (root / "bin" / "ptxas").exists()), None)
    if root is None or not (root / "bin" / "nvdisasm").exists():
        raise NoCompiler("ptxas or nvdisasm is not installed; `make test-gpu` installs them into .cache/gpu-env")
    os.environ["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["JAX_PLATFORMS"] = "cpu,cuda"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would look for a driver
    flags = [] if thunks is None else [f"--xla_dump_to={thunks}", "--xla_dump_hlo_as_text"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS, *flags]).strip()
    if dumps is not None:
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(dumps)
    _name_the_platform()


def _name_the_platform() -> None:
    """Let JAX resolve the platform's alias without a GPU, which it refuses: https://github.com/jax-ml/jax/issues/23971."""
    from jax._src import xla_bridge

    resolve = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else resolve(name)


@cache
def devices(count: int = 1) -> list[Any]:
    """Return the GPUs compiled for, which are in one machine."""
    from jax.experimental import topologies

    shape = f"1x1x{count}"
    return list(topologies.get_topology_desc("h100", "cuda", topology=shape, target_config=TARGET).devices)


def sharding() -> Any:
    """Return the sharding of arrays on the only GPU compiled for."""
    from jax.sharding import SingleDeviceSharding

    return SingleDeviceSharding(devices()[0])
