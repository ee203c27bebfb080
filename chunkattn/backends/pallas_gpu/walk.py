"""Work items of the GPU kernel, and the KV tiles that each visits, as consumers and producer read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from chunkattn.backends.pallas_gpu.shape import Shape

_RANGES = FIRST_END, SECOND_START, SECOND_END, FULL_END, FULL_START, FULL_STOP = range(6)
_OF_BLOCK = SEQ, QUERY, START, SIZE, OUT, LOW, HIGH, PREFIX_END = range(6, 14)
POSITION, WIDTH = 14, 16
"""Fields of a work item, int32 `[I, WIDTH]`, or `[I, POSITION + 1]` in layers with a sliding window.

A width that is a power of two saves instructions of the loops. With a window, it would cost registers that there are not.

In order: KV tiles `[0, FIRST_END)` and `[SECOND_START, SECOND_END)`, KV tiles `[0, FULL_END)` and `[FULL_START, FULL_STOP)` of
which every row sees every token; sequence, block of queries, first folded row of the block (see `plan.Layout`) and number of
its tokens, place of the states, smallest row start and largest slot of the rows, slots of the prefix; in layers with a sliding
window lowest position of the rows. There `[SECOND_START, SECOND_END)` is a range of the visits of the block of queries, see
`windows.Visits`, and `FIRST_END` 0.
"""
FULL = (FULL_END, FULL_START, FULL_STOP)

LENGTH_SHIFT = 20
"""An entry of the page table is `page | valid slots << LENGTH_SHIFT`."""
FAR = 1 << 30
"""A slot that no row sees."""


class Gmem(NamedTuple):
    """Refs of the kernel's arguments, see `kernel.attend`."""

    items: Any
    table: Any
    holes: Any
    q: Any
    keys: Any
    values: Any
    out: Any
    num_items: Any = None
    factors: Any = None
    rows: Any = None
    visits: Any = None
    shifts: Any = None


class Smem(NamedTuple):
    """Buffers and barriers in shared memory.

    Attributes:
        q: queries by warpgroup, later their outputs.
        keys: ring of KV tiles, K.
        values: ring of KV tiles, V.
        sums: states of the rows, or None.
        q_here: a warpgroup's queries have arrived.
        keys_here: K of a place in the ring has arrived.
        values_here: V of a place has arrived and is free of NaN.
        values_raw: V of a place has arrived and the producer must clean or convert it.
        keys_free: all consumers have read K of a place.
        values_free: all consumers have read V of a place.
        order: turns of two consumers, or None.
        fp8_keys: ring of FP8 tiles, K, or None.
        fp8_values: ring of FP8 tiles, V, or None.
        keys_raw: K of a place in the ring of FP8 tiles has arrived, or None. See `Shape.fp8_barriers`.
    """

    q: Any
    keys: Any
    values: Any
    sums: Any
    q_here: Any
    keys_here: Any
    values_here: Any
    values_raw: Any
    keys_free: Any
    values_free: Any
    order: Any
    fp8_keys: Any
    fp8_values: Any
    keys_raw: Any


class Walk:
    """KV tiles of one work item, in order."""

    def __init__(self, gmem: Gmem, item: Any, shape: Shape) -> None:
        fields = [gmem.items[item, field] for field in (SEQ, FIRST_END, SECOND_START, SECOND_END)]
        self.seq, self.first_end, self.second_start, second_end = fields
        self.full = [gmem.items[item, field] for field in FULL]
        self.count = self.first_end + second_end - self.second_start
        self.holes = gmem.holes
        self.visits = None if gmem.visits is None else gmem.visits.at[gmem.items[item, QUERY]]

    def tile(self, step: Any) -> Any:
        """Return the KV tile of a step."""
        if self.visits is not None:
            return lax.shift_right_logical(self.visits[self.second_start + step], jnp.int32(1))
        return jnp.where(step < self.first_end, step, self.second_start + step - self.first_end)

    def whole(self, tile: Any, step: Any) -> Any:
        """Return whether every row sees every slot of the KV tile of a step."""
        end, start, stop = self.full
        whole = ((tile < end) | ((tile >= start) & (tile < stop))) & (self.holes[self.seq, tile] == 0)
        return whole if self.visits is None else whole & (self.visits[self.second_start + step] & 1 == 0)


