"""`plan`: the memory that a model takes on each of its devices, from its configuration alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from chunkattn.backends.cpu.packed import FORMATS, ROWS
from chunkattn.backends.registry import get_backend
from chunkattn.config import EngineConfig
from chunkattn.engine.build import attention_spec, bytes_beside_steps, default_block_size, num_tracks
from chunkattn.engine.kv_pool import page_bytes
from chunkattn.errors import ConfigError
from chunkattn.models.adapter_slots import SlotShape
from chunkattn.models.packing import Packing, plan_packing
from chunkattn.models.shards import ONE_DEVICE, Shards, indivisible
from chunkattn.models.spec import DecoderSpec

_GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """Kind of device.

    Attributes:
        title: name of its maker.
        memory_bytes: memory that the driver gives to programs.
        is_gpu: whether JAX takes the share `gpu_memory_utilization` of the memory; of a TPU it takes all.
    """

    title: str
    memory_bytes: int
    is_gpu: bool = False

    @property
    def block_size(self) -> int:
        """Return the default number of tokens per KV page."""
        return default_block_size("gpu" if self.is_gpu else "tpu")

    def jax_bytes(self, config: EngineConfig) -> int:
        """Return the bytes that JAX takes."""
        return int(self.memory_bytes * config.gpu_memory_utilization) if self.is_gpu else self.memory_bytes


def _gpu(title: str, gib: float) -> Chip:
    return Chip(f"NVIDIA {title}", int(gib * _GIB), is_gpu=True)


CHIPS = {
    "v5e": Chip("TPU v5e", 16 * _GIB),
    "v5p": Chip("TPU v5p", 95 * _GIB),
    "v6e": Chip("TPU v6e", 32 * _GIB),
    "t4": _gpu("T4", 14.5),
    "a10g": _gpu("A10G", 21.9),
    "l4": _gpu("L4", 21.9),
    "l40s": _gpu("L40S", 44.3),
    "rtx3090": _gpu("RTX 3090", 23.5),
    "rtx4090": _gpu("RTX 4090", 23.5),
    "rtx5090": _gpu("RTX 5090", 31.3),
    "rtxa6000": _gpu("RTX A6000", 47.4),
    "a100-40gb": _gpu("A100 40GB", 39.3),
    "a100": _gpu("A100 80GB", 79.1),
    "h100": _gpu("H100 80GB", 79.1),
    "h100-nvl": _gpu("H100 NVL", 93.0),
    "gh200": _gpu("GH200 96GB", 94.5),
    "h200": _gpu("H200", 139.7),
    "b200": _gpu("B200", 178.3),
}
"""Devices by name. A driver keeps a part of a GPU's memory: of the 80 GB of an H100 it gives 79.1 GiB."""
_OTHER_NAMES = {"a10": "a10g", "a100-80gb": "a100", "h100-80gb": "h100", "v5litepod": "v5e"}
USUAL = ("v5e", "v5p", "v6e", "l4", "a100", "h100", "h200")
"""Devices of a plan that names none."""


