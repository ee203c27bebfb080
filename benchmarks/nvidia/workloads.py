"""Calls of attention that are timed on a GPU: their rows, what every row sees, and what a call needs at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

ITEMSIZE = 2
"""Bytes of a bfloat16 number."""


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

    def facts(self) -> dict[str, Any]:
        """Return the call for JSON: the job of `flex_times`."""
        sizes = ("name", "sequences", "slots", "rows", "prefix", "heads", "kv_heads", "head_dim")
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