def each_item(gmem: Gmem, shape: Shape, heads: int, act: Callable[[Any, Any, Any], None]) -> Any:
    """Run `act(head, item, turn)` for the items of this block of threads.

    An item that ends in outputs is skipped if it has no KV tile. One that ends in states must write them anyway.

    Args:
        gmem: the kernel's arguments.
        shape: sizes.
        heads: number of KV heads.
        act: computes or copies one item; `turn` is the number of KV tiles of earlier items.

    Returns:
        The number of KV tiles of all items.
    """

    def count(item: Any) -> Any:
        first, start, end = (gmem.items[item, field] for field in (FIRST_END, SECOND_START, SECOND_END))
        return first + end - start

    if not shape.states:
        item = lax.axis_index("item")

        @pl.when(count(item) > 0)
        def some() -> None:
            act(lax.axis_index("head"), item, 0)

        return count(item)
    block, blocks = lax.axis_index("block"), lax.axis_size("block")

    def one(index: Any, turn: Any) -> Any:
        number = block + index * blocks
        item = lax.div(number, jnp.int32(heads))
        act(lax.rem(number, jnp.int32(heads)), item, turn)
        return turn + count(item)

    number = gmem.num_items[0] * heads
    return lax.fori_loop(0, lax.div(number - block + blocks - 1, jnp.int32(blocks)), one, jnp.int32(0))


def entry(gmem: Gmem, seq: Any, tile: Any, box: int, shape: Shape, table: Any = None) -> Any:
    """Return the entry of a box of a KV tile in the page table, or in another table of pages."""
    table = gmem.table if table is None else table
    if shape.block_size <= shape.slots:
        return table[seq, tile * shape.boxes + box]
    return table[seq, lax.div(tile, jnp.int32(shape.block_size // shape.slots))]


def offset(tile: Any, shape: Shape) -> Any:
    """Return the slot of its page at which a KV tile begins that is smaller than a page."""
    return lax.rem(tile, jnp.int32(shape.block_size // shape.slots)) * shape.slots


def present(gmem: Gmem, seq: Any, tile: Any, column: Int32[Array, " n"], begin: int, shape: Shape) -> Int32[Array, " n"]:
    """Return for columns of a KV tile the end of their page's valid columns.

    Args:
        gmem: the kernel's arguments.
        seq: sequence.
        tile: KV tile.
        column: consecutive columns of the tile.
        begin: first of the columns.
        shape: sizes.
    """
    end = jnp.zeros_like(column)
    for box in range(begin // shape.box, -(-(begin + column.shape[0]) // shape.box)):
        length = page_len(entry(gmem, seq, tile, box, shape)) + box * shape.box
        if shape.block_size > shape.slots:
            length -= offset(tile, shape)
        end = jnp.where(column >= box * shape.box, lax.broadcast_in_dim(length, column.shape, ()), end)
    return end


def positions(gmem: Gmem, seq: Any, tile: Any, column: Int32[Array, " n"], begin: int, shape: Shape) -> Int32[Array, " n"]:
    """Return the positions of columns of a KV tile; see `present` for the arguments."""
    shift = jnp.zeros_like(column)
    for box in range(begin // shape.box, -(-(begin + column.shape[0]) // shape.box)):
        of_page = lax.broadcast_in_dim(entry(gmem, seq, tile, box, shape, gmem.shifts), column.shape, ())
        shift = jnp.where(column >= box * shape.box, of_page, shift)
    return column + tile * shape.slots + shift


def page_len(entry: Any) -> Any:
    """Return the valid slots of a page-table entry's page."""
    return lax.shift_right_logical(entry, jnp.int32(LENGTH_SHIFT))


def page(entry: Any) -> Any:
    """Return the page of a page-table entry."""
    return entry & np.int32((1 << LENGTH_SHIFT) - 1)
