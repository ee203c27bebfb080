"""Products of a few rows with a weight, which a native operator computes at the speed of the memory."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from chunkattn.backends.cpu import library

MAX_ROWS = 16
"""Rows up to which the operator is faster than XLA's own product."""
IN_STEP = 32
_PROBE = (2048, 80)
"""Depth and outputs of the products that are compared with XLA's."""


def serves(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> bool:
    """Return whether the operator computes this product on CPUs."""
    fits = x.dtype == weight.dtype == jnp.bfloat16 and len(x) <= MAX_ROWS and x.shape[1] % IN_STEP == 0
    if not fits or library.refusal() is not None or jax.default_backend() != "cpu":
        return False
    return order() is not None


@cache
def order() -> bool | None:
    """Return whether XLA adds up products on this machine value by value (True) or pair by pair (False).

    None means that the operator has no order with the bits of XLA's own product of many rows. XLA then computes few rows, too.
    """
    depth, outputs = _PROBE
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        x, weight = (jnp.asarray(rng.standard_normal((n, depth)), jnp.bfloat16) for n in (4 * MAX_ROWS, outputs))
        expected = np.asarray(_xla(x, weight))[:MAX_ROWS]
        for ascending in (False, True):
            found = (np.asarray(_native(x[:rows], weight, ascending)) for rows in (MAX_ROWS, 7))
            if all(np.array_equal(some, expected[: len(some)]) for some in found):
                return ascending
    return None


def multiply(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> Float32[Array, "N out"]:
    """Return `x @ weight.T` in float32, for operands that `serves` accepts.

    Args:
        x: bfloat16 rows.
        weight: bfloat16 weight.
    """
    return _native(x, weight, bool(order()))


def _native(x: Float[Array, "N in"], weight: Float[Array, "out in"], ascending: bool) -> Float32[Array, "N out"]:
    out = jax.ShapeDtypeStruct((len(x), len(weight)), jnp.float32)  # type: ignore[no-untyped-call]
    product: Float32[Array, "N out"] = jax.ffi.ffi_call(library.MULTIPLY, out)(x, weight, ascending=ascending)
    return product


@jax.jit
def _xla(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> Float32[Array, "N out"]:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
