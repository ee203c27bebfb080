"""Calls of attention that are timed on a GPU, what each needs at least, and the settings of the backends that run them.

The module starts no JAX backend, because a process that does keeps most of a GPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ITEMSIZE = 2
"""Bytes of a bfloat16 number."""
CALLS = 20
"""Calls of one round. A round hides the start of a call on the host, except where the start takes longer than the call."""
L2_BYTES = 50_000_000
"""Size of the L2 cache that is assumed: that of an H100 and of an H200."""
ENGINE_PAGE = 64
"""Slots per page that the engine takes on GPUs."""
PAGES = 16, 32, 64, 128
TILES = {False: ((128, 2), (64, 6), (64, 3)), True: ((128, 2), (64, 4), (64, 3))}
"""Slots and stages of the KV tiles tried at head_dim 128, beside the backend's own, by `Setting.states`."""


@dataclass(frozen=True)
class Setting:
    """Backend, page size and tile that calls are timed with.

    Attributes:
        backend: name of the backend.
        block_size: slots per page.
        slots: slots of the KV tile; None for the backend's own tile, with which every call is timed.
        stages: tiles in flight; None for the backend's own.
        states: whether the tile is that of decodes and of the blocks of small steps, whose parts end in softmax states. Else
            it is that of query tiles. Only calls that use the tile are timed.
    """

    backend: str
    block_size: int
    slots: int | None = None
    stages: int | None = None
    states: bool = False

    def facts(self) -> dict[str, Any]:
        """Return the setting for JSON, without a tile that is the backend's own."""
        fields_of = asdict(self)
        return fields_of if self.slots else {name: fields_of[name] for name in ("backend", "block_size")}


def settings(*, small: bool = False) -> list[Setting]:
    """Return all settings.

    Args:
        small: whether to return one setting of each backend.
    """
    if small:
        return [Setting("pallas_gpu", PAGES[0]), Setting("xla", ENGINE_PAGE)]
    tiles = [Setting("pallas_gpu", ENGINE_PAGE, *tile, states) for states, tiles in TILES.items() for tile in tiles]
    return [*(Setting("pallas_gpu", pages) for pages in PAGES), Setting("xla", ENGINE_PAGE), *tiles]


@dataclass(frozen=True)
class Call:
    """One layer's attention over sequences of equal form. Slots before the first row are in the cache.

    Attributes:
        name: name, with the sizes.
        sequences: number of sequences.
        slots: slots of each sequence, its rows included.
        rows: rows of each sequence: its last slots.
        prefix: slots of each sequence's prefix.
        chunk: slots of each chunk after the prefix; 0 for a plain prompt.
        question: slots after the last chunk, which see everything before.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: size of a head.
    """

    name: str
    sequences: int
    slots: int
    rows: int
    prefix: int = 0
    chunk: int = 0
    question: int = 0
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def row_slot(self) -> np.ndarray:
        """Return the slots of a sequence's rows, int32 `[rows]`."""
        return np.arange(self.slots - self.rows, self.slots, dtype=np.int32)

    def row_start(self) -> np.ndarray:
        """Return the first slot beyond the prefix that each row sees, int32 `[rows]`."""
        slot = self.row_slot()
        if not self.chunk:
            return np.zeros_like(slot)
        start = self.prefix + (slot - self.prefix) // self.chunk * self.chunk
        return np.where((slot < self.prefix) | (slot >= self.slots - self.question), 0, start).astype(np.int32)

    @property
    def flops(self) -> float:
        """Return the floating-point operations of all visible pairs of a row and a slot."""
        start = np.maximum(self.row_start() - self.prefix, 0)
        pairs = int((self.row_slot() + 1 - start).sum(dtype=np.int64))
        return 4.0 * self.sequences * pairs * self.heads * self.head_dim

    @property
    def bytes(self) -> float:
        """Return the bytes of K and V that some row sees, read once."""
        return 2.0 * self.sequences * self.slots * self.kv_heads * self.head_dim * ITEMSIZE

    @property
    def decodes(self) -> bool:
        """Return whether every sequence has one row, so that memory bounds the call."""
        return self.rows == 1

    @property
    def copies(self) -> int:
        """Return the number of copies of K and V that the calls of a round read in turn.

        Together the copies are at least four times as large as the L2 cache, so that a call reads from memory, as a layer of a
        model does. A call too small for that reads every copy once a round.
        """
        return min(CALLS, math.ceil(4 * L2_BYTES / self.bytes))

    def facts(self) -> dict[str, Any]:
        """Return the call for JSON: the job of `flex_times`."""
        sizes = ("name", "sequences", "slots", "rows", "prefix", "heads", "kv_heads", "head_dim", "copies")
        return {name: getattr(self, name) for name in sizes} | {"row_start": self.row_start().tolist()}


def calls(*, small: bool = False) -> Iterator[Call]:
    """Yield the calls.

    Args:
        small: whether to yield calls of a few rows, to see that the benchmark runs.
    """
    if small:
        heads = {"heads": 2, "kv_heads": 1, "head_dim": 64}
        yield Call("causal", 1, 128, 128, **heads)
        yield Call("documents", 1, 128, 128, 32, 32, 32, **heads)
        yield Call("decode 2", 2, 100, 1, **heads)
        return
    yield Call("causal 8,192", 1, 8192, 8192)
    yield Call("16 documents of 500 after 64, question of 128", 1, 64 + 16 * 500 + 128, 64 + 16 * 500 + 128, 64, 500, 128)
    yield Call("question of 128 after 16 cached documents of 500", 1, 64 + 16 * 500 + 128, 128, 64, 500, 128)
    yield Call("300 items of 20 after 2,000 cached", 1, 2000 + 300 * 20, 300 * 20, 2000, 20)
    for sequences in (1, 16, 64):
        yield Call(f"decode {sequences} of 4,096", sequences, 4096, 1)
