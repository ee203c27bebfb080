"""Arrays of the host that JAX takes over on CPUs without a copy."""

from __future__ import annotations

import math

import numpy as np

_LINE = 64
"""Alignment in bytes of JAX's own arrays, which an array that it takes over needs."""


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros that JAX takes over.

    Args:
        shape: shape of the array.
        dtype: its type.
    """
    size = math.prod(shape) * dtype.itemsize
    held = np.zeros(size + _LINE, np.uint8)
    start = -held.ctypes.data % _LINE
    return held[start : start + size].view(dtype).reshape(shape)


def aligned(values: np.ndarray) -> np.ndarray:
    """Return an array that JAX takes over, in memory that belongs to no file; the array itself if it is such a one."""
    root = values
    while isinstance(root.base, np.ndarray):
        root = root.base
    if root.flags.owndata and values.ctypes.data % _LINE == 0:
        return values
    held = aligned_zeros(values.shape, values.dtype)
    held[...] = values
    return held
