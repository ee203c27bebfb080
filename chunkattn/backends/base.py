"""The interface of an attention backend, and the description of a step that a backend receives.

Axes in the annotations of this package: `T` rows (tokens) of a step, `H` query heads, `Hkv` KV heads, `D` head size, `S`
sequences, `W` entries of a page table, `P` pages of the pool, `B` slots of a page, `Q` query tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Shaped

from chunkattn.errors import BackendError

FP8 = jnp.dtype(jnp.float8_e4m3fn)
"""The one-byte format a KV cache may have."""
FP8_MAX = 448.0
"""Its largest number; it has no infinity."""

KVCache = Any
"""One layer's paged K/V: a pytree of arrays whose axis 0 is the page."""
Metadata = Any
"""A backend's own pytree of host arrays describing one step."""
StepArray = Any
"""An array of the metadata: NumPy where it is built, `jax.Array` where it is traced."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend is asked to support.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        dtype: of queries, keys and values.
        block_size: slots per page.
        windows: the distinct sliding windows of the model's layers (None: full attention).
        kv_dtype: what the cache keeps, `dtype` or `FP8`; None is `dtype`.
        soft_cap: scaled scores `s` become `soft_cap * tanh(s / soft_cap)` before they are masked; None leaves them.

    Raises:
        BackendError: `kv_dtype` is neither, or `soft_cap` no positive number.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    kv_dtype: jnp.dtype | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in (self.dtype, FP8):
            raise BackendError(f"kv_dtype must be the model's {self.dtype} or {FP8}, got {self.kv_dtype}")
        if self.soft_cap is not None and not 0 < self.soft_cap < float("inf"):  # NaN compares false
            raise BackendError(f"soft_cap must be a positive number, got {self.soft_cap}")

    @property
    def cache_dtype(self) -> jnp.dtype:
        """What the cache keeps."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype


