"""One array for all host arrays of a call. A device copies every array of a call on its own, and each copy takes time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORD = np.dtype(np.int32)
_WORDS = frozenset(map(np.dtype, (np.int32, np.uint32, np.float32)))
"""Dtypes that travel as their bits."""
_ALIGNED = 64
"""Words of which the place of every leaf is a multiple. Kernels for GPUs may read many aligned bytes of an array at once."""


@dataclass(frozen=True, eq=False)
class Form:
    """Static description of a packed tree. `pack` returns one object for equal forms, so comparing takes no time.

    Attributes:
        structure: structure of the tree.
        shapes: shape of every leaf.
        dtypes: dtype of every leaf, as a program sees it.
        gaps: int32 zeros behind every leaf, up to the next place; at least one behind the last leaf.
    """

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    gaps: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, leaves: list[np.ndarray], structure: jax.tree_util.PyTreeDef) -> Form:
        """Return the form of leaves."""
        dtypes = tuple(jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves)
        gaps = [np.zeros(-leaf.size % _ALIGNED, _WORD) for leaf in leaves]
        gaps[-1] = np.zeros(_ALIGNED - leaves[-1].size % _ALIGNED, _WORD)
        return cls(structure, tuple(leaf.shape for leaf in leaves), dtypes, tuple(gaps))


_forms: dict[tuple[Any, ...], Form] = {}


def pack(tree: Any) -> tuple[np.ndarray, Form]:
    """Return the leaves of a tree in one new array, int32 `[n]`, and its form for `unpack`.

    Leaves of 32 bits keep their bits. Smaller ones are widened. Leaves of 64 bits become leaves of 32, as in every call of a
    JAX program.

    Args:
        tree: tree of NumPy arrays or numbers, at least one: booleans, integers or real numbers.

    Raises:
        TypeError: a leaf has another dtype.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = list(map(np.asarray, leaves))
    key = structure, *[(leaf.shape, leaf.dtype) for leaf in leaves]
    form = _forms.get(key)
    if form is None:
        form = _forms.setdefault(key, Form.of(leaves, structure))
    parts: list[np.ndarray] = []
    for leaf, gap in zip(leaves, form.gaps, strict=True):
        parts.append(leaf if leaf.dtype is _WORD else _words(leaf))
        if gap.size:
            parts.append(gap)
    return np.concatenate(parts, axis=None), form


def unpack(packed: jax.Array, form: Form) -> Any:
    """Return the tree of a packed array. Traced.

    Every leaf is combined with a zero that XLA does not know. XLA for GPUs would otherwise read a leaf that a kernel takes in a
    dynamic slice fusion, and update its nodes in the CUDA graph at every call.

    Args:
        packed: array of `pack`, int32 `[n]`.
        form: its form, static.
    """
    leaves, first, zero = [], 0, packed[-1]
    for shape, dtype, gap in zip(form.shapes, form.dtypes, form.gaps, strict=True):
        last = first + math.prod(shape)
        words = jax.lax.slice(packed, (first,), (last,)).reshape(shape) ^ zero
        if jnp.issubdtype(dtype, jnp.floating) or dtype in _WORDS:
            words = jax.lax.bitcast_convert_type(words, dtype if dtype in _WORDS else jnp.float32)
        leaves.append(words.astype(dtype))
        first = last + gap.size
    return jax.tree.unflatten(form.structure, leaves)


def _words(leaf: np.ndarray) -> np.ndarray:
    """Return an array as int32 of the same shape.

    Raises:
        TypeError: the dtype is neither boolean, integer nor real.
    """
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        dtype = np.dtype(np.float32)
    elif dtype not in _WORDS:
        if not jnp.issubdtype(dtype, jnp.bool_) and not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(f"an array of {leaf.dtype} cannot be packed")
        dtype = _WORD
    return leaf.astype(dtype, copy=False).view(_WORD)
