"""The chips compiled for. Figures are Google's (cloud.google.com/tpu/docs), per chip unless stated otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies


@dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
        name: name as in topologies.
        topology: arguments of `get_topology_desc` for the smallest topology.
        cores: TensorCores, which a kernel sees as one device.
        clock: bundles per second of a core.
        flops: bfloat16 peak, in operations per second.
        hbm_bytes: HBM in bytes.
        hbm_bandwidth: HBM bytes per second.
    """

    name: str
    topology: dict[str, Any]
    cores: int
    clock: float
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float

    @property
    def macs_per_bundle(self) -> float:
        """Return the maximum number of multiplications of one core in one bundle."""
        return self.flops / 2 / self.cores / self.clock

    def sharding(self) -> jax.sharding.Sharding:
        """Return the sharding of arrays on one chip."""
        return jax.sharding.SingleDeviceSharding(_device(self.name))


_ONE = [1, 1, 1]
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", {"topology_name": "v5e:1x1", "chips_per_host_bounds": _ONE}, 1, 1.5e9, 197e12, 16 << 30, 819e9),
        Chip("v5p", {"topology_name": "v5p:2x2x1"}, 2, 1.75e9, 459e12, 95 << 30, 2765e9),
        Chip("v6e", {"topology_name": "v6e:1x1", "chips_per_host_bounds": _ONE}, 1, 1.75e9, 918e12, 32 << 30, 1638e9),
    )
}


@cache
def _device(name: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", **CHIPS[name].topology).devices[0]
