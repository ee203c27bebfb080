"""Native operators on single rows: RMS norms, gates, and the largest logit. A row has the same bits beside any others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from chunkattn.backends.cpu import library


def serves() -> bool:
    """Return whether the operators run in this process."""
    return library.refusal() is None


def norm(
    x: Float32[Array, "*axes F"], scale: Float[Array, " F"], *, epsilon: float, dtype: jnp.dtype
) -> Float[Array, "*axes F"]:
    """Return the RMS norm of rows.

    Args:
        x: rows.
        scale: factors of the normalised values.
        epsilon: value added to the mean square.
        dtype: dtype of the result: float32, bfloat16 or float16.
    """
    out = jax.ShapeDtypeStruct(x.shape, dtype)  # type: ignore[no-untyped-call]
    (normed,) = jax.ffi.ffi_call(library.NORM, [out])(x, scale, epsilon=np.float32(epsilon))
    return normed


def add_norm(
    x: Float32[Array, "N F"], delta: Float32[Array, "N F"], scale: Float[Array, " F"], *, epsilon: float, dtype: jnp.dtype
) -> tuple[Float32[Array, "N F"], Float[Array, "N F"]]:
    """Return `x + delta`, and its `norm`.

    Args:
        x: rows.
        delta: rows to add.
        scale: see `norm`.
        epsilon: see `norm`.
        dtype: dtype of the norm.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, of) for of in (dtype, jnp.float32)]  # type: ignore[no-untyped-call]
    normed, total = jax.ffi.ffi_call(library.NORM, shapes)(x, scale, delta, epsilon=np.float32(epsilon))
    return total, normed


def gate(gates: Float32[Array, "N F"], up: Float32[Array, "N F"], *, dtype: jnp.dtype) -> Float[Array, "N F"]:
    """Return `silu(gates) * up` in float32, bfloat16 or float16.

    Args:
        gates: values that SiLU (arXiv:1702.03118) turns into factors.
        up: values to multiply.
        dtype: dtype of the result.
    """
    out = jax.ShapeDtypeStruct(gates.shape, dtype)  # type: ignore[no-untyped-call]
    product: Float[Array, "N F"] = jax.ffi.ffi_call(library.GATE, out)(gates, up)
    return product


def largest(logits: Float32[Array, "N vocab"]) -> tuple[Int32[Array, " N"], Bool[Array, " N"]]:
    """Return the index of each row's first maximum, and whether all values of the row are finite.

    Args:
        logits: rows. The index means nothing where one is NaN.
    """
    shapes = [jax.ShapeDtypeStruct((len(logits),), of) for of in (jnp.int32, jnp.bool_)]  # type: ignore[no-untyped-call]
    index, finite = jax.ffi.ffi_call(library.LARGEST, shapes)(logits)
    return index, finite
