"""The two matrix products of the GPU kernel, and their twins for Pallas' GPU interpreter.

The interpreter has no `wgmma` with an operand in registers. Its twins multiply what they load from shared memory. Everything
else of the kernel is the same on a GPU and in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

ROWS = 64
"""Rows of one `wgmma`, and so of a warpgroup."""

_INDEX = signature(plgpu.load).parameters.get("idx")
_INDEX_IS_ARGUMENT = _INDEX is not None and _INDEX.default is Parameter.empty


def scores(q: Any, keys: Any, then: Callable[[], None], *, twin: bool) -> Float32[Array, "64 slots"]:
    """Return the products of queries and keys.

    Args:
        q: shared memory `[64, head_dim]`.
        keys: shared memory `[slots, head_dim]`.
        then: runs while the tensor cores are busy.
        twin: whether to run in the interpreter.
    """
    if twin:
        products = lax.dot_general(q[...], keys[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        then()
        return products

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, q, keys.transpose((1, 0)))
        then()
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, keys.shape[0]), jnp.float32))


def add_values(
    accumulated: Float32[Array, "64 D"], weights: Float[Array, "64 slots"], values: Any, then: Callable[[], None], *, twin: bool
) -> Float32[Array, "64 D"]:
    """Return `accumulated` plus the weighted sum of the values.

    Args:
        accumulated: sum so far, in registers.
        weights: weights of the slots, in registers and in the dtype of the values.
        values: shared memory `[slots, head_dim]`.
        then: runs while the tensor cores are busy.
        twin: whether to run in the interpreter.
    """
    if twin:
        added = lax.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        then()
        return accumulated + added

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, values)
        then()

    return pl.run_state(multiply)(plgpu.ACC.init(accumulated))  # type: ignore[no-untyped-call]


def commit() -> None:
    """Make what a warpgroup has stored in shared memory visible to the TMA unit and the tensor cores."""
    plgpu.commit_smem()  # type: ignore[no-untyped-call]


def load(ref: Any, index: Any, layout: Any) -> jax.Array:
    """Return `ref[index]` in a layout. JAX 0.10 requires the argument for the index, JAX 0.12 has none."""
    if _INDEX_IS_ARGUMENT:
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index], layout=layout, optimized=False)  # type: ignore[call-arg, unused-ignore]
