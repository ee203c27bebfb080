"""Rates that this machine reaches: of matrix products, and of reads of memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def matmul_rate(dtype: str, repeats: int = 5) -> float:
    """Return the rate of a large matrix product in FLOP/s, the best of `repeats` runs.

    Args:
        dtype: dtype of both matrices; the product is float32.
        repeats: number of timed runs.
    """
    # A product as small as a CPU's would measure the start of an accelerator's program.
    rows, inner, columns = (2048, 1024, 3072) if jax.default_backend() == "cpu" else (8192, 8192, 8192)
    # Equal numbers switch few transistors, so that a GPU would clock higher than it does for real weights.
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, size, dtype) for key, size in zip(keys, ((rows, inner), (inner, columns)), strict=True))
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    return 2 * rows * inner * columns / _best_seconds(lambda: multiply(a, b), repeats)


def read_mib() -> int:
    """Return the size in MiB of the array that `read_rate` reads by default."""
    return 256 if jax.default_backend() == "cpu" else 4096


def read_rate(mib: int | None = None, repeats: int = 5) -> float:
    """Return the rate in bytes per second at which a reduction reads a large array, the best of `repeats` runs.

    The reduction is a bitwise or: it has no rounding order, so XLA vectorizes it and spreads rows over cores.

    Args:
        mib: size of the array in MiB; None for `read_mib`.
        repeats: number of timed runs.
    """
    mib = mib or read_mib()
    array = jnp.ones((mib << 4, 1 << 14), jnp.int32)
    reduce = jax.jit(lambda a: jax.lax.reduce(a, jnp.int32(0), jax.lax.bitwise_or, (1,)))
    return array.nbytes / _best_seconds(lambda: reduce(array), repeats)


def _best_seconds(call: Callable[[], jax.Array], repeats: int) -> float:
    """Return the shortest time of a call, after one call that compiles."""
    call().block_until_ready()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
