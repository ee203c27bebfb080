"""Native operator for the normaliser of a row of logits, computed in two walks over the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from chunkattn.backends.cpu import library


def serves() -> bool:
    """Return whether the operator runs in this process."""
    return library.refusal() is None


def normaliser(logits: Float32[Array, "N vocab"]) -> Float32[Array, "N 2"]:
    """Return each row's maximum, and the logarithm of the sum of its exponentials relative to it.

    Both are NaN where a logit is not finite. A row has the same bits beside any number of other rows.

    Args:
        logits: logits of each row.
    """
    out = jax.ShapeDtypeStruct((len(logits), 2), jnp.float32)  # type: ignore[no-untyped-call]
    normalisers: Float32[Array, "N 2"] = jax.ffi.ffi_call(library.NORMALISE, out)(logits)
    return normalisers
