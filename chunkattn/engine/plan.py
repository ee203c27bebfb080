"""`plan`: the memory that a model takes on each of its devices, from its configuration alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from chunkattn.backends.registry import get_backend
from chunkattn.config import EngineConfig
from chunkattn.engine.build import ACCELERATOR_SHARE, attention_spec
from chunkattn.engine.kv_pool import page_bytes
from chunkattn.errors import ConfigError
from chunkattn.models.shards import Shards, indivisible
from chunkattn.models.spec import DecoderSpec

_GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """Kind of device.

    Attributes:
        title: name of its maker.
        memory_bytes: memory that JAX gives to programs.
        block_size: tokens per KV page by default.
    """

    title: str
    memory_bytes: int
    block_size: int = 16


CHIPS = {
    "v5e": Chip("TPU v5e", 16 * _GIB),
    "v5p": Chip("TPU v5p", 95 * _GIB),
    "v6e": Chip("TPU v6e", 32 * _GIB),
    "h100": Chip("NVIDIA H100 80GB", 84_929_347_584 * 3 // 4, 64),
}
"""Devices by name. JAX takes three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""


@dataclass(frozen=True)
class Plan:
    """Memory of a model on each of its devices.

    Attributes:
        size: number of devices.
        weight_bytes: bytes of the weights on each device.
        least_weight_bytes: bytes of all weights, divided by the number of devices. Norms, and KV heads that devices share, are
            on several devices.
        free_bytes: bytes that the engine leaves to the KV pool on each device; negative if the weights do not fit.
        page_bytes: bytes of a KV page on each device, over all layers.
        block_size: tokens per page.
    """

    size: int
    weight_bytes: int
    least_weight_bytes: int
    free_bytes: int
    page_bytes: int
    block_size: int

    @property
    def num_pages(self) -> int:
        """Return the number of pages of the KV pool; 0 if the model does not fit."""
        return max(0, self.free_bytes // self.page_bytes)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose K/V fit."""
        return self.num_pages * self.block_size


def plan(config: EngineConfig, spec: DecoderSpec, dtype: jnp.dtype, chip: Chip, size: int) -> Plan:
    """Return the memory of a model on devices that may be absent, as an engine takes it without `kv_cache_memory_bytes`.

    Args:
        config: options of the engine: `block_size`, `kv_cache_dtype` and `kv_cache_memory_bytes` count.
        spec: shape of the model.
        dtype: dtype of the weights.
        chip: kind of the devices.
        size: number of devices.

    Raises:
        ConfigError: the model cannot be divided over that many devices.
    """
    shards = Shards.absent(size, spec)
    attention = attention_spec(replace(config, block_size=config.block_size or chip.block_size), spec, dtype, shards)
    shapes = spec.parameters()
    weights = sum(math.prod(shards.held(name, shape)) for name, shape in shapes.items()) * dtype.itemsize
    free = int(chip.memory_bytes * ACCELERATOR_SHARE) - weights
    return Plan(
        size=size,
        weight_bytes=weights,
        least_weight_bytes=-(-sum(map(math.prod, shapes.values())) * dtype.itemsize // size),
        free_bytes=free if config.kv_cache_memory_bytes is None else min(free, config.kv_cache_memory_bytes),
        # The pages of all backends have the same bytes.
        page_bytes=page_bytes(get_backend("xla")(attention), spec.num_layers),
        block_size=attention.block_size,
    )


def sizes(spec: DecoderSpec, most: int = 16) -> Sequence[int]:
    """Return the powers of two, up to `most`, over which a model can be divided."""
    return [size for size in (1 << n for n in range(most.bit_length())) if not indivisible(size, spec)]


def chip_of(name: str) -> Chip:
    """Return a kind of device by its name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name.lower() not in CHIPS:
        raise ConfigError(f"unknown device {name!r}; known are {', '.join(CHIPS)}")
    return CHIPS[name.lower()]
