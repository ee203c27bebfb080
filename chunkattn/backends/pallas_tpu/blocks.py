"""Tile sizes of the TPU kernels by chip, head size and page size, chosen by the compiler's static schedules.

`python -m benchmarks.tpu_tune` compiles the candidates and prints this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

LANES = 128


@dataclass(frozen=True)
class Shape:
    """Sizes that the kernel is compiled for.

    Attributes:
        kv_heads: number of KV heads.
        groups: query heads per KV head.
        head_dim: lanes of a head of queries and of results, 128 or 256.
        packed: whether K and V share 128 lanes (`head_dim` 64).
        rows: rows of a block; 1 for decodes.
        slots: slots of a KV tile, a multiple of 128 and of `block_size`.
        block_size: slots of a page.
        together: KV heads computed side by side; divides `heads`.
        head_blocks: size of the grid's outer axis, over KV heads; chips with two cores run it in parallel.
    """

    kv_heads: int
    groups: int
    head_dim: int
    packed: bool
    rows: int
    slots: int
    block_size: int
    together: int
    head_blocks: int = 1

    @property
    def pages(self) -> int:
        """Return the pages of a KV tile."""
        return self.slots // self.block_size

    @property
    def heads(self) -> int:
        """Return the KV heads of a grid step."""
        return self.kv_heads // self.head_blocks

    def vmem_bytes(self, dtype_bytes: int, cache_bytes: int) -> int:
        """Return the bytes of vector memory that a kernel of this shape takes, without the compiler's own.

        Args:
            dtype_bytes: bytes of a value of the model.
            cache_bytes: bytes of a value of the cache.
        """
        rows, folded = max(self.rows, 8), max(self.groups * self.rows, 8)
        sums = self.heads * folded * (2 * LANES + self.head_dim) * 4
        pages = 2 * self.heads * self.slots * self.lanes * cache_bytes
        queries = 5 * self.heads * folded * self.head_dim * dtype_bytes  # in and out, double-buffered, and folded
        scores = 2 * self.together * folded * self.slots * 4
        return sums + pages + queries + scores + rows * self.slots * 4

    @property
    def lanes(self) -> int:
        """Return the lanes of K and V of one slot and KV head."""
        return self.head_dim if self.packed else 2 * self.head_dim


class Blocks(NamedTuple):
    """Sizes of the kernels' tiles.

    Attributes:
        folded: rows of a query tile times query heads per KV head.
        slots: slots of a KV tile.
        together: KV heads with interleaved steps: the scores of one head are exponentiated while the scores of another
            are multiplied. A model with fewer KV heads gets proportionally larger query tiles.
    """

    folded: int
    slots: int
    together: int


class Chip(NamedTuple):
    """Properties of a TPU generation.

    Attributes:
        cores: TensorCores that share a kernel's grid.
        vmem_bytes: bytes of a core's vector memory that a kernel may use, three quarters of it.
    """

    cores: int
    vmem_bytes: int


CHIPS = {"v5e": Chip(1, 96 << 20), "v5p": Chip(2, 48 << 20), "v6e": Chip(1, 96 << 20)}
"""TPU generations that the kernels are compiled for."""

KINDS = {
    "TPU v5e": "v5e",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6e": "v6e",
    "TPU v6 lite": "v6e",
}
"""Generation by the device's `device_kind`."""

LARGE_PAGE = 64
"""Minimum page size, in slots, that uses the second column of `TABLE`: a KV tile then has few pages."""

_LARGE, _SMALL = Blocks(512, 512, 4), Blocks(256, 512, 4)

TABLE: dict[tuple[str, int], tuple[Blocks, Blocks]] = {
    ("v5e", 64): (_LARGE, _SMALL),
    ("v5e", 128): (_SMALL, _SMALL),
    ("v5e", 256): (_SMALL, _SMALL),
    ("v5p", 64): (_SMALL, _SMALL),
    ("v5p", 128): (_SMALL, _SMALL),
    ("v5p", 256): (_SMALL, _SMALL),
    ("v6e", 64): (_LARGE, _LARGE),
    ("v6e", 128): (_LARGE, _LARGE),
    ("v6e", 256): (_LARGE, _LARGE),
}
"""Tile sizes by chip and head size: for small pages, and for large pages."""


def chip_here() -> str:
    """Return the generation of this process's TPU, or the newest known generation if the TPU is unknown or absent."""
    return KINDS.get(jax.devices()[0].device_kind, "v6e")
