"""The GPU backend: its devices, metadata on the host, a scatter, and the kernel over query tiles, split blocks and decodes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec, HeadInputs, Queries, StepArray
from chunkattn.backends.default_cache import FP8, KV, KVCache, to_cache
from chunkattn.backends.own_sequences import own_sequences
from chunkattn.backends.pallas_gpu import walk
from chunkattn.backends.pallas_gpu.combine import Rows, combine
from chunkattn.backends.pallas_gpu.kernel import attend
from chunkattn.backends.pallas_gpu.plan import (
    Near,
    Work,
    block_splits,
    divide,
    pack_table,
    plan_blocks,
    plan_tiles,
)
from chunkattn.backends.pallas_gpu.prepare import Places, prepare_inputs
from chunkattn.backends.pallas_gpu.products import ROWS
from chunkattn.backends.pallas_gpu.run import Run, run_work
from chunkattn.backends.pallas_gpu.shape import UNIT, Shape, shape_for
from chunkattn.backends.registry import register_backend
from chunkattn.backends.windows import sees_parts

_BLOCK_SIZES = (16, 32, 64, 128)
_FLOATS = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128, 256)
_MOST_GROUPS = 8
_CAPABILITY = "9.0"
"""Compute capability of Hopper: `wgmma`, which the kernel is made of, exists on no other generation."""
INTERPRETER_SINCE = (0, 11)
"""First version of JAX whose GPU interpreter runs the kernel."""
_INTERPRETER_THREADS = 8
"""Threads of XLA's pool on a CPU that the interpreter needs: each warpgroup holds one while it waits for another."""


class Works(NamedTuple):
    """Work items of a step, see `plan`.

    Attributes:
        tiles: rows that are computed in one go; None in steps whose blocks are all split.
        blocks: rows that end in states; None in steps whose blocks are not split and weigh no chunk anew.
        decodes: the rows of a step of a run of decodes; all others are None then.
    """

    tiles: Work | None
    blocks: Work | None
    decodes: Work | None

    def map(self, fold: Callable[[Work], Float[Array, "Hkv R D"]]) -> Folded:
        """Return the work items, each with the folded queries that `fold` returns."""
        return Folded(*(None if work is None else (work, fold(work)) for work in self))


class Folded(NamedTuple):
    """Work items of a step and their folded queries, see `Works`."""

    tiles: tuple[Work, Float[Array, "Hkv R D"]] | None
    blocks: tuple[Work, Float[Array, "Hkv R D"]] | None
    decodes: tuple[Work, Float[Array, "Hkv R D"]] | None


class GpuMetadata(NamedTuple):
    """A step as work items.

    Attributes:
        tiles: see `Works`.
        blocks: see `Works`.
        decodes: see `Works`.
        windows: work items of layers with a sliding window, by window in ascending order.
        table: page and valid length in one integer, see `walk.LENGTH_SHIFT`.
        shifts: position minus slot of every page; None without windows.
        tile_holes: whether a page of a KV tile of `tiles` is not full; None without `tiles`.
        state_holes: the same for `blocks` and `decodes`.
        flat_slots: see `AttentionBatch.flat_slots`.
    """

    tiles: Work | None
    blocks: Work | None
    decodes: Work | None
    windows: tuple[Works, ...]
    table: Int32[StepArray, "S W"]
    shifts: Int32[StepArray, "S W"] | None
    tile_holes: Int32[StepArray, "S tiles"] | None
    state_holes: Int32[StepArray, "S tiles"]
    flat_slots: Int32[StepArray, " T"]

    def works(self, windows: list[int], window: int | None) -> Works:
        """Return the work items of layers with `window`, one of `windows`, or with full attention."""
        return Works(*self[:3]) if window is None else self.windows[windows.index(window)]


def device_refusal(interpret: Any) -> str | None:
    """Return the reason why the kernel cannot run in this process, or None if it can.

    Args:
        interpret: `PallasGpuBackend.interpret`; False compiles for a Hopper GPU that need not be here.
    """
    if interpret is False:
        return None
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "unknown")
        if capability != _CAPABILITY:
            return f"a {device.device_kind} has compute capability {capability}; the kernel needs {_CAPABILITY} (Hopper)"
        return None
    if jax.__version_info__ < INTERPRETER_SINCE:
        needed = ".".join(map(str, INTERPRETER_SINCE))
        return f"there is no GPU, and the GPU interpreter of JAX {jax.__version__} does not run the kernel; {needed} does"
    threads = int(os.environ.get("NPROC", 0)) or os.cpu_count() or 1
    if threads < _INTERPRETER_THREADS:
        return f"there is no GPU, and its interpreter hangs on {threads} threads; set the environment variable NPROC to 16"
    return None


