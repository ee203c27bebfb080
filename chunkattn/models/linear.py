"""Matrix products and norms. On CPUs a row has the same bits in `multiply` and in norms beside few rows and beside many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from chunkattn.backends.cpu import linear as native
from chunkattn.backends.cpu import rows
from chunkattn.models.packed import Packed, Weight, multiply_packed

_FLOAT32 = jnp.dtype("float32")
_COLUMNS = 8
"""Least columns of a product: XLA:CPU adds up a product of fewer in an order that follows the number of rows."""


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, dtype: jnp.dtype = _FLOAT32) -> jax.Array:
    """Return RMSNorm over the last axis, `[*axes, features]` in `dtype`.

    Args:
        x: `[*axes, features]`.
        scale: `[features]` factors of the normalised values.
        epsilon: value added to the mean square.
        dtype: dtype of the result.

    Source: arXiv:1910.07467.
    """
    options: dict[str, Any] = {"epsilon": epsilon, "dtype": dtype}
    normed: jax.Array = _on_cpus(partial(rows.norm, **options), partial(_norm, **options))(x.astype(jnp.float32), scale)
    return normed


def add_rms_norm(
    x: jax.Array, delta: jax.Array, scale: jax.Array, epsilon: float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return `x + delta`, and its `rms_norm` in `dtype`.

    Args:
        x: float32 `[N, features]`.
        delta: float32 `[N, features]`.
        scale: `[features]` factors of the normalised values.
        epsilon: value added to the mean square.
        dtype: dtype of the norm.
    """
    options: dict[str, Any] = {"epsilon": epsilon, "dtype": dtype}

    def plain(x: jax.Array, delta: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + delta, _norm(x + delta, scale, **options)

    total, normed = _on_cpus(partial(rows.add_norm, **options), plain)(x, delta, scale)
    return total, normed


def gated(gate: jax.Array, up: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return `silu(gate) * up` in `dtype`, from float32 arrays of one shape."""

    def plain(gate: jax.Array, up: jax.Array) -> jax.Array:
        return (jax.nn.silu(gate) * up).astype(dtype)

    product: jax.Array = _on_cpus(partial(rows.gate, dtype=dtype), plain)(gate, up)
    return product


def _norm(x: jax.Array, scale: jax.Array, *, epsilon: float, dtype: jnp.dtype) -> jax.Array:
    mean = sums(jnp.square(x)) / x.shape[-1]
    return (x * jax.lax.rsqrt(mean + epsilon) * scale.astype(jnp.float32)).astype(dtype)


def _on_cpus(native: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `native` on CPUs and `plain` elsewhere. Its derivative is that of `plain`."""
    if not rows.serves():
        return plain

    @jax.custom_jvp
    def either(*args: jax.Array) -> Any:
        return jax.lax.platform_dependent(*args, cpu=native, default=plain)

    either.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return either


def multiply(x: jax.Array, weight: Weight) -> jax.Array:
    """Return `x @ weight.T`, computed in the weight's dtype and accumulated in float32. A packed weight has its own arithmetic.

    Float32 results are more exact than bfloat16, and come from XLA:CPU's only fast bfloat16 dot. On CPUs, a native operator
    multiplies few rows, and any number with AMX. It has no derivative.

    Args:
        x: `[N, in]`.
        weight: `[out, in]`, as in checkpoints; XLA:CPU reads it twice as fast as `[in, out]` for few rows.
    """
    if isinstance(weight, Packed):
        return multiply_packed(x, [weight])[0]
    x = x.astype(weight.dtype)
    if native.serves(x, weight):
        return jax.lax.platform_dependent(x, weight, cpu=native.multiply, default=dot)
    return dot(x, weight)


def multiply_several(x: jax.Array, weights: Sequence[Weight]) -> list[jax.Array]:
    """Return `multiply` of the same rows with each of several weights, where possible in one native call.

    Args:
        x: `[N, in]`.
        weights: weights `[out, in]`; packed ones share the integers of the rows.
    """
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if len(packed) == len(weights):
        return multiply_packed(x, packed)
    plain = [weight for weight in weights if not isinstance(weight, Packed)]
    if packed:
        of = {True: iter(multiply_packed(x, packed)), False: iter(multiply_several(x, plain))}
        return [next(of[isinstance(weight, Packed)]) for weight in weights]
    rows = x.astype(plain[0].dtype)
    if not all(native.serves(rows, weight) for weight in plain):
        return [multiply(x, weight) for weight in weights]
    products: list[jax.Array] = jax.lax.platform_dependent(rows, *plain, cpu=native.multiply_several, default=_dots)
    return products


def _dots(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    return [dot(x, weight) for weight in weights]


def multiply_rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `multiply`, its results rounded once to the weight's dtype where that is bfloat16. Half of the bytes go to memory.

    Args:
        x: `[N, in]`.
        weight: `[out, in]`.
    """
    if weight.dtype != jnp.bfloat16:  # float16 has too small a range
        return multiply(x, weight)

    def rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(x, weight, weight.dtype).astype(jnp.float32)

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:  # XLA:CPU has no fast product with such results
        return jax.lax.reduce_precision(multiply(x, weight), exponent_bits=8, mantissa_bits=7)

    product: jax.Array = jax.lax.platform_dependent(x.astype(weight.dtype), weight, cpu=on_cpu, default=rounded)
    return product


def rows_dtype(weights: Sequence[Weight], dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of rows that `multiply` takes without loss: `dtype`, or float32 where a weight is packed."""
    return _FLOAT32 if any(isinstance(weight, Packed) for weight in weights) else dtype


def dot(x: jax.Array, weight: jax.Array, dtype: jnp.dtype = _FLOAT32) -> jax.Array:
    """Return XLA's own product of `multiply` in `dtype`, for operands of one dtype. Sums are float32.

    On CPUs a row has the same bits beside any number of other rows, but in bfloat16 on processors with AMX.
    """
    rows, columns = len(x), len(weight)
    if rows == 1:  # XLA:CPU adds up a single row in another order, and takes ten times as long for one of 16 bits
        x = jnp.concatenate([x, x])
    if columns < _COLUMNS:
        weight = jnp.pad(weight, ((0, _COLUMNS - columns), (0, 0)))
    product = jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), precision=_precision(weight.dtype), preferred_element_type=dtype
    )
    return product[:rows, :columns]


def sums(x: jax.Array) -> jax.Array:
    """Return the sums over the last axis of float32 `[*axes, N]`, as `[*axes, 1]`.

    CPUs multiply by ones: a product has one order of additions for any number of rows, and XLA:CPU's own sums do not.
    Accelerators reduce, in the kernel that makes the numbers. They promise bits in programs of one size alone, where every row
    has the same order.
    """
    return jax.lax.platform_dependent(x, cpu=_sums_by_product, default=partial(jnp.sum, axis=-1, keepdims=True))


def _sums_by_product(x: jax.Array) -> jax.Array:
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return dot(x.reshape(-1, x.shape[-1]), ones).reshape(*x.shape[:-1], 1)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Return the precision that keeps float32 products in float32; accelerators default to bf16 or tf32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
