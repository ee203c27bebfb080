"""Weights of several modules that multiply the same rows, held as one weight on accelerators.

One product reads the joined weight. XLA on GPUs joins such products itself, and copies their weights at every call to do so.
CPUs keep the parts: a native operator multiplies them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.models.shards import Index, Shards
from chunkattn.models.spec import EXPERTS, DecoderSpec

_MODULES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    tuple(f"in_proj_{part}" for part in "qkvzba"): "in_proj_qkvzba",
}
"""Names of joined modules by their parts, which are divided along axis 0."""
_WHOLE = {parts[0]: (parts, whole) for parts, whole in _MODULES.items()}


def joins(platform: str) -> bool:
    """Return whether a platform holds joined weights.

    Args:
        platform: JAX's name of the platform.
    """
    return platform != "cpu"


def joined_name(modules: Sequence[str]) -> str:
    """Return the name of the joined weight of modules, whether a decoder has it or not.

    Args:
        modules: names of all modules that multiply the same rows, in order.
    """
    before, _, first = modules[0].rpartition(".")
    parts, whole = _WHOLE[first]
    assert [f"{before}.{part}" for part in parts] == list(modules)
    return f"{before}.{whole}.weight"


@dataclass(frozen=True)
class Joined:
    """A joined weight: for each device in order, the rows of the parts that it holds, one part after another.

    Devices that share KV heads each have the rows of these heads.

    Attributes:
        parts: shape `[out, in]` of each part by the name of its parameter.
    """

    parts: Mapping[str, tuple[int, ...]]

    def heights(self, shards: Shards) -> list[int]:
        """Return the rows of each part that a device holds."""
        return [shards.held(name, shape)[0] for name, shape in self.parts.items()]

    def shape(self, shards: Shards) -> tuple[int, int]:
        """Return the shape of the weight over all devices."""
        return shards.size * sum(self.heights(shards)), next(iter(self.parts.values()))[1]

    def read(self, read: Callable[[str, Index], np.ndarray], dtype: np.dtype, shards: Shards, index: Index) -> np.ndarray:
        """Return the rows of one device.

        Args:
            read: reads a part of a parameter by its name.
            dtype: dtype of the values.
            shards: devices of the model.
            index: rows of one device in the weight; empty for the whole weight of one device.
        """
        heights = self.heights(shards)
        rows, columns = self.shape(shards)
        device = (index[0].start or 0) * shards.size // rows if index else 0
        out, begin = np.empty((sum(heights), columns), dtype), 0
        for name, height in zip(self.parts, heights, strict=True):
            first = device * shards.division(name)[1] // shards.size * height
            out[begin : begin + height] = read(name, (slice(first, first + height),))
            begin += height
        return out

    def separate(self, weight: jax.Array, shards: Shards) -> dict[str, jax.Array]:
        """Return the parts of the weight by the names of their parameters."""
        by_device, end = weight.reshape(shards.size, -1, weight.shape[1]), 0
        parts = {}
        for name, height in zip(self.parts, self.heights(shards), strict=True):
            end += height
            distinct = by_device[:: shards.size // shards.division(name)[1], end - height : end]
            parts[name] = distinct.reshape(-1, weight.shape[1])
        return parts


@cache
def joined_weights(spec: DecoderSpec) -> dict[str, Joined]:
    """Return the joined weights that a decoder may have, by name.

    Args:
        spec: shape of the decoder.
    """
    shapes, found = spec.parameters(), dict[str, Joined]()
    for name in shapes:
        before, _, module = name.removesuffix(".weight").rpartition(".")
        if name.endswith(".weight") and module in _WHOLE and not before.endswith(EXPERTS):
            parts, whole = _WHOLE[module]
            found[f"{before}.{whole}.weight"] = Joined({n: shapes[n] for n in (f"{before}.{part}.weight" for part in parts)})
    return found


def multiplied(products: jax.Array, name: str, spec: DecoderSpec, shards: Shards) -> list[jax.Array]:
    """Return the products with each part of a joined weight, from those with the part of the weight of one device.

    Args:
        products: float32 `[N, out]`.
        name: name of the weight.
        spec: shape of the decoder.
        shards: devices of the model.
    """
    heights = joined_weights(spec)[name].heights(shards)
    return jnp.split(products, np.cumsum(heights)[:-1].tolist(), axis=1)