@register_backend("pallas_gpu")
class PallasGpuBackend(AttentionBackend):
    """The Pallas backend for NVIDIA's Hopper GPUs.

    K and V of a page are `[kv_heads, block_size, head_dim]` each, so the tokens of a head are one copy. Without a GPU the
    kernel runs in Pallas' GPU interpreter, slowly and with the same results.

    Attributes:
        interpret: argument of `plgpu.kernel`; None interprets only without a GPU. False compiles for an absent GPU.
        multiprocessors: blocks of threads of the kernels that end in states: one for each multiprocessor of an H100.
    """

    weighs = True
    checked_by_auto = True
    heads_first = True
    can_keep_bits = True
    any_table_width = True
    max_pages = 1 << walk.LENGTH_SHIFT
    interpret: ClassVar[Any] = None
    multiprocessors: ClassVar[int] = 132

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return the reason why the backend cannot serve `spec`, or None if it can.

        The backend supports heads of 64, 128 or 256, up to 8 query heads per KV head, pages of 16 to 128 slots, bfloat16 and
        float16, a cache in that dtype or FP8, and Hopper.
        """
        if reason := spec.outside(_HEAD_DIMS, _BLOCK_SIZES, _FLOATS):
            return reason
        if spec.num_heads > _MOST_GROUPS * spec.num_kv_heads:
            return f"at most {_MOST_GROUPS} query heads may share a KV head, got {spec.num_heads // spec.num_kv_heads}"
        return device_refusal(cls.interpret)

    @property
    def advances(self) -> bool:  # type: ignore[override]
        """Return whether `advance` works: rows of a run are split over their slots, which `batch_invariant` does not allow."""
        return not self.batch_invariant

    @property
    def prepares_heads(self) -> bool:  # type: ignore[override]
        """Return whether `forward_inputs` works: its kernel writes pools of the model's dtype."""
        return self.spec.cache_dtype != FP8

    @property
    def groups(self) -> int:
        """Return the query heads per KV head."""
        return self.spec.num_heads // self.spec.num_kv_heads

    def shape(self, rows: int, *, states: bool) -> Shape:
        """Return the sizes of the kernel over blocks of `rows` folded rows."""
        sizes = {"rows": rows, "groups": self.groups, "states": states, "fp8": self.spec.cache_dtype == FP8}
        shape = shape_for(self.spec.head_dim, self.spec.block_size, **sizes)
        return replace(shape, blocks=self.multiprocessors)

    @property
    def tile_shape(self) -> Shape:
        """Return the sizes of the kernel over query tiles."""
        return self.shape(2 * ROWS, states=False)

    @property
    def block_shape(self) -> Shape:
        """Return the sizes of the kernel over blocks of rows that end in states."""
        return self.shape(ROWS, states=True)

    @property
    def decode_shape(self) -> Shape:
        """Return the sizes of the kernel over decodes."""
        return self.shape(_MOST_GROUPS, states=True)

    def block_splits(self, batch: AttentionBatch) -> int:
        """Return the splits of blocks of rows in a step, see `plan.block_splits`."""
        if self.batch_invariant:
            return 1
        return block_splits(batch, self.block_shape, self.spec.num_kv_heads)

    def build_metadata(self, batch: AttentionBatch) -> GpuMetadata:
        """Cut the batch into work items; see `AttentionBackend.build_metadata`."""
        sequences = len(batch.prefix_end)
        if self.spec.windowed:
            batch = replace(batch, page_position=batch.page_positions())
        if self.batch_invariant:
            batch = own_sequences(batch, math.lcm(self.tile_shape.slots, self.block_shape.slots, batch.block_size))
        table, tile_holes = pack_table(batch.block_tables, batch.page_len, self.tile_shape)
        shifts = _shifts(batch.page_position, table, batch.block_size, np)
        unweighed = replace(batch, weighing=None)
        return GpuMetadata(
            *self._works(batch, sequences),
            tuple(self._works(unweighed, sequences, window) for window in self._windows),
            table,
            shifts,
            tile_holes,
            tile_holes
            if self.block_shape.slots == self.tile_shape.slots
            else pack_table(batch.block_tables, batch.page_len, self.block_shape)[1],
            batch.flat_slots(),
        )

    def build_decodes(self, batch: AttentionBatch) -> Run:
        """Take the arrays of the first step; see `AttentionBackend.build_decodes`."""
        return Run.of(batch, windowed=self.spec.windowed)

    def advance(self, decodes: Run, steps: Int32[Array, " T"], used: Bool[Array, " T"]) -> GpuMetadata:
        """Compute the work items of a later step; see `AttentionBackend.advance`."""
        slots, size = decodes.slots + jnp.where(used, steps, 0), self.spec.block_size
        tables = decodes.tables, decodes.page_len
        table, _ = pack_table(*tables, self.tile_shape, jnp)

        def works(window: int | None) -> Works:
            return Works(None, None, run_work(decodes, slots, used, self.decode_shape, window))

        return GpuMetadata(
            *works(None),
            tuple(works(window) for window in self._windows),
            table,
            _shifts(decodes.page_position, table, size, jnp),
            None,
            pack_table(*tables, self.decode_shape, jnp)[1],
            decodes.flat_slots(slots, used, size),
        )

    @property
    def _windows(self) -> list[int]:
        return sorted(window for window in self.spec.windows if window is not None)

    def _works(self, batch: AttentionBatch, sequences: int, window: int | None = None) -> Works:
        """Return the work items of layers with a window, or with full attention, of a step of so many sequences."""
        weighing, splits = batch.row_weighing(), self.block_splits(batch)
        near = None if window is None else Near(window, sees_parts(batch))
        parts = divide(batch, weighing, near, split=splits > 1)
        tiles = blocks = None
        if splits == 1:
            tiles = plan_tiles(batch, parts.tiles, self.tile_shape, near)
        if splits > 1 or weighing is not None:
            blocks = plan_blocks(batch, weighing, parts.blocks, self.block_shape, splits, sequences, near)
        return Works(tiles, blocks, None)

    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: GpuMetadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Write, then attend; see `AttentionBackend.forward`."""
        kept = self.spec.cache_dtype
        cache = tuple(_write(pool, to_cache(rows, kept), metadata.flat_slots) for pool, rows in zip(cache, (k, v)))

        def fold(work: Work) -> Float[Array, "Hkv R D"]:
            return _fold(q, self.groups) if work.source is None else _folded(q, work.source, self.groups)

        works = metadata.works(self._windows, window).map(fold)
        return self._attend(works, len(q), cache, metadata, scale=scale, window=window), cache

    def forward_inputs(
        self, heads: HeadInputs, cache: KVCache, metadata: GpuMetadata, *, scale: float
    ) -> tuple[Queries, KVCache]:
        """Prepare heads and write in one kernel, then attend; see `AttentionBackend.forward_inputs`."""
        slots, works = metadata.flat_slots, metadata.works(self._windows, None)
        used = [work for work in works if work is not None]

        def place(work: Work) -> Int32[Array, " T"]:
            return jnp.where(slots < 0, -1, UNIT * np.arange(len(slots))) if work.folded is None else work.folded

        folded, cache = prepare_inputs(
            heads,
            Places(slots, tuple(place(work) for work in used)),
            cache,
            tuple(UNIT * len(slots) if work.source is None else len(work.source) for work in used),
            interpret=self._interpret,
        )
        of = iter(folded)
        return self._attend(works.map(lambda _: next(of)), len(slots), cache, metadata, scale=scale), cache

    @property
    def _interpret(self) -> Any:
        """Return the argument of `plgpu.kernel` on this machine."""
        if self.interpret is not None:
            return self.interpret
        on_gpu = jax.default_backend() == "gpu"
        return False if on_gpu else plgpu.InterpretGPUParams()  # type: ignore[attr-defined, unused-ignore]  # JAX 0.11

    def _attend(
        self, folded: Folded, rows: int, cache: KVCache, metadata: GpuMetadata, *, scale: float, window: int | None = None
    ) -> Float[Array, "T H D"]:
        """Return the attention of folded queries over a written cache, for so many rows of the batch."""
        keys, values = (jax.lax.bitcast_convert_type(pool, self.spec.cache_dtype) for pool in cache)
        shifts = None if window is None else metadata.shifts

        def run(one: tuple[Work, Float[Array, "Hkv R D"]], holes: Int32[Array, "S tiles"] | None, shape: Shape) -> Any:
            work, q = one
            num_items, factors = (work.splits.num_items, work.splits.factors) if work.splits else (None, None)
            assert holes is not None
            bounds = (work.items, num_items, factors, work.rows, work.visits, metadata.table, shifts, holes)
            return attend(*bounds, q, keys, values, replace(shape, window=window), scale=scale, interpret=self._interpret)

        def run_states(one: tuple[Work, Float[Array, "Hkv R D"]], shape: Shape, rows: Rows | int) -> Float[Array, "n H D"]:
            states, (work, q) = run(one, metadata.state_holes, shape), one
            assert work.splits is not None
            return _by_token(combine(states, work.splits.kinds, work.splits.scale, rows).astype(q.dtype))

        head = np.arange(self.groups)
        if folded.decodes is not None:
            found = run_states(folded.decodes, self.decode_shape, self.groups)
            return jnp.pad(found, ((0, rows - len(found)), (0, 0), (0, 0)))
        out = jnp.zeros((rows, self.spec.num_heads, self.spec.head_dim), self.spec.dtype)
        if folded.tiles is not None:
            place = folded.tiles[0].folded
            assert place is not None
            found = run(folded.tiles, metadata.tile_holes, self.tile_shape)[:, jnp.maximum(place, 0)[:, None] + head]
            out = jnp.where((place >= 0)[:, None, None], _by_token(found), out)
        if folded.blocks is not None:
            place = folded.blocks[0].place
            assert place is not None
            block, token = jnp.divmod(jnp.maximum(place, 0), self.block_shape.block_tokens)
            found = run_states(folded.blocks, self.block_shape, Rows(block, token[:, None] * self.groups + head))
            out = jnp.where((place >= 0)[:, None, None], found, out)
        return out


def _shifts(
    page_position: Int32[StepArray, "S W"] | None, table: Int32[StepArray, "S W"], block_size: int, xp: Any
) -> Int32[StepArray, "S W"] | None:
    """Return position minus slot of every entry of a table, for `AttentionBatch.page_position`; `xp` as for `pack_table`."""
    if page_position is None:
        return None
    page_start = np.arange(page_position.shape[1], dtype=np.int32) * block_size
    return xp.pad(page_position - page_start, ((0, 0), (0, table.shape[1] - len(page_start))))


def _write(pool: jax.Array, rows: Float[Array, "T Hkv D"], flat_slots: Int32[Array, " T"]) -> jax.Array:
    """Scatter rows into a pool `[pages, kv_heads, block_size, head_dim]`; rows with slot -1 are dropped.

    The pool is seen as rows of one head and slot. XLA would copy it for a scatter over two of its axes.
    """
    pages, heads, size, head_dim = pool.shape
    head = jnp.arange(heads)
    index = (flat_slots[:, None] // size * heads + head) * size + flat_slots[:, None] % size
    index = jnp.where(flat_slots[:, None] < 0, pages * heads * size, index)
    bits = jax.lax.bitcast_convert_type(rows, pool.dtype).reshape(-1, head_dim)
    flat = pool.reshape(-1, head_dim)
    return flat.at[index.ravel()].set(bits, mode="drop", unique_indices=True).reshape(pool.shape)


def _fold(q: Float[Array, "T H D"], groups: int) -> Float[Array, "Hkv rows D"]:
    """Return blocks of one row of the batch: its query heads of one KV head, and zeros."""
    tokens, _, head_dim = q.shape
    by_head = q.reshape(tokens, -1, groups, head_dim).transpose(1, 0, 2, 3)
    return jnp.pad(by_head, ((0, 0), (0, 0), (0, UNIT - groups), (0, 0))).reshape(-1, tokens * UNIT, head_dim)


def _folded(q: Float[Array, "T H D"], source: Int32[Array, " R"], groups: int) -> Float[Array, "Hkv R D"]:
    """Return the folded rows of blocks, see `plan.Layout`."""
    token, head = jnp.divmod(source, groups)
    return q.reshape(len(q), -1, groups, q.shape[2])[token, :, head].swapaxes(0, 1)


def _by_token(rows: Float[Array, "Hkv n groups D"]) -> Float[Array, "n H D"]:
    """Return rows by token, with the query heads in order."""
    heads, number, groups, head_dim = rows.shape
    return rows.transpose(1, 0, 2, 3).reshape(number, heads * groups, head_dim)
