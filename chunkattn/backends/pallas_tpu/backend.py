"""The TPU backend: metadata on the host, a write and two attention kernels on the chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec, Queries, StepArray
from chunkattn.backends.default_cache import KV, KVCache, to_cache
from chunkattn.backends.own_sequences import own_sequences
from chunkattn.backends.pallas_tpu import kernel
from chunkattn.backends.pallas_tpu.blocks import CHIPS, LANES, LARGE_PAGE, TABLE, Blocks, Chip, Shape, chip_here
from chunkattn.backends.pallas_tpu.decodes import (
    Decodes,
    WindowDecodes,
    first_decodes,
    move,
    plan_decode_writes,
    window_decodes,
)
from chunkattn.backends.pallas_tpu.pages import LENGTH_BITS
from chunkattn.backends.pallas_tpu.plan import WindowWalk, cut_at_blocks, factors_of, fill_blocks, pad, scalars_of, window_walk
from chunkattn.backends.pallas_tpu.write import block_rows, plan_writes, write_rows
from chunkattn.backends.registry import register_backend
from chunkattn.backends.tiles import Tiles, cut_at_questions, spans

KV_BYTES = 8 << 20
"""Maximum number of bytes of two KV tiles with all heads, unless tiles of one page, or of 128 slots, already exceed it."""
TOGETHER_ROWS = 1024
"""Maximum number of folded rows of heads computed side by side. Decodes have few rows and take more heads."""

_ALIGN = 16
"""Rows of a 16-bit register."""
_FLOATS = ("bfloat16", "float32")
_HEAD_DIMS = (64, 128, 256)
_TOO_SMALL = ("TPU v2", "TPU v3", "TPU v4")
_BLOCK_SIZES = (16, 32, 64, 128, 256)


class PallasMetadata(NamedTuple):
    """A step as query tiles and decodes. `Q` and `E` are static bounds; the `num_` fields count the entries in use.

    In a run of decodes, decode `i` is row `i`. The fields of query tiles and rows are None.

    Attributes:
        tiles: scalars of the query tiles, see `kernel.SCALARS`.
        num_tiles: query tiles in use.
        rows: row slots, row starts and, for windows, positions of each block of rows, in the first of 8 rows.
        decodes: scalars of the decodes, see `kernel.SCALARS`.
        num_decodes: decodes in use.
        decode_rows: row of each decode.
        decode_of_row: decode of each row, -1 for other rows.
        table: page and valid length in one integer, see `pages.LENGTH_BITS`.
        pieces: see `write.plan_writes`.
        num_pieces: see `write.plan_writes`.
        tile_factors: factors of the query tiles, see `kernel.FACTORS`; None weighs no chunks anew.
        decode_factors: factors of the decodes.
        windows: query tiles and decodes of layers with a sliding window, by window in ascending order.
        shifts: position minus slot of every page; None without windows.
    """

    tiles: Int32[StepArray, "scalars Q"] | None
    num_tiles: Int32[StepArray, ""] | None
    rows: Int32[StepArray, "blocks 8 lanes"] | None
    decodes: Int32[StepArray, "scalars E"]
    num_decodes: Int32[StepArray, ""]
    decode_rows: Int32[StepArray, " E"] | None
    decode_of_row: Int32[StepArray, " T"] | None
    table: Int32[StepArray, "S 1 W"]
    pieces: Int32[StepArray, "write_blocks 6 size"]
    num_pieces: Int32[StepArray, " write_blocks"]
    tile_factors: Float32[StepArray, "2 Q"] | None
    decode_factors: Float32[StepArray, "2 E"] | None
    windows: tuple[WindowWalk, ...] | tuple[WindowDecodes, ...]
    shifts: Int32[StepArray, "S 1 W"] | None


@register_backend("pallas_tpu")
class PallasTpuBackend(AttentionBackend):
    """The Pallas backend for TPUs.

    A page is `[kv_heads, block_size, 2 * head_dim]`: each slot holds K and then V of a head in neighbouring lanes. Away from
    a TPU the kernels run in Pallas' TPU interpreter, slowly and with the same results.

    Attributes:
        interpret: argument of `pl.pallas_call`; None interprets only away from a TPU. False compiles for an absent TPU.
        chip: TPU generation to compute for, a key of `blocks.CHIPS`; None means this process's TPU.
        table: tile sizes by chip and head size.
        most_rows: maximum number of rows of a query tile; a power of two.
    """

    weighs = True
    checked_by_auto = True
    can_keep_bits = True
    advances = True
    max_pages = 1 << (31 - LENGTH_BITS)
    narrowest_table = 1 << 12  # 16 KiB of scalar memory a row, copied while another tile is computed
    max_table_pages = 1 << 15  # the megabyte of scalar memory holds four rows of the page table; with windows, six half as long
    interpret: ClassVar[Any] = None
    chip: ClassVar[str | None] = None
    table: ClassVar[Mapping[tuple[str, int], tuple[Blocks, Blocks]]] = TABLE
    most_rows: ClassVar[int] = 1024

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        if spec.windowed:
            self.max_table_pages = self.max_table_pages // 2
        self._windows = sorted(window for window in spec.windows if window is not None)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return the reason why the backend cannot serve `spec`, or None if it can.

        The backend supports heads of 64, 128 or 256, pages of 16 to 256 slots, bfloat16 and float32, a cache in that
        dtype or in `FP8`, and TPUs from v5e on.
        """
        if reason := spec.outside(_HEAD_DIMS, _BLOCK_SIZES, _FLOATS):
            return reason
        backend = cls(spec)
        if backend._too_large(needed := backend.shape(1)) or backend._too_large(needed := backend.shape(_ALIGN)):
            size = needed.vmem_bytes(spec.dtype.itemsize, spec.cache_dtype.itemsize) >> 20
            return (
                f"{spec.num_kv_heads} KV heads of {spec.head_dim} and pages of {spec.block_size} need {size} MiB of "
                f"vector memory, of {backend.chip_spec.vmem_bytes >> 20} there are"
            )
        if jax.default_backend() == "tpu" and (kind := jax.devices()[0].device_kind).startswith(_TOO_SMALL):
            return f"a {kind} has less vector memory than its tiles need; v5e, v5p, v6e and later have enough"
        return None

    def allocate(self, num_pages: int) -> KVCache:
        """Allocate one layer's pool, `[pages, kv_heads, block_size, 2 * head_dim]` in the cache's dtype."""
        self.check_pages(num_pages)
        spec = self.spec
        return jnp.zeros((num_pages, spec.num_kv_heads, spec.block_size, 2 * spec.head_dim), spec.cache_dtype)

    @property
    def blocks(self) -> Blocks:
        """Return the tile sizes on this chip."""
        spec = self.spec
        blocks = self.table[self.chip or chip_here(), spec.head_dim][spec.block_size >= LARGE_PAGE]
        return blocks._replace(slots=max(blocks.slots, spec.block_size))

    @property
    def chip_spec(self) -> Chip:
        """Return the properties of this chip."""
        return CHIPS[self.chip or chip_here()]

    @property
    def head_blocks(self) -> int:
        """Return the number of groups of KV heads, which the chip's cores compute in parallel."""
        return self.chip_spec.cores if self.spec.num_kv_heads % self.chip_spec.cores == 0 else 1

    def _too_large(self, shape: Shape) -> bool:
        """Return whether a kernel leaves less than a quarter of vector memory to the compiler."""
        return shape.vmem_bytes(self.spec.dtype.itemsize, self.spec.cache_dtype.itemsize) > 0.75 * self.chip_spec.vmem_bytes

    def shape(self, rows: int) -> Shape:
        """Return the sizes of the kernel over blocks of `rows` rows; 1 for decodes."""
        spec, (_, slots, together) = self.spec, self.blocks
        heads, groups = spec.num_kv_heads // self.head_blocks, spec.num_heads // spec.num_kv_heads
        while slots > max(LANES, spec.block_size) and 4 * heads * slots * spec.head_dim * spec.cache_dtype.itemsize > KV_BYTES:
            slots //= 2
        packed = spec.head_dim == 64
        return Shape(
            kv_heads=spec.num_kv_heads,
            groups=groups,
            head_dim=2 * spec.head_dim if packed else spec.head_dim,
            packed=packed,
            rows=rows,
            slots=slots,
            block_size=spec.block_size,
            together=_divisor(heads, max(together, min(8, TOGETHER_ROWS // (groups * rows)))),
            head_blocks=self.head_blocks,
        )

    def block(self, rows: int) -> int:
        """Return the rows of a query tile for a step of `rows` rows.

        Few grid steps of many rows are preferred, unless the step has few rows.
        """
        spec, (folded, _, together) = self.spec, self.blocks
        groups = spec.num_heads // spec.num_kv_heads
        folded *= together // _divisor(spec.num_kv_heads // self.head_blocks, together)
        size = self.most_rows
        while size > _ALIGN and (
            size * groups > folded or size > rows or (size > 128 and 4 * size > rows) or self._too_large(self.shape(size))
        ):
            size //= 2
        return size

    def _write_rows(self, rows: int) -> int:
        """Return the rows of one grid step of the write."""
        spec = self.spec
        return block_rows(rows, 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize)

    def build_metadata(self, batch: AttentionBatch) -> PallasMetadata:
        """Cut the batch into query tiles and decodes; see `AttentionBackend.build_metadata`."""
        size = self.block(len(batch.row_seq))
        if self.spec.windowed:
            batch = replace(batch, page_position=batch.page_positions())
        if self.batch_invariant:
            batch = own_sequences(batch, self.shape(size).slots)
        rows, seqs = len(batch.row_seq), len(batch.prefix_end)
        blocks = -(-rows // size)
        runs = spans(batch)
        decode = (runs.size == 1) & (batch.row_start[runs.row] <= batch.prefix_end[batch.row_seq[runs.row]])
        decode &= not self.batch_invariant  # the other kernel may add up in another order
        prompts, weighing = runs.pick(~decode), batch.row_weighing()
        if weighing is not None:
            prompts = cut_at_questions(prompts, weighing)
        slots = self.shape(size).slots, self.shape(1).slots
        scalars, _ = fill_blocks(scalars_of(batch, weighing, cut_at_blocks(prompts, size), slots[0], size), blocks)

        decode_rows = runs.row[decode]
        decodes = scalars_of(batch, weighing, Tiles(decode_rows, np.ones_like(decode_rows)), self.shape(1).slots, size)
        decode_of_row = np.full(rows, -1, np.int32)
        decode_of_row[decode_rows] = np.arange(len(decode_rows))
        by_row = np.zeros((blocks, 8, -(-size // LANES) * LANES), np.int32)
        fields = [batch.row_slot, batch.row_start, *([batch.row_positions()] if self.spec.windowed else [])]
        for field, values in enumerate(fields):
            by_row[:, field, :size] = np.pad(values, (0, blocks * size - rows)).reshape(blocks, size)
        pieces, num_pieces = plan_writes(batch, self._write_rows(rows))
        bound = min(seqs, rows)
        table, shifts = _tables(batch)
        walks = [window_walk(batch, decode_rows, window, slots, size, blocks, bound) for window in self._windows]
        num_tiles = scalars.shape[1]
        scalars = pad(scalars, blocks + bound * (1 if weighing is None else 2))
        decodes = pad(decodes, bound)
        return PallasMetadata(
            tiles=scalars,
            num_tiles=np.int32(num_tiles),
            rows=by_row,
            decodes=decodes,
            num_decodes=np.int32(len(decode_rows)),
            decode_rows=pad(decode_rows, bound),
            decode_of_row=decode_of_row,
            table=table,
            pieces=pieces,
            num_pieces=num_pieces,
            tile_factors=factors_of(batch, scalars),
            decode_factors=factors_of(batch, decodes),
            windows=tuple(walks),
            shifts=shifts,
        )

    def build_decodes(self, batch: AttentionBatch) -> Decodes:
        """Describe the decodes of a run's first step; see `AttentionBackend.build_decodes`."""
        if self.spec.windowed:
            batch = replace(batch, page_position=batch.page_positions())
        return first_decodes(batch, *_tables(batch), self.shape(1).slots)

    def advance(self, decodes: Decodes, steps: Int32[Array, " T"], used: Bool[Array, " T"]) -> PallasMetadata:
        """Move the decodes; see `AttentionBackend.advance`."""
        rows, bound, size, slots = len(steps), decodes.scalars.shape[1], self.spec.block_size, self.shape(1).slots
        scalars, table, shifts = move(decodes.scalars, steps[:bound], used[:bound], slots), decodes.table, decodes.shifts
        of_block = self._write_rows(rows)
        pieces, num_pieces = plan_decode_writes(
            scalars[kernel.LAST], table, decodes.count, size, of_block, -(-rows // of_block)
        )
        walks = list[WindowDecodes]()
        if shifts is not None:
            walks += [window_decodes(scalars, table, shifts, window, size, slots) for window in self._windows]
        return PallasMetadata(
            tiles=None,
            num_tiles=None,
            rows=None,
            decodes=scalars,
            num_decodes=decodes.count,
            decode_rows=None,
            decode_of_row=None,
            table=table,
            pieces=pieces,
            num_pieces=num_pieces,
            tile_factors=None,
            decode_factors=decodes.factors,
            windows=tuple(walks),
            shifts=shifts,
        )

    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: PallasMetadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Write, then attend with both kernels, or with one in a run of decodes; see `AttentionBackend.forward`."""
        interpret = self.interpret
        if interpret is None:
            interpret = pltpu.InterpretParams() if jax.default_backend() != "tpu" else False
        options = {"interpret": interpret, "vmem_limit_bytes": self.chip_spec.vmem_bytes}
        rows = len(q)
        size = self.block(rows)
        tiles, decodes = self.shape(size), self.shape(1)

        # Rounded to the cache's dtype, but stored in the model's: one-byte rows can only be read 32 at a time.
        kv = to_cache(jnp.concatenate([k, v], axis=-1), cache.dtype).astype(q.dtype)
        kv = _pad_rows(kv.reshape(rows, -1), self._write_rows(rows))
        cache = write_rows(cache, kv, metadata.pieces, metadata.num_pieces, **options)

        if tiles.packed:  # the zeros of q multiply V; results come out in V's lanes
            q = jnp.pad(q, ((0, 0), (0, 0), (0, tiles.head_dim - self.spec.head_dim)))
        common: dict[str, Any] = {"scale": scale, "window": window, **options}
        out, lanes = None, slice(tiles.head_dim - self.spec.head_dim, None)
        if metadata.tiles is not None:
            out = self._attend_tiles(q, cache, metadata, tiles, common)
            if self.batch_invariant:  # there are no decodes
                return out[..., lanes], cache
        single, factors, visits = metadata.decodes, metadata.decode_factors, None
        if window is not None:  # chunks are weighed anew in full attention alone
            walk, factors, shifts = metadata.windows[self._windows.index(window)], None, metadata.shifts
            assert shifts is not None
            single, listed = walk if isinstance(walk, WindowDecodes) else (walk.decodes, walk.decode_visits)
            visits = kernel.Window(listed, shifts)
        alone = q[: single.shape[1]] if metadata.decode_rows is None else q[metadata.decode_rows]
        alone = alone.reshape(-1, tiles.kv_heads, tiles.groups, tiles.head_dim)
        decoded = kernel.attend(
            single, factors, metadata.num_decodes, alone, None, metadata.table, cache, decodes, visits=visits, **common
        )
        decoded = decoded.reshape(-1, *q.shape[1:])
        if out is None:
            is_decode = jnp.arange(len(decoded)) < metadata.num_decodes
            out = jnp.pad(jnp.where(is_decode[:, None, None], decoded, 0), ((0, rows - len(decoded)), (0, 0), (0, 0)))
        else:
            assert metadata.decode_of_row is not None
            decoded = decoded[jnp.maximum(metadata.decode_of_row, 0)]
            out = jnp.where((metadata.decode_of_row >= 0)[:, None, None], decoded, out)
        return out[..., lanes], cache

    def _attend_tiles(
        self, q: Queries, cache: KVCache, metadata: PallasMetadata, shape: Shape, common: dict[str, Any]
    ) -> Queries:
        """Return the attention of the rows of query tiles; that of other rows is zero.

        Args:
            q: queries, padded to `shape.head_dim`.
            cache: pages already written.
            metadata: the step.
            shape: sizes of the kernel over query tiles.
            common: further arguments of `kernel.attend`.
        """
        several, count, factors, visits = metadata.tiles, metadata.num_tiles, metadata.tile_factors, None
        if (window := common["window"]) is not None:
            walk, factors, shifts = metadata.windows[self._windows.index(window)], None, metadata.shifts
            assert isinstance(walk, WindowWalk)
            assert shifts is not None
            several, count, visits = walk.tiles, walk.num_tiles, kernel.Window(walk.tile_visits, shifts)
        assert several is not None
        assert count is not None
        wide = _pad_rows(q.reshape(len(q), -1), shape.rows)
        out = kernel.attend(several, factors, count, wide, metadata.rows, metadata.table, cache, shape, visits=visits, **common)
        return out[: len(q)].reshape(q.shape)


def _tables(batch: AttentionBatch) -> tuple[Int32[np.ndarray, "S 1 W"], Int32[np.ndarray, "S 1 W"] | None]:
    """Return the table and the shifts of `PallasMetadata`."""
    table, shifts = (batch.block_tables << LENGTH_BITS | batch.page_len)[:, None].astype(np.int32), None
    if batch.page_position is not None:
        page_start = np.arange(batch.block_tables.shape[1], dtype=np.int32) * batch.block_size
        shifts = (batch.page_position - page_start)[:, None]
    return table, shifts


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`."""
    return next(n for n in range(max(1, min(most, number)), 0, -1) if number % n == 0)


def _pad_rows(x: Float[Array, "T n"], size: int) -> Float[Array, "padded_rows n"]:
    """Pad with zero rows up to a multiple of `size`."""
    return jnp.pad(x, ((0, -len(x) % size), (0, 0)))
