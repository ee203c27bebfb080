"""Linear layers and norms. On CPUs a row has the same bits beside few rows and beside many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from chunkattn.backends.cpu import linear as few_rows

_COLUMNS = 8
"""Least columns of a product: XLA:CPU adds up a product of fewer in an order that follows the number of rows."""


class Linear(nnx.Module):
    """Linear layer that holds its weight as checkpoints do, `[out, in]`.

    XLA:CPU reads such a weight about twice as fast as `[in, out]` when the input has few rows.
    """

    def __init__(self, features_in: int, features_out: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        initial = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(initial(rngs.params(), (features_out, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32 `[N, out]` from `[N, in]`."""
        y = multiply(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


class RMSNorm(nnx.Module):
    """RMSNorm in float32.

    Source: arXiv:1910.07467.
    """

    def __init__(self, features: int, epsilon: float, dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(features, dtype))
        self.features, self.epsilon = features, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return float32 `[*axes, features]`, normalised over the last axis, from an input of the same shape."""
        x = x.astype(jnp.float32)
        mean = sums(jnp.square(x)) / self.features
        return x * jax.lax.rsqrt(mean + self.epsilon) * self.scale[...].astype(jnp.float32)


def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `x @ weight.T`, computed in the weight's dtype and accumulated in float32.

    Float32 results are more exact than bfloat16, and come from XLA:CPU's only fast bfloat16 dot. On CPUs, a native operator
    multiplies few rows.

    Args:
        x: `[N, in]`.
        weight: `[out, in]`.
    """
    x = x.astype(weight.dtype)
    if few_rows.serves(x, weight):
        return jax.lax.platform_dependent(x, weight, cpu=few_rows.multiply, default=dot)
    return dot(x, weight)


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return XLA's own product of `multiply`, for operands of one dtype.

    On CPUs a row has the same bits beside any number of other rows.
    """
    rows, columns = len(x), len(weight)
    if rows == 1:  # XLA:CPU adds up a single row in another order, and takes ten times as long for one of 16 bits
        x = jnp.concatenate([x, x])
    if columns < _COLUMNS:
        weight = jnp.pad(weight, ((0, _COLUMNS - columns), (0, 0)))
    product = jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=_precision(weight.dtype), preferred_element_type=jnp.float32
    )
    return product[:rows, :columns]


def sums(x: jax.Array) -> jax.Array:
    """Return the sums over the last axis of float32 `[*axes, N]`, as `[*axes, 1]`.

    A product has one order of additions for any number of rows. XLA:CPU's own sums do not.
    """
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return dot(x.reshape(-1, x.shape[-1]), ones).reshape(*x.shape[:-1], 1)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Return the precision that keeps float32 products in float32; accelerators default to bf16 or tf32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
