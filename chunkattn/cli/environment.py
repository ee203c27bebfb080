"""Command `chunkattn env`: what is installed and in use, for bug reports."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import chunkattn
from chunkattn.distributions import version_of
from chunkattn.terminal.commands import app, command, print_lines
from chunkattn.tools.bench.measure import processor

if TYPE_CHECKING:
    from chunkattn.backends import AttentionBackend

PACKAGES = ("jax", "jaxlib", "transformers", "numpy", "libtpu", "vllm")
VARIABLES = ("CHUNKATTN_", "JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "TPU_", "LIBTPU_", "HF_HUB_OFFLINE", "LD_PRELOAD", "OMP_")
"""Beginnings of the names of environment variables that change what runs."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
PROBE = (3072, 1000)
"""Depth of the products and length of the sums that are probed to see whether bits are kept.

An engine probes its model's sizes. The probe takes about a second for each dtype, mostly to compile, so smaller sizes
would save little.
"""


@command(app)
def env() -> None:
    """Print versions, devices, the attention backend, whether bits are kept, and the settings that change what runs."""
    print_lines(f"{name + ':':24} {value}" for name, value in environment())


def environment() -> Iterator[tuple[str, str]]:
    """Return names and values, in order."""
    yield "chunkattn", f"{chunkattn.__version__}, {Path(chunkattn.__file__).parent}"
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    for package in PACKAGES:
        yield package, version_of(package) or "not installed"
    yield "system", platform.platform()
    yield "processor", f"{processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"

    import jax  # after the rest, because it looks for devices

    from chunkattn.backends.cpu import library
    from chunkattn.engine.build import enable_compile_cache

    yield "JAX devices", ", ".join(f"{d.device_kind} ({d.platform})" for d in jax.devices())
    backend = _auto()
    yield "attention backend", f"auto is {backend.name} for heads of 128 in bfloat16"
    yield "native CPU kernel", library.kernel_name() or f"none: {library.refusal()}"
    enable_compile_cache()
    yield "products of bfloat16", _products()
    yield "packed weights", _packed()
    yield "same bits", _same_bits(backend)
    yield "compile cache", str(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            yield name, "(set)" if any(part in name for part in SECRET) else os.environ[name]


def _auto() -> AttentionBackend:
    """Return the backend that `auto` takes for a common model here: 16 query and 8 KV heads of 128, bfloat16."""
    import jax.numpy as jnp

    from chunkattn.backends import AttentionSpec, make_backend

    return make_backend("auto", AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), 16))


def _products() -> str:
    """Return what computes products in bfloat16, and the order of additions."""
    from chunkattn.backends.cpu import library, linear

    if library.refusal() is not None:
        return "XLA computes them"
    if linear.any_rows():
        return "native, on AMX tiles"
    if (order := linear.order()) is None:
        return "XLA computes them, because the native kernel lacks its order of additions for few rows"
    return f"few rows are native, in XLA's order: {order}"


def _packed() -> str:
    """Return the formats of packed weights that products are native for."""
    from chunkattn.backends.cpu import packed

    depth = {name: form.block for name, form in packed.FORMATS.items()}
    refused = {name: packed.refusal(name, packed.ROWS, depth[name]) for name in depth}
    served = [name for name, reason in refused.items() if reason is None]
    return f"native products of {', '.join(served)}" if served else f"none: {next(iter(refused.values()))}"


def _same_bits(backend: AttentionBackend) -> str:
    """Return whether engines keep the bits of results here, by the rule of `Invariance`."""
    import jax.numpy as jnp

    from chunkattn.engine.invariance import rows_agree

    if backend.can_keep_bits and not backend.keeps_bits:
        return f"kept by {backend.name} with batch_invariant=True: by default its sums follow the step"
    if not backend.keeps_bits:
        return f"not kept: the sums of {backend.name} follow the step"
    depth, length = PROBE
    differ = [d for d in ("float32", "bfloat16", "float16") if not rows_agree(jnp.dtype(d), depth, length)]
    probed = f"products of depth {depth:,} or sums of {length:,}"
    if differ:
        return f"not kept in {', '.join(differ)} without batch_invariant=True: rows differ by their number in {probed}"
    return f"kept by {backend.name} in float32, bfloat16 and float16: rows agree for any number of rows in {probed}"
