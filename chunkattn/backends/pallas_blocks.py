"""Tile sizes of the TPU kernels by chip, head size and page size, chosen by the compiler's static schedules.

`python -m benchmarks.tpu_tune` compiles the candidates and prints this table.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class Blocks(NamedTuple):
    """Sizes of the kernels' tiles.

    Attributes:
        folded: rows of a query tile times query heads per KV head.
        slots: slots of a KV tile.
        together: KV heads whose steps are interleaved: while one head's scores are exponentiated another's are
            multiplied. A model with fewer KV heads gets as many times larger query tiles.
    """

    folded: int
    slots: int
    together: int


class Chip(NamedTuple):
    """What the kernels know of a generation.

    Attributes:
        cores: TensorCores, which share a kernel's grid.
        vmem_bytes: what a kernel may use of a core's vector memory: three quarters.
    """

    cores: int
    vmem_bytes: int


CHIPS = {"v5e": Chip(1, 96 << 20), "v5p": Chip(2, 48 << 20), "v6e": Chip(1, 96 << 20)}
"""Generations the kernels are compiled for."""

KINDS = {
    "TPU v5e": "v5e",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6e": "v6e",
    "TPU v6 lite": "v6e",
}
"""Their names at the devices."""

LARGE_PAGE = 64
"""From this page size on a KV tile's pages are few enough for the second column of `TABLE`."""

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
"""By chip and head size: for small pages, and for large ones."""


def chip_here() -> str:
    """The generation of this process's TPU; the newest known for one that is not known, or where there is none."""
    return KINDS.get(jax.devices()[0].device_kind, "v6e")
