"""The kernel before attention: normalises and rotates heads, writes K and V to the pool, and folds the queries.

A block of threads takes some rows and one KV head: its key, its value and the query heads that share it, each copied to shared
memory while the one before is computed. Results leave row by row, as each row of K and V has a page of its own and the folded
queries of a token lie where its block of queries begins (`plan.Layout`). XLA's own operations would read the heads four times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from chunkattn.backends.base import HeadInputs
from chunkattn.backends.default_cache import KVCache
from chunkattn.backends.pallas_gpu.products import ROWS, commit, load

_L, _ROW, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_BUFFERS = 2
"""Heads in shared memory on their way in, and as many on their way out."""
_SWIZZLE_BYTES = 128
_UNIT = 8
"""Divisor of the rows that are copied at once: those of one tile of shared memory."""


class Heads(NamedTuple):
    """Heads of the rows before norms and rotation.

    Attributes:
        products: query heads, key heads and value heads side by side, in `dtype` or float32.
        tables: cosines and sines of the rotation angles.
        q_scale: factors of the queries' RMS norm, or None for no norm.
        k_scale: factors of the keys' RMS norm, or None for no norm.
    """

    products: Float[Array, "T C"]
    tables: Float32[Array, "T D"]
    q_scale: Float[Array, " D"] | None
    k_scale: Float[Array, " D"] | None


class Places(NamedTuple):
    """Places that the results of rows go to.

    Attributes:
        slots: flat slot of each row in the pool, or -1.
        folded: for each array of folded queries the first row of each row's queries, or -1.
    """

    slots: Int32[Array, " T"]
    folded: tuple[Int32[Array, " T"], ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes that the kernel is compiled for.

    Attributes:
        kv_heads: number of KV heads.
        groups: query heads per KV head.
        head_dim: size of a head.
        block_size: slots of a page.
        rows: rows of a block of threads, which divide the step's.
        folded: rows of each array of folded queries.
        epsilon: value added to the mean squares.
    """

    kv_heads: int
    groups: int
    head_dim: int
    block_size: int
    rows: int
    folded: tuple[int, ...]
    epsilon: float

    @property
    def half(self) -> int:
        """Return the lanes that are rotated against as many others."""
        return self.head_dim // 2

    def lanes(self, dtype: jnp.dtype) -> int:
        """Return the lanes of a tile of shared memory."""
        return min(_SWIZZLE_BYTES // dtype.itemsize, self.half)

    def scratch(self, given: jnp.dtype, dtype: jnp.dtype) -> tuple[Any, ...]:
        """Return the buffers and barriers in shared memory, in the order of `_Smem`."""
        lanes = self.lanes(given)
        tiles = (plgpu.TilingTransform((_UNIT, lanes)), plgpu.SwizzleTransform(lanes * given.itemsize))
        shape = (_BUFFERS, ROWS, self.head_dim)
        return plgpu.SMEM(shape, given, transforms=tiles), plgpu.SMEM(shape, dtype), plgpu.Barrier(num_barriers=_BUFFERS)


class _Gmem(NamedTuple):
    """Refs of the kernel's arguments; `q` are the arrays of folded queries."""

    products: Any
    tables: Any
    slots: Any
    folded: Sequence[Any]
    q_scale: Any
    k_scale: Any
    keys: Any
    values: Any
    q: Sequence[Any]


class _Smem(NamedTuple):
    """Buffers of heads that come and go, and a barrier for each that comes."""

    here: Any
    there: Any
    arrived: Any


@partial(jax.jit, static_argnames=("sizes", "dtype", "interpret"))  # layers share one kernel, compiled once
def prepare(
    heads: Heads, places: Places, cache: KVCache, sizes: Sizes, dtype: jnp.dtype, *, interpret: Any
) -> tuple[tuple[Float[Array, "Hkv R D"], ...], KVCache]:
    """Normalise and rotate heads, write K and V, and fold the queries.

    The pool gets zeros for values that are not finite, and NaN goes to all queries of their row that read them.

    Args:
        heads: heads of the rows.
        places: places of the results.
        cache: pools of K and V, `[P, Hkv, block_size, D]` in `dtype`.
        sizes: sizes.
        dtype: dtype of the results, of 16 bits.
        interpret: argument of `plgpu.kernel`.

    Returns:
        The arrays of folded queries, whose rows of no token are undefined, and the written pools.
    """
    rows, missing = len(heads.products), ROWS - sizes.rows
    given = heads.products.dtype
    optional = [x for x in (heads.q_scale, heads.k_scale) if x is not None]
    arrays = (heads.products, jnp.pad(heads.tables, ((0, missing), (0, 0))), places.slots, *places.folded, *optional)
    q = [jax.ShapeDtypeStruct((sizes.kv_heads, n, sizes.head_dim), dtype) for n in sizes.folded]  # type: ignore[no-untyped-call]
    pools = [jax.new_ref(pool) for pool in cache]

    def entry(*refs: Any) -> None:
        products, tables, slots, *more = refs
        folded, more = more[: len(q)], more[len(q) :]
        q_scale, k_scale, keys, values = (more if optional else [None, None, *more])[:4]
        gmem = _Gmem(products, tables, slots, folded, q_scale, k_scale, keys, values, refs[-len(q) :])
        pl.run_scoped(
            lambda *scratch: _run(gmem, _Smem(*scratch), sizes, dtype),
            *sizes.scratch(given, dtype),
            collective_axes="warpgroup",
        )

    results = plgpu.kernel(
        entry,
        out_type=q,
        grid=(rows // sizes.rows, sizes.kv_heads),
        grid_names=("block", "head"),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays, *pools)
    keys, values = (jax.freeze(pool) for pool in pools)
    return tuple(results), (keys, values)


def prepare_inputs(
    heads: HeadInputs, places: Places, cache: KVCache, folded: tuple[int, ...], *, interpret: Any
) -> tuple[tuple[Float[Array, "Hkv R D"], ...], KVCache]:
    """Call `prepare` for heads of any number of rows.

    Args:
        heads: heads of the rows.
        places: places of the results.
        cache: pools of K and V, `[P, Hkv, block_size, D]` with the bits of `heads.dtype`.
        folded: rows of each array of folded queries.
        interpret: argument of `plgpu.kernel`.
    """
    rows, _, head_dim = heads.q.shape
    missing = -rows % _UNIT
    products = jnp.concatenate([x.reshape(rows, -1) for x in heads[:3]], axis=1)  # XLA finds the product of a joined weight
    products = products.astype(heads.dtype if heads.is_rounded else jnp.float32)
    tables = jnp.concatenate([heads.cos, heads.sin], axis=-1)[:, 0]
    products, tables = (jnp.pad(x, ((0, missing), (0, 0))) for x in (products, tables))
    given = Heads(products, tables, heads.q_scale, heads.k_scale)
    padded = Places(*jax.tree.map(lambda x: jnp.pad(x, (0, missing), constant_values=-1), places))
    kv_heads, block_size = cache[0].shape[1:3]
    block_rows = math.gcd(rows + missing, ROWS)
    sizes = Sizes(kv_heads, heads.q.shape[1] // kv_heads, head_dim, block_size, block_rows, folded, heads.epsilon)
    pools = tuple(lax.bitcast_convert_type(pool, heads.dtype) for pool in cache)
    q, written = prepare(given, padded, pools, sizes, heads.dtype, interpret=interpret)
    return q, tuple(lax.bitcast_convert_type(pool, old.dtype) for pool, old in zip(written, cache, strict=True))


def _run(gmem: _Gmem, smem: _Smem, sizes: Sizes, dtype: jnp.dtype) -> None:
    """Compute the rows and the heads of a block of threads."""
    first, head = lax.axis_index("block") * sizes.rows, lax.axis_index("head")
    kv, heads = sizes.kv_heads, sizes.kv_heads * sizes.groups
    columns = [heads + head, heads + kv + head, *(head * sizes.groups + group for group in range(sizes.groups))]
    size = jnp.int32(sizes.block_size)

    def fetch(number: int) -> None:
        """Start to copy a head to shared memory."""
        place = number % _BUFFERS
        lanes = pl.ds(pl.multiple_of(columns[number] * sizes.head_dim, sizes.head_dim), sizes.head_dim)
        source = gmem.products.at[pl.ds(pl.multiple_of(first, sizes.rows), sizes.rows), lanes]
        plgpu.copy_gmem_to_smem(source, smem.here.at[place, pl.ds(0, sizes.rows)], smem.arrived.at[place])

    def send(number: int, copy: Callable[[Any, Any], None]) -> None:
        """Copy the rows of a head to where they belong, and start to copy the next head but one."""
        commit()

        @pl.loop(0, sizes.rows)
        def one_row(row: Any) -> None:
            copy(first + row, smem.there.at[number % _BUFFERS, pl.ds(row, 1)])

        plgpu.commit_smem_to_gmem_group()
        if number + _BUFFERS < len(columns):
            fetch(number + _BUFFERS)

    def to_pool(pool: Any) -> Callable[[Any, Any], None]:
        def copy(row: Any, source: Any) -> None:
            slot = gmem.slots[row]

            @pl.when(slot >= 0)
            def write() -> None:
                to = pool.at[lax.div(slot, size), head, pl.ds(lax.rem(slot, size), 1)]
                plgpu.copy_smem_to_gmem(source, to, commit_group=False)

        return copy

    def to_folded(group: int) -> Callable[[Any, Any], None]:
        def copy(row: Any, source: Any) -> None:
            for of_rows, q in zip(gmem.folded, gmem.q, strict=True):
                place = of_rows[row]

                @pl.when(place >= 0)
                def write(place: Any = place, q: Any = q) -> None:
                    plgpu.copy_smem_to_gmem(source, q.at[head, pl.ds(place + group, 1)], commit_group=False)

        return copy

    for number in range(min(_BUFFERS, len(columns))):
        fetch(number)
    wrong: Any = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
    angles = _Angles(gmem, sizes, first)
    for number in range(len(columns)):
        place = number % _BUFFERS
        plgpu.barrier_wait(smem.arrived.at[place])
        if number >= _BUFFERS:
            wait_for_room()
        parts = _parts(smem.here.at[place], sizes, smem.here.dtype)
        scale = None if number == 1 else gmem.q_scale if number > 1 else gmem.k_scale
        if scale is not None:
            parts = _normalised(parts, scale, sizes)
        if number != 1:
            parts = _rotated(parts, angles)
        if number < 2:
            parts, wrong = _without_wrong(parts, wrong, dtype)
        else:
            taint = jnp.where(wrong > 0, jnp.nan, 0.0)
            parts = {lane: x + lax.broadcast_in_dim(taint, x.shape, [0]) for lane, x in parts.items()}
        for lane, x in parts.items():
            smem.there[place, :, lane : lane + x.shape[1]] = x.astype(dtype)
        send(number, to_pool((gmem.keys, gmem.values)[number]) if number < 2 else to_folded(number - 2))
    plgpu.wait_smem_to_gmem(0)


def wait_for_room() -> None:
    """Wait until the rows of all heads but the last have left shared memory."""
    plgpu.wait_smem_to_gmem(_BUFFERS - 1, wait_read_only=True)


Parts = dict[int, Any]
"""Lanes of a head of 64 rows, float32 `[64, lanes]` by their first lane."""


class _Angles:
    """Cosines and sines of the rows of a block of threads; those of small heads are read once for all heads."""

    def __init__(self, gmem: _Gmem, sizes: Sizes, first: Any) -> None:
        self._gmem, self._first, self.half = gmem, first, sizes.half
        lanes = sizes.lanes(gmem.products.dtype)
        small = sizes.head_dim <= 128
        self._kept = {lane: self._read(lane, lanes) for lane in range(0, sizes.head_dim, lanes)} if small else {}

    def _read(self, lane: int, lanes: int) -> Any:
        return load(self._gmem.tables, (pl.ds(self._first, ROWS), pl.ds(lane, lanes)), _L)

    def of(self, lane: int, lanes: int) -> tuple[Any, Any]:
        """Return cosines and sines of some lanes of the first half."""
        cos, sin = (self._kept[at] if self._kept else self._read(at, lanes) for at in (lane, lane + self.half))
        return cos, sin


def _parts(head: Any, sizes: Sizes, given: jnp.dtype) -> Parts:
    lanes = sizes.lanes(given)
    read = {lane: load(head, (pl.ds(0, ROWS), pl.ds(lane, lanes)), _L) for lane in range(0, sizes.head_dim, lanes)}
    return {lane: x.astype(jnp.float32) for lane, x in read.items()}


def _normalised(parts: Parts, scale: Any, sizes: Sizes) -> Parts:
    """Return RMSNorm over the lanes of a head."""
    total = sum((x * x).sum(axis=1) for x in parts.values())
    factor = lax.rsqrt(total * (1 / sizes.head_dim) + sizes.epsilon)

    def scaled(lane: int, x: Any) -> Any:
        factors = load(scale, (pl.ds(lane, x.shape[1]),), _COLUMN).astype(jnp.float32)
        return x * lax.broadcast_in_dim(factor, x.shape, [0]) * lax.broadcast_in_dim(factors, x.shape, [1])

    return {lane: scaled(lane, x) for lane, x in parts.items()}


def _rotated(parts: Parts, angles: _Angles) -> Parts:
    """Return the lanes rotated, see `rotary.apply_rotary`."""
    found: Parts = {}
    for lane, x in parts.items():
        if lane < angles.half:
            other, (cos, sin) = parts[lane + angles.half], angles.of(lane, x.shape[1])
            found[lane], found[lane + angles.half] = x * cos - other * sin, other * cos + x * sin
    return found


def _without_wrong(parts: Parts, wrong: Float32[Array, " 64"], dtype: jnp.dtype) -> tuple[Parts, Float32[Array, " 64"]]:
    """Return the lanes with zeros for values that `dtype` holds as no finite number, and 1 for each row that has such."""
    found: Parts = {}
    for lane, x in parts.items():
        kept = x.astype(dtype).astype(jnp.float32)
        fine = jnp.abs(kept) <= np.finfo(np.float32).max
        found[lane] = jnp.where(fine, kept, 0.0)
        wrong = jnp.maximum(wrong, jnp.where(fine, 0.0, 1.0).max(axis=1))
    return found, wrong
