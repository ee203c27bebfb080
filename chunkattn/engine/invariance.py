"""`Invariance`: whether the bits of a result depend on its request alone, and what that takes on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBackend
from chunkattn.backends.cpu import linear as few_rows
from chunkattn.errors import ConfigError
from chunkattn.models.linear import multiply, sums

_DEPTH, _OUTPUTS = 1024, 80
_ROWS = (1, 2, 3, 7, 16, 64, 300, 1024)


@dataclass(frozen=True)
class Invariance:
    """The way an engine keeps the bits of results.

    Attributes:
        holds: whether the bits of a result depend on its request alone.
        one_size: whether all steps, and all blocks of rows that are read, have one size for that.
    """

    holds: bool
    one_size: bool

    @classmethod
    def of(cls, wanted: bool | None, backend: AttentionBackend, dtype: jnp.dtype) -> Invariance:
        """Return what the option `batch_invariant` comes to.

        Args:
            wanted: the option; None takes what costs nothing.
            backend: attention backend of the engine.
            dtype: dtype of the model's weights.

        Raises:
            ConfigError: the option is True, and the backend's rows depend on each other.
        """
        few_rows.allow_any_order(wanted is False)
        if wanted is False or (wanted is None and not backend.keeps_bits):
            return cls(False, False)
        if not backend.keeps_bits:
            raise ConfigError(
                f"batch_invariant True: the attention backend {backend.name!r} adds up a row in an order that follows the "
                "other rows of its step; choose attention_backend 'cpu', 'xla' or 'reference', or leave the option out"
            )
        free = jax.default_backend() == "cpu" and rows_agree(dtype)
        return cls(free or wanted is True, one_size=not free and wanted is True)


@cache
def rows_agree(dtype: jnp.dtype) -> bool:
    """Return whether products of `dtype` and sums of rows have one order of additions for any number of rows.

    The test compares the same rows in products of several sizes, bit by bit.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_ROWS[-1], _DEPTH)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal((_OUTPUTS, _DEPTH)), dtype)

    @jax.jit
    def compute(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return multiply(x, weight), sums(x)

    whole = jax.device_get(compute(x))
    some = ((rows, jax.device_get(compute(x[:rows]))) for rows in _ROWS[:-1])
    return all(np.array_equal(of, by[:rows]) for rows, pair in some for of, by in zip(pair, whole, strict=True))
