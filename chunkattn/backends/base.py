"""The interface of an attention backend, and the description of a step that a backend receives.

Axes in the annotations of this package: `T` rows (tokens) of a step, `H` query heads, `Hkv` KV heads, `D` head size, `S`
sequences, `W` entries of a page table, `P` pages of the pool, `Q` query tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from chunkattn.backends.default_cache import FP8, KV, KVCache, storage_dtype
from chunkattn.errors import BackendError

Queries = Float[Array, "T H D"]
"""Queries of a step's rows, or their attention output."""
Metadata = Any
"""A backend's own pytree of host arrays that describes one step."""
StepArray = Any
"""An array of the metadata: NumPy on the host, `jax.Array` under tracing."""


@dataclass(frozen=True)
class AttentionSpec:
    """Model and cache properties that a backend must support.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        head_dim: size of a head.
        dtype: dtype of queries, keys and values.
        block_size: slots per page.
        windows: distinct sliding windows of the model's layers, in positions (None: full attention).
        kv_dtype: dtype of the cache, `dtype` or `FP8`; None means `dtype`.

    Raises:
        BackendError: `kv_dtype` is neither `dtype` nor `FP8`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    kv_dtype: jnp.dtype | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in (self.dtype, FP8):
            raise BackendError(f"kv_dtype must be the model's {self.dtype} or {FP8}, got {self.kv_dtype}")

    @property
    def windowed(self) -> bool:
        """Return whether a layer has a sliding window."""
        return any(window is not None for window in self.windows)

    @property
    def cache_dtype(self) -> jnp.dtype:
        """Return the dtype of the cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def outside(self, head_dims: tuple[int, ...], block_sizes: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
        """Return which property is none of those that a kernel serves, with its values, or None."""
        if self.head_dim not in head_dims:
            return f"head_dim must be one of {', '.join(map(str, head_dims))}, got {self.head_dim}"
        if self.block_size not in block_sizes:
            return f"block_size must be one of {', '.join(map(str, block_sizes))}, got {self.block_size}"
        if self.dtype.name not in dtypes:
            return f"dtype must be {' or '.join(dtypes)}, got {self.dtype.name}"
        return None


NO_QUESTION = np.iinfo(np.int32).max
"""`Weighing.question_start` of a sequence whose attention is left as it is."""


class Weighing(NamedTuple):
    """Temperature `t` and scale `s` of the chunk slots that question rows see.

    For a row from `question_start` on, the scaled scores `x` of the visible slots in `[prefix_end, question_start)` become
    `x / t + (s - 1) * logsumexp(x / t)`. The other slots keep their scores, and one softmax runs over all. Other rows are left
    as they are.

    Attributes:
        question_start: first slot of each sequence's question, or `NO_QUESTION`.
        temperature: temperature of each sequence, above 0.
        scale: scale of each sequence, above 0.

    Source: APE, arXiv:2502.05431.
    """

    question_start: Int32[np.ndarray, " S"]
    temperature: Float32[np.ndarray, " S"]
    scale: Float32[np.ndarray, " S"]


class RowWeighing(NamedTuple):
    """A `Weighing` by row. Rows that are left as they are have an empty range and the value 1.

    Attributes:
        begin: first chunk slot of each row.
        end: slot after the last chunk slot of each row.
        temperature: see `Weighing`.
        scale: see `Weighing`.
    """

    begin: Int32[StepArray, " T"]
    end: Int32[StepArray, " T"]
    temperature: Float32[StepArray, " T"]
    scale: Float32[StepArray, " T"]


@dataclass(frozen=True)
class AttentionBatch:
    """Rows of one step and the sequences they belong to: host arrays, O(tokens) in size.

    Rows of a sequence are contiguous, with ascending KV slots; rows from `num_rows` on are padding. Row `i` sees slot `s` of
    its sequence iff

        s <= row_slot[i] and (s < prefix_end[seq] or s >= row_start[i]) and s is valid

    where slot `s` is valid iff `s % block_size < page_len[seq, s // block_size]`. The contents of an invalid slot are
    undefined and may be NaN. In a layer with a sliding window, the row sees of these only the slots whose position is less than
    `window` below its own.

    Attributes:
        num_rows: number of rows in use.
        row_seq: sequence of each row.
        row_slot: KV slot that receives the row's own K/V.
        row_start: first slot that the row sees beyond the prefix.
        prefix_end: number of slots of each sequence's prefix.
        block_tables: page of every `block_size` slots.
        page_len: valid slots of every page.
        block_size: slots per page.
        weighing: weighing of the chunks in questions; None in engines whose chunk temperature and scale are 1. Only a backend
            with `weighs` receives one. Layers with a sliding window ignore it.
        page_position: position of the first slot of every page; the slots of a page have consecutive positions. None in engines
            of models without sliding windows.
    """

    num_rows: int
    row_seq: Int32[np.ndarray, " T"]
    row_slot: Int32[np.ndarray, " T"]
    row_start: Int32[np.ndarray, " T"]
    prefix_end: Int32[np.ndarray, " S"]
    block_tables: Int32[np.ndarray, "S W"]
    page_len: Int32[np.ndarray, "S W"]
    block_size: int
    weighing: Weighing | None = None
    page_position: Int32[np.ndarray, "S W"] | None = None

    def page_positions(self) -> Int32[np.ndarray, "S W"]:
        """Return `page_position`, or that of sequences whose slots are positions if the batch has none."""
        if self.page_position is not None:
            return self.page_position
        first = np.arange(self.block_tables.shape[1], dtype=np.int32) * self.block_size
        return np.broadcast_to(first, self.block_tables.shape)

    def row_positions(self) -> Int32[np.ndarray, " T"]:
        """Return the position of every row; of padding rows, any."""
        page, within = np.divmod(self.row_slot, self.block_size)
        return self.page_positions()[self.row_seq, page] + within

    def row_weighing(self) -> RowWeighing | None:
        """Return the weighing of every row, or None if the batch has none."""
        if self.weighing is None:
            return None
        start, temperature, scale = (x[self.row_seq] for x in self.weighing)
        weighed = self.row_slot >= start
        return RowWeighing(
            np.where(weighed, self.prefix_end[self.row_seq], 0).astype(np.int32),
            np.where(weighed, start, 0).astype(np.int32),
            np.where(weighed, temperature, 1).astype(np.float32),
            np.where(weighed, scale, 1).astype(np.float32),
        )

    def flat_slots(self) -> Int32[np.ndarray, " T"]:
        """Return the flat slot of each row's K/V in the pool, `page * block_size + offset`; -1 for padding rows."""
        page = self.block_tables[self.row_seq, self.row_slot // self.block_size]
        flat = page * self.block_size + self.row_slot % self.block_size
        flat[self.num_rows :] = -1
        return flat.astype(np.int32)


class HeadInputs(NamedTuple):
    """Heads of the rows as the products of a layer have them, before norms and rotation.

    Attributes:
        q: queries, float32.
        k: keys, float32.
        v: values, float32.
        q_scale: factors `[D]` of the queries' RMS norm, or None for no norm.
        k_scale: factors `[D]` of the keys' RMS norm, or None for no norm.
        cos: float32 `[T, 1, D / 2]`, as `rotary_tables` returns.
        sin: float32 `[T, 1, D / 2]`.
        epsilon: value added to the mean squares.
        dtype: dtype of the model, which queries, keys and values are rounded to.
        is_rounded: whether `q`, `k` and `v` hold values of `dtype` alone.
    """

    q: Queries
    k: KV
    v: KV
    q_scale: Float[Array, " D"] | None
    k_scale: Float[Array, " D"] | None
    cos: Float[Array, "T 1 half"]
    sin: Float[Array, "T 1 half"]
    epsilon: float
    dtype: jnp.dtype
    is_rounded: bool = False


class AttentionBackend(ABC):
    """Chunk-aware attention over a paged KV cache.

    One instance serves one engine. `build_metadata` runs on the host in NumPy, once per step; `forward` is traced, once per
    layer. Array sizes in the metadata may depend only on the sizes `T`, `S` and `W` of the batch; otherwise every step
    recompiles.

    Attributes:
        max_pages: maximum number of pages of a pool.
        max_table_pages: maximum number of entries of a page table, the largest `W`.
        can_keep_bits: whether `keeps_bits` holds under `batch_invariant`, in steps of one size `T` and for own parts that begin
            on a page. The programs then compute more than they need.
        batch_invariant: whether rows must keep their bits; the engine sets it.
        weighs: whether the backend computes `AttentionBatch.weighing`. An engine that needs it refuses other backends.
        any_table_width: whether `forward` costs the same for page tables of any width `W`. Steps then all have the widest.
        narrowest_table: number of entries below which narrower page tables are not faster.
        prepares_heads: whether `forward_inputs` works.
        advances: whether `advance` works, so that one program runs several decodes. Without, every decode is a step.
        heads_first: whether a page of the default cache holds the tokens of a KV head side by side.
        checked_by_auto: whether an engine with `attention_backend="auto"` first compares the backend with `xla` on its device.
        smallest_step: rows to which smaller steps are padded.
        step_rows: rows whose matrix products take about as long as a step's fixed work, mostly reading the weights.
        max_rows: maximum number of rows of a step.
    """

    name: ClassVar[str]
    can_keep_bits: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    any_table_width: bool = False
    narrowest_table: ClassVar[int] = 32
    prepares_heads: bool = False
    advances: bool = False
    heads_first: ClassVar[bool] = False
    checked_by_auto: ClassVar[bool] = False
    smallest_step: ClassVar[int] = 8
    step_rows: ClassVar[int] = 256
    max_pages: ClassVar[int] = 1 << 31
    max_table_pages: int = 1 << 31
    max_rows: int = 1 << 31
    batch_invariant: bool = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @property
    def keeps_bits(self) -> bool:
        """Return whether a row's bits depend on its own sequence alone, on no other row and on no size `T`, `S` or `W`.

        A property, as it may depend on the platform. A class may set it to a constant.
        """
        return False

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Return the reason why the backend cannot serve `spec`, or None if it can."""

    def allocate(self, num_pages: int) -> KVCache:
        """Allocate one layer's empty KV cache.

        The default cache holds K and V, each `[pages, block_size, kv_heads, head_dim]` in `storage_dtype`, as `write_pages`
        and `read_pages` expect it. With `heads_first`, K and V are `[pages, kv_heads, block_size, head_dim]`.

        Raises:
            BackendError: there are more than `max_pages` pages.
        """
        self.check_pages(num_pages)
        spec = self.spec
        axes = (spec.num_kv_heads, spec.block_size) if self.heads_first else (spec.block_size, spec.num_kv_heads)
        shape, dtype = (num_pages, *axes, spec.head_dim), storage_dtype(spec.cache_dtype)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def check_pages(self, num_pages: int) -> None:
        """Check the number of pages of a pool.

        Raises:
            BackendError: there are more than `max_pages` pages.
        """
        if num_pages > self.max_pages:
            raise BackendError(f"{self.name} supports at most {self.max_pages} pages, got {num_pages}; use a larger block_size")

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        """Build the arrays for `forward`.

        Args:
            batch: the step.

        Returns:
            A pytree of arrays whose sizes follow from `T`, `S` and `W` alone.
        """

    def build_decodes(self, batch: AttentionBatch) -> Metadata:
        """Build the arrays for `advance`, on the host.

        Args:
            batch: first step of a run of decodes. Row `i` is the only row of sequence `i`, and sees every valid slot up to its
                own. The page tables have the pages of all steps of the run.
        """
        return self.build_metadata(batch)

    def advance(self, decodes: Metadata, steps: Int32[Array, " T"], used: Bool[Array, " T"]) -> Metadata:
        """Return the metadata of a later step of a run of decodes, for `forward`. Traced.

        Every row moves by one slot a step, until its sequence has ended.

        Args:
            decodes: result of `build_decodes`.
            steps: steps that each row has moved on since the first; 0 for padding.
            used: whether a row is in use; the rows of padding come last.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: Metadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Write the rows' K/V to the cache, then attend to the cache contents.

        A row of this step is read back as the cache stores it, quantised or not, so computed and cached tokens give the same
        result.

        A backend that `keeps_bits`, or that `can_keep_bits` and is asked to, gives a row the same bits in any company: beside
        other rows and sequences, in a step or a page table of another size, on other pages, with spans cut elsewhere, and with
        parts that it does not see added, lengthened, removed or moved. It counts the portions of a sum from slot 0 for the
        prefix and from the start of the row's own part, `max(row_start, prefix_end)`, never from absolute slots or from a tile
        of rows. `check_backend` of `chunkattn.testing` judges this with `bits`.

        Args:
            q: queries; heads `g * groups ... (g + 1) * groups - 1` share KV head `g`.
            k: keys of the rows.
            v: values of the rows.
            cache: one layer's cache.
            metadata: metadata of this step.
            scale: factor of the scores; not negative.
            window: rows see only slots whose position is less than `window` below their own; one of `AttentionSpec.windows`.

        Returns:
            The attention output in q's dtype (padding rows are undefined but finite), and the cache.
        """

    def forward_inputs(self, heads: HeadInputs, cache: KVCache, metadata: Metadata, *, scale: float) -> tuple[Queries, KVCache]:
        """Normalise and rotate heads, then compute `forward` without a window.

        The cache gets zeros for values that are not finite. Their row gets NaN in every head that reads them.

        Args:
            heads: heads of the rows.
            cache: see `forward`.
            metadata: see `forward`.
            scale: see `forward`.

        Returns:
            The attention output in `heads.dtype`, and the cache.
        """
        raise NotImplementedError


def positions_of(
    page_position: Int32[Array, "S W"], seq: Int32[Array, " B"], slots: Int32[Array, "B ..."], block_size: int
) -> Int32[Array, "B ..."]:
    """Return the positions of slots.

    Args:
        page_position: see `AttentionBatch`.
        seq: sequences.
        slots: slots of each sequence; for slots beyond its table, any position is returned.
        block_size: slots per page.
    """
    page = jnp.clip(slots // block_size, 0, page_position.shape[1] - 1)
    return page_position[seq.reshape(-1, *[1] * (slots.ndim - 1)), page] + slots % block_size
