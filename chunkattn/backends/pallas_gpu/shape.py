"""Sizes that the GPU kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from chunkattn.backends.pallas_gpu.products import ROWS

MOST_SHARED_BYTES = 232_448
"""Bytes of shared memory that a block of threads may use on Hopper."""

_TILES = {64: (128, 4), 128: (128, 3), 256: (64, 2)}
"""Slots of a KV tile and stages of the ring by head size, for outputs."""
_STATE_TILES = {64: (128, 4), 128: (64, 5), 256: (64, 2)}
"""The same for states, whose float32 values take shared memory, too."""


STATE_LANES = 128
"""Lanes of values that are copied to GMEM at once: the float32 values of 256 lanes leave too little room for the ring."""


@dataclass(frozen=True)
class Shape:
    """Sizes that the kernel is compiled for.

    Attributes:
        head_dim: size of a head.
        block_size: slots of a page.
        slots: slots of a KV tile.
        stages: KV tiles of the ring in shared memory.
        warpgroups: consumer warpgroups, 1 or 2.
        rows: folded rows of a block of queries: 64 a warpgroup, or 8 to 64 of one warpgroup.
        states: whether items end in softmax states; else in outputs.
        blocks: blocks of threads that share the items, for states.
    """

    head_dim: int
    block_size: int
    slots: int
    stages: int
    warpgroups: int
    rows: int
    states: bool
    blocks: int = 132

    @property
    def box(self) -> int:
        """Return the slots of one copy: a page, or a KV tile that is smaller."""
        return min(self.block_size, self.slots)

    @property
    def boxes(self) -> int:
        """Return the copies of K, and of V, of a KV tile."""
        return self.slots // self.box

    @property
    def producer_registers(self) -> int:
        """Return the registers of a thread of the producer beside two consumers. Many copies a tile need more."""
        return 40 if self.boxes <= 4 else 56

    @property
    def consumer_registers(self) -> int:
        """Return the registers of a thread of two consumers, which share 504 with the producer."""
        return (504 - self.producer_registers) // 2

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of shared memory for queries, K, V and sums, in a 16-bit dtype."""
        queries, pages = 2 * self.warpgroups * ROWS * self.head_dim, 4 * self.stages * self.slots * self.head_dim
        return queries + pages + (4 * ROWS * (min(self.head_dim, STATE_LANES) + 2) if self.states else 0)

    def place(self, turn: Any) -> Any:
        """Return the place in the ring of the `turn`-th KV tile of a block of threads."""
        return lax.rem(turn, jnp.int32(self.stages))

    def after(self, place: Any) -> Any:
        """Return the place in the ring after a place."""
        if self.stages & (self.stages - 1) == 0:
            return (place + 1) & (self.stages - 1)
        return jnp.where(place == self.stages - 1, 0, place + 1)

    def scratch(self, dtype: jnp.dtype) -> tuple[Any, ...]:
        """Return the buffers and barriers in shared memory, in the order of `walk.Smem`."""
        tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        float_tiles = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        ring = plgpu.SMEM((self.stages, self.slots, self.head_dim), dtype, transforms=tiles)
        sums = (
            plgpu.SMEM((ROWS, min(self.head_dim, STATE_LANES)), jnp.float32, transforms=float_tiles),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
        )
        arrived = plgpu.Barrier(num_arrivals=self.boxes, num_barriers=self.stages)
        free = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        return (
            plgpu.SMEM((self.warpgroups, ROWS, self.head_dim), dtype, transforms=tiles),
            ring,
            ring,
            sums if self.states else None,
            plgpu.Barrier(num_barriers=self.warpgroups),
            arrived,
            arrived,
            arrived,
            free,
            free,
            plgpu.Barrier(num_arrivals=2) if self.warpgroups == 2 else None,
        )


def shape_for(head_dim: int, block_size: int, *, rows: int, states: bool) -> Shape:
    """Return the sizes for outputs of two warpgroups, or for states of one."""
    slots, stages = (_STATE_TILES if states else _TILES)[head_dim]
    return Shape(head_dim, block_size, slots, stages, 1 if states else 2, rows, states)
