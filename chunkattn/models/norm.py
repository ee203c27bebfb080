"""Root-mean-square normalisation, with the same bits for a row beside few rows and beside many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from chunkattn.models.linear import sums


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
