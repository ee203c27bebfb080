"""Copies of pages from HBM to the TPU kernels' two buffers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkattn.backends.pallas_tpu.blocks import Shape

LENGTH_BITS = 9
"""Low bits of a page-table entry, which hold the page's valid slots (at most 256). The page number is above them."""
PACKED = 32
"""Rows of a register of one-byte values; a load must begin at a multiple of it."""
NOWHERE = np.iinfo(np.int32).max
"""Slot number of a column that holds no token."""


@dataclass(frozen=True)
class Pages:
    """Copies of pages to one of two buffers `[heads, slots, lanes]`.

    The methods take the sequence's row of the page table in SMEM, the number of the KV tile, the slot of the query tile's last
    row and the number of the buffer.

    Attributes:
        pool: pages in HBM, `[pages, kv_heads, block_size, lanes]`.
        kv: the two buffers in VMEM.
        arrived: DMA semaphore of each buffer.
        state: `shortest` of each buffer, then the first buffer of the next query tile, in SMEM.
        first_head: first KV head of the grid step.
        shape: sizes.
    """

    pool: Any
    kv: Any
    arrived: Any
    state: Any
    first_head: Any
    shape: Shape

    def _copy(self, page: Any, place: Any, buffer: Any) -> Any:
        size = self.shape.block_size
        at = pl.ds(place * size if isinstance(place, int) else pl.multiple_of(place * size, size), size)
        source = self.pool.at[page, pl.ds(self.first_head, self.shape.heads)]
        return pltpu.make_async_copy(source, self.kv.at[buffer, :, at, :], self.arrived.at[buffer])

    def _present(self, tile: Any, last: Any) -> Any:
        """Return the number of the tile's pages that begin at or before slot `last`."""
        return jnp.minimum(lax.div(last, self.shape.block_size) + 1 - tile * self.shape.pages, self.shape.pages)

    def start(self, table: Any, tile: Any, last: Any, buffer: Any) -> None:
        """Start the copies of a KV tile's pages."""
        shape, present, base = self.shape, self._present(tile, last), tile * self.shape.pages
        mask = (1 << LENGTH_BITS) - 1

        def one(place: Any, shortest: Any) -> Any:
            entry = table[0, 0, base + place]
            self._copy(entry >> LENGTH_BITS, place, buffer).start()
            return jnp.minimum(shortest, entry & mask)

        @pl.when(present == shape.pages)
        def all_pages() -> None:
            shortest = jnp.int32(shape.block_size)
            for place in range(shape.pages):
                shortest = one(place, shortest)
            self.state[buffer] = shortest

        @pl.when(present < shape.pages)
        def some_pages() -> None:
            lax.fori_loop(0, present, one, jnp.int32(0))
            self.state[buffer] = 0

    def shortest(self, buffer: Any) -> Any:
        """Return the least valid length of the tile's pages; 0 if a page is missing."""
        return self.state[buffer]

    def wait(self, tile: Any, last: Any, buffer: Any) -> None:
        """Wait until the copies begun by `start` have arrived."""
        shape, present = self.shape, self._present(tile, last)

        @pl.when(present == shape.pages)
        def all_pages() -> None:
            whole = self.kv.at[buffer]
            pltpu.make_async_copy(whole, whole, self.arrived.at[buffer]).wait()  # type: ignore[no-untyped-call]

        @pl.when(present < shape.pages)
        def some_pages() -> None:
            lax.fori_loop(0, present, lambda place, _: self._copy(0, place, buffer).wait(), None)

    def clean(self, table: Any, tile: Any, last: Any, buffer: Any, columns: Any) -> None:
        """Zero the slots without a token, and put `NOWHERE` in their columns."""
        shape, base = self.shape, tile * self.shape.pages
        size, mask = shape.block_size, (1 << LENGTH_BITS) - 1
        together = max(1, PACKED // size)  # pages per aligned load
        lane = lax.broadcasted_iota(jnp.int32, (1, shape.slots), 1)
        row = lax.broadcasted_iota(jnp.int32, (shape.heads, together * size, shape.lanes), 1)

        def some(turn: Any, _: Any) -> None:
            places = [turn * together + n for n in range(together)]
            lengths = []
            for place in places:
                entry = table[0, 0, jnp.minimum(base + place, table.shape[2] - 1)]
                lengths.append(jnp.maximum(jnp.minimum(entry & mask, last + 1 - (base + place) * size), 0))

            @pl.when(functools.reduce(jnp.minimum, lengths) < size)
            def blank() -> None:
                at = self.kv.at[buffer, :, pl.ds(pl.multiple_of(places[0] * size, together * size), together * size), :]
                written = row < lengths[0]
                for n, length in enumerate(lengths[1:], 1):
                    written |= (row >= n * size) & (row < n * size + length)
                at[...] = jnp.where(written, at[...].astype(jnp.float32), 0.0).astype(at.dtype)
                for place, length in zip(places, lengths, strict=True):
                    hole = (lane >= place * size + length) & (lane < (place + 1) * size)
                    columns[...] = jnp.where(hole, NOWHERE, columns[...])

        lax.fori_loop(0, shape.pages // together, some, None)
