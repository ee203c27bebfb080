"""Products of a few rows with a weight, which a native operator computes at the speed of the memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from chunkattn.backends.cpu import library

MAX_ROWS = 16
"""Rows up to which the operator is faster than XLA's own product."""
IN_STEP = 32


def serves(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> bool:
    """Return whether the operator computes this product on CPUs."""
    fits = x.dtype == weight.dtype == jnp.bfloat16 and len(x) <= MAX_ROWS and x.shape[1] % IN_STEP == 0
    return fits and library.refusal() is None


def multiply(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> Float32[Array, "N out"]:
    """Return `x @ weight.T` in float32, for operands that `serves` accepts.

    Args:
        x: bfloat16 rows.
        weight: bfloat16 weight.
    """
    out = jax.ShapeDtypeStruct((len(x), len(weight)), jnp.float32)  # type: ignore[no-untyped-call]
    product: Float32[Array, "N out"] = jax.ffi.ffi_call(library.MULTIPLY, out)(x, weight)
    return product
