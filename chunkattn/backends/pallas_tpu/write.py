"""The in-place write of a step's K/V into their pages on a TPU.

HBM tiles a page, so one copy writes 16 slots instead of one. The host cuts the rows into pieces that each lie in one such
group of slots. The kernel reads the groups that a piece does not fill, shifts the rows to their place and writes the
groups back. Reads and writes of `DEPTH` pieces are in flight at once. Pieces of one group are contiguous and share a
buffer, so a group is never read while another piece of it is being written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32, Shaped

from chunkattn.backends.base import AttentionBatch

GROUP = 16
"""Slots written at once: one register of 16-bit values, two of 32-bit values."""
ROWS, ROW_BYTES = 256, 2 << 20
"""Maximum number of rows of a grid step, and of bytes of its rows."""
DEPTH = 16
"""Pieces in flight."""
_FIELDS = DEST, ROW, OFFSET, COUNT, BUFFER, LAST = range(6)
"""Fields of a piece: group of the pool, row within the block, first slot within the group, rows, buffer, last of its group."""


def block_rows(rows: int, row_bytes: int) -> int:
    """Return the rows of a grid step for a step of `rows` rows: at least two groups.

    Args:
        rows: rows of the step, at least one.
        row_bytes: bytes of a row's K/V.
    """
    size = min(ROWS, -(-rows // (2 * GROUP)) * 2 * GROUP)
    while size > 2 * GROUP and size * row_bytes > ROW_BYTES:
        size = -(-size // (4 * GROUP)) * 2 * GROUP
    return size


def plan_writes(batch: AttentionBatch, size: int) -> tuple[Int32[np.ndarray, "blocks 6 size"], Int32[np.ndarray, " blocks"]]:
    """Cut a step's rows into pieces.

    Args:
        batch: the step.
        size: rows of a block, from `block_rows`.

    Returns:
        The pieces of each block of `size` rows, with the rows of `_FIELDS`, and the number of pieces of each block.
    """
    blocks = -(-len(batch.row_seq) // size)
    pieces, counts = np.zeros((blocks, len(_FIELDS), size), np.int32), np.zeros(blocks, np.int32)
    flat = batch.flat_slots()[: batch.num_rows].astype(np.int64)
    if not len(flat):
        return pieces, counts
    row, dest = np.arange(len(flat)), flat // GROUP
    starts = np.flatnonzero((np.diff(flat, prepend=-2) != 1) | (flat % GROUP == 0) | (row % size == 0))
    count = np.diff(starts, append=len(flat))
    order = np.lexsort((dest[starts], starts // size))
    first_row, dest, count = starts[order], dest[starts][order], count[order]
    block = first_row // size
    counts[:] = np.bincount(block, minlength=blocks)
    place = np.arange(len(block)) - (np.cumsum(counts) - counts)[block]
    opens = (place % DEPTH == 0) | (np.diff(dest, prepend=-1) != 0)
    buffer = np.maximum.accumulate(np.where(opens, np.arange(len(block)), 0))
    fields = (dest, first_row % size, flat[first_row] % GROUP, count, place[buffer] % DEPTH, np.append(opens[1:], True))
    for field, values in zip(_FIELDS, fields):
        pieces[block, field, place] = values
    return pieces, counts


def write_rows(
    pool: Shaped[Array, "P Hkv block_size kv_lanes"],
    kv: Float[Array, "blocks*size Hkv*kv_lanes"],
    pieces: Int32[Array, "blocks 6 size"],
    counts: Int32[Array, " blocks"],
    *,
    interpret: Any,
    vmem_limit_bytes: int,
) -> Shaped[Array, "P Hkv block_size kv_lanes"]:
    """Return the pool with the rows' K/V written; in place if the pool is donated.

    Args:
        pool: pages of K and V.
        kv: K and V of the rows, of 2 or 4 bytes a value.
        pieces: see `plan_writes`.
        counts: pieces of each block, see `plan_writes`.
        interpret: argument of `pl.pallas_call`.
        vmem_limit_bytes: bytes of vector memory that the kernel may use.
    """
    _, heads, _, lanes = pool.shape
    blocks, fields, size = pieces.shape
    return pl.pallas_call(
        _write_block,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=[
                pl.BlockSpec((1, fields, size), lambda i, _: (i, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec((size, heads * lanes), lambda i, _: (i, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((DEPTH, heads, GROUP, lanes), pool.dtype),
                pltpu.SemaphoreType.DMA((2, DEPTH)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),  # type: ignore[no-untyped-call]
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="write_pages",
    )(counts, pieces, kv, pool)


def _write_block(counts: Any, pieces: Any, kv: Any, _: Any, pool: Any, groups: Any, done: Any) -> None:
    """Run one grid step: the pieces of one block of rows, `DEPTH` at a time."""
    count = counts[pl.program_id(0)]
    per_page = pool.shape[2] // GROUP

    def copy(piece: Any, back: bool) -> Any:
        dest, buffer = pieces[0, DEST, piece], pieces[0, BUFFER, piece]
        at = pl.ds(pl.multiple_of(lax.rem(dest, per_page) * GROUP, GROUP), GROUP)
        there = pool.at[lax.div(dest, per_page), :, at, :]
        here = groups.at[buffer]
        return pltpu.make_async_copy(*((here, there) if back else (there, here)), done.at[int(back), buffer])

    def reads(piece: Any) -> Any:
        """Return whether a piece is the first of its group and does not fill it."""
        return (pieces[0, BUFFER, piece] == lax.rem(piece, DEPTH)) & (pieces[0, COUNT, piece] < GROUP)

    def read(piece: Any, _: Any) -> None:
        @pl.when(reads(piece))
        def start() -> None:
            copy(piece, back=False).start()

    def merge(piece: Any, _: Any) -> None:
        row, offset, buffer = pieces[0, ROW, piece], pieces[0, OFFSET, piece], pieces[0, BUFFER, piece]

        @pl.when(reads(piece))
        def arrived() -> None:
            copy(piece, back=False).wait()

        window = 2 * GROUP
        begin = pl.multiple_of(jnp.minimum(row & -GROUP, kv.shape[0] - window), GROUP)
        rows = kv[pl.ds(begin, window), :].astype(jnp.float32)
        rows = pltpu.roll(rows, (offset - (row - begin)) & (window - 1), 0)[:GROUP]
        slot = lax.broadcasted_iota(jnp.int32, (GROUP, pool.shape[3]), 0)
        written = (slot >= offset) & (slot < offset + pieces[0, COUNT, piece])
        for head in range(pool.shape[1]):
            old = groups[buffer, head].astype(jnp.float32)
            new = rows[:, head * pool.shape[3] : (head + 1) * pool.shape[3]]
            groups[buffer, head] = jnp.where(written, new, old).astype(pool.dtype)

        @pl.when(pieces[0, LAST, piece] == 1)
        def send() -> None:
            copy(piece, back=True).start()

    def finish(piece: Any, _: Any) -> None:
        @pl.when(pieces[0, LAST, piece] == 1)
        def sent() -> None:
            copy(piece, back=True).wait()

    def some(turn: Any, _: Any) -> None:
        begin, end = turn * DEPTH, jnp.minimum((turn + 1) * DEPTH, count)
        for act in (read, merge, finish):
            lax.fori_loop(begin, end, act, None)

    lax.fori_loop(0, lax.div(count + DEPTH - 1, DEPTH), some, None)
