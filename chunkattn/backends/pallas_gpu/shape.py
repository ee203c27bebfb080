"""Sizes that the GPU kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from chunkattn.backends.base import StepArray
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.pallas_gpu.products import ROWS

_TILES = {64: (128, 4), 128: (128, 3), 256: (64, 2)}
"""Slots of a KV tile and stages of the ring by head size, for outputs."""
_STATE_TILES = {64: (128, 4), 128: (64, 5), 256: (64, 2)}
"""The same for states, whose float32 values take shared memory, too."""
_FP8_TILES = {64: (128, 3, 4), 128: (128, 2, 2), 256: (64, 2, 1)}
"""Slots, stages, and stages of the ring of FP8 tiles, for outputs."""
_FP8_STATE_TILES = {64: (128, 2, 6), 128: (64, 2, 6), 256: (64, 2, 1)}
"""The same for states."""

UNIT = 8
"""Rows of outputs that are copied at once: those of one tile of shared memory."""


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
        groups: query heads per KV head, which are rows side by side.
        states: whether items end in softmax states; else in outputs.
        fp8_stages: KV tiles of the ring that FP8 pages are copied to before they are converted; 0 for 16-bit pages.
        blocks: blocks of threads that share the items, for states.
        window: sliding window in positions, or None.
    """

    head_dim: int
    block_size: int
    slots: int
    stages: int
    warpgroups: int
    rows: int
    groups: int
    states: bool
    fp8_stages: int = 0
    blocks: int = 132
    window: int | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of a warpgroup, whose query heads do not lie in two warpgroups."""
        return min(self.rows, ROWS) // self.groups

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block of queries."""
        return self.warpgroups * self.tokens

    def units(self, tokens: StepArray) -> StepArray:
        """Return the units of output rows of a warpgroup's tokens."""
        return -(-tokens * self.groups // UNIT)

    @property
    def box(self) -> int:
        """Return the slots of one copy: a page, or a KV tile that is smaller."""
        return min(self.block_size, self.slots)

    @property
    def boxes(self) -> int:
        """Return the copies of K, and of V, of a KV tile."""
        return self.slots // self.box

    @property
    def fp8_barriers(self) -> int:
        """Return the barriers for K, and for V, of the FP8 ring: at least two, as a lone one's constant address would spill."""
        return self.fp8_stages and max(2, self.fp8_stages)

    @property
    def producer_registers(self) -> int:
        """Return the registers of a thread of the producer beside two consumers. Many copies and conversions need more."""
        return 40 + 16 * (self.boxes > 4) + 16 * (self.fp8_stages > 0 and self.head_dim <= 128)

    @property
    def consumer_registers(self) -> int:
        """Return the registers of a thread of two consumers, which share 504 with the producer."""
        return (504 - self.producer_registers) // 2

    @property
    def state_lanes(self) -> int:
        """Return the lanes of values that are copied to GMEM at once. 256 lanes of float32 would leave too little for rings."""
        return 64 if self.head_dim > 128 and self.fp8_stages else min(self.head_dim, 128)

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of shared memory for queries, K, V and sums, in a 16-bit dtype, and for FP8 tiles."""
        queries = 2 * self.warpgroups * ROWS * self.head_dim
        pages = (4 * self.stages + 2 * self.fp8_stages) * self.slots * self.head_dim
        return queries + pages + (4 * ROWS * (self.state_lanes + 2) if self.states else 0)

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
        fp8_ring = None
        if self.fp8_stages:
            fp8_tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
            fp8_ring = plgpu.SMEM((self.fp8_stages, self.slots, self.head_dim), FP8, transforms=fp8_tiles)
        sums = (
            plgpu.SMEM((ROWS, self.state_lanes), jnp.float32, transforms=float_tiles),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
        )
        copied = plgpu.Barrier(num_arrivals=self.boxes, num_barriers=self.fp8_barriers or self.stages)
        arrived = plgpu.Barrier(num_barriers=self.stages) if self.fp8_stages else copied
        free = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        return (
            plgpu.SMEM((self.warpgroups, ROWS, self.head_dim), dtype, transforms=tiles),
            ring,
            ring,
            sums if self.states else None,
            plgpu.Barrier(num_barriers=self.warpgroups),
            arrived,
            arrived,
            copied,
            free,
            free,
            plgpu.Barrier(num_arrivals=2) if self.warpgroups == 2 else None,
            fp8_ring,
            fp8_ring,
            copied if self.fp8_stages else None,
        )


def shape_for(head_dim: int, block_size: int, *, rows: int, groups: int, states: bool, fp8: bool) -> Shape:
    """Return the sizes for outputs of two warpgroups, or for states of one."""
    if fp8:
        slots, stages, fp8_stages = (_FP8_STATE_TILES if states else _FP8_TILES)[head_dim]
    else:
        (slots, stages), fp8_stages = (_STATE_TILES if states else _TILES)[head_dim], 0
    return Shape(head_dim, block_size, slots, stages, 1 if states else 2, rows, groups, states, fp8_stages)
