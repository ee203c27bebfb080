"""Products of rows with a weight, which a native operator computes: a few rows, and any number on processors with AMX."""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from chunkattn.backends.cpu import library

MAX_ROWS = 16
"""Rows up to which the operator is faster than XLA's own product, without AMX."""
IN_STEP = 32
LEAST_OUTPUTS = 32
"""Outputs below which XLA computes the product, which then has another order of additions."""
LEAST_DEEP_OUTPUTS = 64
"""Outputs below which XLA may add up a product that is deeper than a block in other blocks, as it does with AVX2 and 33."""
_ONE_BLOCK = 1 << 30
"""Depth of a block that holds everything."""
_BLOCKS = (2048, _ONE_BLOCK, 1024, 4096, 512, 256)
"""Depths of a block that XLA may add up, the likeliest first."""
_PROBE = (2 * 4096 + 96, 80)
"""Depth and outputs of the products that are compared with XLA's."""


class Order(NamedTuple):
    """An order of additions, as `native/few_rows.h` describes it.

    Attributes:
        ascending: whether a block is added value by value, not pair by pair.
        block: depth of a block.
    """

    ascending: bool
    block: int

    def __str__(self) -> str:
        """Return the order in words."""
        blocks = "in one block" if self.block == _ONE_BLOCK else f"in blocks of {self.block:,}"
        return f"{'value by value' if self.ascending else 'pair by pair'} {blocks}"


_IGNORED = Order(ascending=False, block=_ONE_BLOCK)
"""AMX tiles have one order, whatever is asked for."""


def serves(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> bool:
    """Return whether the operator computes this product on CPUs."""
    if not x.dtype == weight.dtype == jnp.bfloat16 or library.refusal() is not None:
        return False
    if any_rows():
        return True
    if len(x) > MAX_ROWS or x.shape[1] % IN_STEP or len(weight) < LEAST_OUTPUTS:
        return False
    by = order()
    return by is not None and (x.shape[1] <= by.block or len(weight) >= LEAST_DEEP_OUTPUTS)


def any_rows() -> bool:
    """Return whether the operator computes any shape: on AMX tiles, where XLA's order follows the number of rows."""
    return library.kernel_name() == "amx"


@cache
def order() -> Order | None:
    """Return the order in which XLA adds up products of many rows on this machine, for kernels that compute few.

    None means that the operator has no such order. XLA then computes few rows, too.
    """
    depth, outputs = _PROBE
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        x, weight = (jnp.asarray(rng.standard_normal((n, depth)), jnp.bfloat16) for n in (4 * MAX_ROWS, outputs))
        expected = np.asarray(_xla(x, weight))[:MAX_ROWS]
        for by in itertools.starmap(Order, itertools.product((False, True), _BLOCKS)):
            some = (np.asarray(_native(x[:rows], weight, by)) for rows in (1, 7, MAX_ROWS))
            if all(np.array_equal(values, expected[: len(values)]) for values in some):
                return by
    return None


def multiply(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> Float32[Array, "N out"]:
    """Return `x @ weight.T` in float32, for operands that `serves` accepts.

    Args:
        x: bfloat16 rows.
        weight: bfloat16 weight.
    """
    by = _IGNORED if any_rows() else order()
    assert by is not None
    return _native(x, weight, by)


def multiply_several(x: Float[Array, "N in"], *weights: Float[Array, "out in"]) -> list[Float32[Array, "N out"]]:
    """Return `multiply` of each weight, in one native call.

    Args:
        x: bfloat16 rows.
        *weights: bfloat16 weights; `serves` accepts each.
    """
    by = _IGNORED if any_rows() else order()
    assert by is not None
    shapes = [jax.ShapeDtypeStruct((len(x), len(weight)), jnp.float32) for weight in weights]  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call(library.MULTIPLY_SEVERAL, shapes)
    return list(call(x, *weights, ascending=by.ascending, block=np.int32(by.block)))


def _native(x: Float[Array, "N in"], weight: Float[Array, "out in"], by: Order) -> Float32[Array, "N out"]:
    out = jax.ShapeDtypeStruct((len(x), len(weight)), jnp.float32)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call(library.MULTIPLY, out)
    product: Float32[Array, "N out"] = call(x, weight, ascending=by.ascending, block=np.int32(by.block))
    return product


@jax.jit
def _xla(x: Float[Array, "N in"], weight: Float[Array, "out in"]) -> Float32[Array, "N out"]:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