@dataclass(frozen=True)
class Plan:
    """Memory of a model on each of its devices.

    Attributes:
        size: number of devices.
        weight_bytes: bytes of the weights on each device, and of the slots of adapters.
        least_weight_bytes: bytes of all weights, divided by the number of devices. Norms, and KV heads that devices share, are
            on several devices.
        free_bytes: bytes that the engine leaves to the KV pool on each device; negative if the weights do not fit.
        page_bytes: bytes of a KV page on each device, over all layers.
        block_size: tokens per page.
        state_bytes: bytes of a state of the recurrent layers on each device; 0 without such layers.
        num_states: states that fit beside those of running samples.
        num_tracks: samples that may run.
    """

    size: int
    weight_bytes: int
    least_weight_bytes: int
    free_bytes: int
    page_bytes: int
    block_size: int
    state_bytes: int = 0
    num_states: int = 0
    num_tracks: int = 0

    @property
    def num_pages(self) -> int:
        """Return the number of pages of the KV pool; 0 if the model does not fit."""
        return max(0, self.free_bytes // max(self.page_bytes, 1))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose K/V fit."""
        return self.num_pages * self.block_size


def plan(
    config: EngineConfig, spec: DecoderSpec, dtype: jnp.dtype, chip: Chip, size: int, slots: SlotShape | None = None
) -> Plan:
    """Return the memory of a model on devices that may be absent, as an engine takes it without `kv_cache_memory_bytes`.

    Args:
        config: options of the engine: `block_size`, `kv_cache_dtype`, `kv_cache_memory_bytes`, `state_cache_memory_bytes`,
            `max_num_seqs` and `gpu_memory_utilization` count.
        spec: shape of the model.
        dtype: dtype of the weights.
        chip: kind of the devices.
        size: number of devices.
        slots: slots of adapters by request; None for none.

    Raises:
        ConfigError: the model cannot be divided over that many devices.
    """
    shards = Shards.absent(size, spec)
    attention = attention_spec(replace(config, block_size=config.block_size or chip.block_size), spec, dtype, shards)
    shapes = spec.parameters()
    values = sum(math.prod(shards.held(name, shape)) for name, shape in shapes.items())
    weights = (values + (slots.num_values(shards) if slots else 0)) * dtype.itemsize
    free = bytes_beside_steps(chip.jax_bytes(config)) - weights
    tracks = num_tracks(config, spec, size, max(free, 0))
    free -= tracks.num_bytes
    return Plan(
        size=size,
        weight_bytes=weights,
        least_weight_bytes=-(-sum(map(math.prod, shapes.values())) * dtype.itemsize // size),
        free_bytes=free if config.kv_cache_memory_bytes is None else min(free, config.kv_cache_memory_bytes),
        # The pages of all backends have the same bytes.
        page_bytes=page_bytes(get_backend("xla")(attention), len(spec.attention_layers)),
        block_size=attention.block_size,
        state_bytes=tracks.slot_bytes,
        num_states=tracks.slots - tracks.seats,
        num_tracks=tracks.seats,
    )


def packed_bytes(config: EngineConfig, spec: DecoderSpec, dtype: jnp.dtype, types: Mapping[str, str]) -> int | None:
    """Return the bytes of the weights on one CPU that packs them, or None if it packs none.

    Args:
        config: options of the engine.
        spec: shape of the model.
        dtype: dtype of the weights that are not packed.
        types: the file's name of each parameter's type.
    """
    if not types and config.quantization is None:
        return None
    packing, shapes = Packing.of(config, dtype), spec.parameters()
    formats = {} if packing is None else plan_packing(packing, types or dict.fromkeys(shapes, dtype.name), shapes)
    if not formats:
        return None
    return sum(
        FORMATS[formats[name]].packed_bytes(*ONE_DEVICE.held(name, shape, ROWS))
        if name in formats
        else math.prod(shape) * dtype.itemsize
        for name, shape in shapes.items()
    )


def sizes(spec: DecoderSpec) -> list[int]:
    """Return the powers of two up to 16 over which a model can be divided."""
    return [size for size in (1, 2, 4, 8, 16) if not indivisible(size, spec)]


def chip_of(name: str) -> tuple[str, Chip]:
    """Return the name in `CHIPS` and the kind of a device.

    Args:
        name: name in `CHIPS` or of the maker, such as `NVIDIA A100 80GB`; case does not matter.

    Raises:
        ConfigError: the name is unknown.
    """
    key = re.sub(r"^(nvidia|tpu)[ -]", "", name.strip().lower()).replace(" ", "-").replace("rtx-", "rtx")
    key = _OTHER_NAMES.get(key, key)
    if key not in CHIPS:
        raise ConfigError(f"unknown device {name!r}; known are {', '.join(CHIPS)}")
    return key, CHIPS[key]
