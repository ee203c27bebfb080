"""Fingerprint of a model's K/V: identifies everything that K/V depends on besides the prompt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import xxhash

KV_VERSION = 3
"""Version of the code that computes and caches K/V. Raise it with any change that may invalidate K/V on disk."""


def fingerprint(form: Any, weights: Iterable[tuple[str, jax.Array]]) -> bytes:
    """Return 16 bytes that differ between models whose K/V may differ. Equal inputs give equal bytes on every machine.

    Args:
        form: geometry of the model, attention and pool, as nested dataclasses, sequences, arrays and scalars.
        weights: name and array of every weight of the model.
    """
    digest = xxhash.xxh3_128(json.dumps([KV_VERSION, _plain(form)], sort_keys=True).encode())
    for name, leaf in weights:
        value = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{name}{value.shape}{value.dtype}".encode())
        digest.update(value.view(np.uint8).data if value.ndim else value.tobytes())
    return digest.digest()


def _plain(value: Any) -> Any:
    """Return a value as JSON types. `repr` is unsuitable: NumPy's texts differ between its versions."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tobytes().hex()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value.hex()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