@dataclass(frozen=True)
class AttentionBatch:
    """One step's rows and the sequences they belong to: host arrays, O(tokens) in size.

    Rows of a sequence are neighbours with ascending KV slots; rows from `num_rows` on are
    padding. Row `i` sees slot `s` of its sequence iff

        s <= row_slot[i] and (s < prefix_end[seq] or s >= row_start[i]) and s is valid

    where slot `s` is valid iff `s % block_size < page_len[seq, s // block_size]`. What an
    invalid slot holds is undefined and may be NaN.

    Attributes:
        num_rows: rows in use.
        row_seq: int32 `[T]`, sequence of each row.
        row_slot: int32 `[T]`, KV slot the row's own K/V goes to.
        row_start: int32 `[T]`, first slot the row sees beyond the prefix.
        prefix_end: int32 `[S]`, slots of the prefix.
        block_tables: int32 `[S, W]`, page of every `block_size` slots.
        page_len: int32 `[S, W]`, valid slots of every page.
        block_size: slots per page.
    """

    num_rows: int
    row_seq: Int32[np.ndarray, " T"]
    row_slot: Int32[np.ndarray, " T"]
    row_start: Int32[np.ndarray, " T"]
    prefix_end: Int32[np.ndarray, " S"]
    block_tables: Int32[np.ndarray, "S W"]
    page_len: Int32[np.ndarray, "S W"]
    block_size: int

    def flat_slots(self) -> Int32[np.ndarray, " T"]:
        """int32 `[T]`: where each row's K/V goes in the pool seen as one list of slots.

        Padding rows get -1, which nothing may write to.
        """
        page = self.block_tables[self.row_seq, self.row_slot // self.block_size]
        flat = page * self.block_size + self.row_slot % self.block_size
        flat[self.num_rows :] = -1
        return flat.astype(np.int32)


class AttentionBackend(ABC):
    """Chunk-aware attention over a paged KV cache.

    One instance serves one engine. `build_metadata` runs on the host, in NumPy, once a
    step; `forward` is traced, once a layer. Array sizes in the metadata may depend only
    on the sizes `T`, `S` and `W` of the batch, or every step compiles anew.

    Attributes:
        max_pages: of a pool.
        max_table_pages: entries of a page table, the largest `W`.
    """

    name: ClassVar[str]
    max_pages: ClassVar[int] = 1 << 31
    max_table_pages: ClassVar[int] = 1 << 31

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None when the backend can serve `spec`, else the reason it cannot."""

    def allocate(self, num_pages: int) -> KVCache:
        """One layer's empty KV cache.

        By default K and V, each `[pages, block_size, kv_heads, head_dim]` in `storage_dtype`; `write_pages`
        and `read_pages` go with it.
        """
        shape = (num_pages, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        dtype = storage_dtype(self.spec.cache_dtype)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """A pytree of arrays for `forward`; sizes must follow from `T`, `S` and `W` alone."""

    @abstractmethod
    def forward(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T Hkv D"],
        v: Float[Array, "T Hkv D"],
        cache: KVCache,
        metadata: Metadata,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Float[Array, "T H D"], KVCache]:
        """Write the rows' K/V to the cache, then attend to what the cache holds.

        A row of this step is attended to as the cache keeps it, quantised or not: whether a token was computed now or
        found in the cache changes nothing.

        Args:
            q: `[T, num_heads, head_dim]`; heads `g * groups ... (g + 1) * groups - 1` share KV head `g`.
            k: `[T, num_kv_heads, head_dim]`.
            v: as `k`.
            cache: one layer's cache.
            metadata: of this step.
            scale: multiplies the scores; not negative.
            window: rows see only the last `window` slots up to their own. Plain prompts only,
                whose slots are their positions.

        Returns:
            `[T, num_heads, head_dim]` in q's dtype (padding rows undefined but finite), and the cache.
        """


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What a default cache keeps values of `dtype` as: 8- and 16-bit floats as their bits.

    XLA:CPU scatters and gathers no such floats; it would convert the whole pool to float32
    and back at every step.
    """
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if dtype.itemsize < 4 else dtype


def to_cache(x: Float[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Values as a cache of `dtype` keeps them: those beyond `FP8`'s range become its largest, NaN stays NaN.

    A bare cast to `FP8` makes NaN of everything beyond its range.
    """
    if dtype == FP8:
        x = jnp.clip(x, -FP8_MAX, FP8_MAX)
    return x.astype(dtype)


def write_pages(
    cache: KVCache, k: Float[Array, "T Hkv D"], v: Float[Array, "T Hkv D"], flat_slots: Int32[Array, " T"]
) -> KVCache:
    """Scatter rows' K/V into a cache of the default form, as it keeps them; rows with slot -1 are dropped."""

    def write(pool: jax.Array, rows: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, *pool.shape[2:])
        index = jnp.where(flat_slots < 0, len(flat), flat_slots)
        bits = _bitcast(to_cache(rows, _kept_as(pool, rows.dtype)), pool.dtype)
        return flat.at[index].set(bits, mode="drop").reshape(pool.shape)

    return write(cache[0], k), write(cache[1], v)


def read_pages(
    cache: KVCache, pages: Int[Array, "*N"], dtype: jnp.dtype
) -> tuple[Float[Array, "*N B Hkv D"], Float[Array, "*N B Hkv D"]]:
    """K and V of `pages` of any shape, in the model's `dtype`: `[*pages.shape, block_size, kv_heads, head_dim]` each."""
    keys, values = (_bitcast(pool[pages], _kept_as(pool, dtype)).astype(dtype) for pool in cache)
    return keys, values


def _kept_as(pool: Shaped[Array, "P B Hkv D"], dtype: jnp.dtype) -> jnp.dtype:
    """The floats whose bits a pool holds, for a model of `dtype`."""
    return FP8 if pool.dtype.itemsize == 1 else dtype


def _bitcast(x: Shaped[Array, "*axes"], dtype: jnp.dtype) -> Shaped[Array, "*axes"]:
    """The same bits as `dtype`; a cast to the type it has would be no gradient's friend."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
