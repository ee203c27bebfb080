"""`KVPool`: the pages of the KV cache on the device, the programs that move pages, and what identifies their K/V."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import PartitionSpec

from chunkattn.backends.base import AttentionBackend
from chunkattn.backends.default_cache import KVCache
from chunkattn.engine.host_calls import CopyPages, Tell
from chunkattn.engine.programs import ProgramCounts
from chunkattn.engine.step_sizes import bucket_for, buckets
from chunkattn.errors import BackendError
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.shards import KV_HEADS, WHOLE, Shards, divided

_PAGES_MOVED = 64
"""Limit on the pages that one program moves."""
_COPY_SIZES = (1, 16, _PAGES_MOVED)
"""Sizes to which the pages of a copy within the pool are padded."""
KV_VERSION = 3
"""Version of the code that computes and caches K/V. Raise it with any change that may invalidate K/V on disk."""


class KVPool:
    """Owner of the KV cache of all layers.

    Args:
        backend: attention backend that allocates the cache, of the heads of one device.
        num_layers: number of layers.
        num_pages: number of pages. With 0, nothing is allocated, and programs can only be lowered.
        compiles: counter of traced programs by name, to which this pool adds its programs.
        shards: devices that share the pool. Each holds the same pages, of its own KV heads.
        tell: see `Runner`.

    Attributes:
        caches: cache of each layer. A step takes the arrays as a donation and gives new ones back.
        partitions: partition of every array of the pool.

    Raises:
        BackendError: there are several devices, and the backend's cache has no axis of KV heads.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        num_layers: int,
        num_pages: int,
        compiles: ProgramCounts,
        shards: Shards,
        tell: Tell | None,
    ) -> None:
        self.num_pages, self._tell = num_pages, tell
        self._num_layers = num_layers
        self._sizes = buckets(8, _PAGES_MOVED, 2)
        self.partitions = [_partition(backend, shards)] * num_layers
        self._allocate: Callable[[], KVCache] = partial(backend.allocate, num_pages)
        if shards.mesh is not None:  # compiled, so that no device holds more than its part
            self._allocate = jax.jit(shards.map(self._allocate, outputs=self.partitions[0]))
        pool = self.partitions
        # The pool is donated, so that writing a page does not copy the pool.
        self._copy = compiles.jit("copy", _copy, shards, [pool], pool, donate_argnums=0)
        self._fetch = compiles.jit("pages", _fetch, shards, [pool], pool)
        self._store = compiles.jit("pages", _store, shards, [pool, WHOLE, pool], pool, donate_argnums=0)
        self.caches: list[KVCache] = []
        if num_pages:
            self.reset()

    def reset(self) -> None:
        """Allocate new, empty pages."""
        self.caches = []  # frees the old pool before the new pool is allocated
        self.caches = [self._allocate() for _ in range(self._num_layers)]

    @property
    def page_shapes(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of one page in every array of the pool."""
        return [(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(self.caches)]

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page over all layers and all KV heads, whatever device holds them."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.page_shapes)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages in every layer; `pairs` holds the pages `(from, to)`."""
        if self._tell:
            self._tell(CopyPages(tuple(pairs)))
        for first in range(0, len(pairs), _PAGES_MOVED):
            block = np.asarray(pairs[first : first + _PAGES_MOVED], np.int32)
            padding = np.full((bucket_for(len(block), _COPY_SIZES) - len(block), 2), (0, self.num_pages), np.int32)
            self.caches = self._copy(self.caches, *np.concatenate([block, padding]).T)

    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """Copy pages out of the pool, without waiting for the copy.

        The copy is made before any later step runs.

        Args:
            pages: page numbers.

        Returns:
            Function that waits for the copy and returns one array `[len(pages), ...]` for every array of the pool.
        """
        blocks = [self._fetch(self.caches, padded) for padded in self._page_blocks(pages, 0)]

        def wait() -> list[np.ndarray]:
            parts = [jax.device_get(jax.tree.leaves(block)) for block in blocks]
            return [np.concatenate(arrays)[: len(pages)] for arrays in zip(*parts, strict=True)]

        return wait

    def write_pages(self, pages: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Write arrays that `read_pages` returned to pages of the pool.

        Args:
            pages: page numbers.
            arrays: one array `[len(pages), ...]` for every array of the pool.
        """
        treedef = jax.tree.structure(self.caches)
        for number, padded in enumerate(self._page_blocks(pages, self.num_pages)):
            first = number * _PAGES_MOVED
            rows = [a[first : first + _PAGES_MOVED] for a in arrays]
            values = [np.concatenate([r, np.zeros((len(padded) - len(r), *r.shape[1:]), r.dtype)]) for r in rows]
            self.caches = self._store(self.caches, padded, jax.tree.unflatten(treedef, values))

    def _page_blocks(self, pages: Sequence[int], fill: int) -> list[np.ndarray]:
        """Return the page numbers in blocks, each padded with `fill` to a bucket's size."""
        blocks = [np.asarray(pages[first : first + _PAGES_MOVED], np.int32) for first in range(0, len(pages), _PAGES_MOVED)]
        return [np.pad(b, (0, bucket_for(len(b), self._sizes) - len(b)), constant_values=fill) for b in blocks]

    def copies(self) -> list[Callable[[], None]]:
        """Return calls that compile the programs that copy pages."""
        return [partial(self.copy_pages, [(0, self.num_pages)] * size) for size in _COPY_SIZES]  # written nowhere

    def transfers(self) -> list[Callable[[], None]]:
        """Return calls that compile the programs that copy pages to and from a KV store."""
        return [partial(self._transfer, size) for size in self._sizes]

    def _transfer(self, size: int) -> None:
        """Read a page `size` times, and write the values nowhere."""
        self.write_pages([self.num_pages] * size, self.read_pages([0] * size)())


# Traced functions


def _copy(caches: list[KVCache], source: jax.Array, target: jax.Array) -> list[KVCache]:
    return jax.tree.map(lambda pool: pool.at[target].set(pool[source], mode="drop"), caches)


def _fetch(caches: list[KVCache], pages: jax.Array) -> list[KVCache]:
    return jax.tree.map(lambda pool: pool[pages], caches)


def _store(caches: list[KVCache], pages: jax.Array, values: list[KVCache]) -> list[KVCache]:
    return jax.tree.map(lambda pool, new: pool.at[pages].set(new, mode="drop"), caches, values)


def _partition(backend: AttentionBackend, shards: Shards) -> Any:
    """Return the partition of every array of one layer's cache: the axis that grows with the number of KV heads is divided.

    Args:
        backend: attention backend of the heads of one device.
        shards: devices that share the pool.

    Raises:
        BackendError: an array does not have one such axis.
    """
    cache = jax.eval_shape(lambda: backend.allocate(1))
    if shards.kv_size == 1:
        return jax.tree.map(lambda _: WHOLE, cache)
    spec, times = backend.spec, shards.kv_size
    whole = type(backend)(replace(spec, num_heads=spec.num_heads * times, num_kv_heads=spec.num_kv_heads * times))

    def of(part: jax.ShapeDtypeStruct, array: jax.ShapeDtypeStruct) -> PartitionSpec:
        axes = [KV_HEADS if size == held * times else None for held, size in zip(part.shape, array.shape, strict=True)]
        if axes.count(KV_HEADS) != 1:
            raise BackendError(
                f"attention_backend {backend.name!r}: its cache {part.shape} of {spec.num_kv_heads} KV heads and "
                f"{array.shape} of {whole.spec.num_kv_heads} cannot be divided by KV heads; use tensor_parallel_size=1"
            )
        return divided(*axes)

    return jax.tree.map(of, cache, jax.eval_shape(lambda: whole.allocate(1)))


def page_bytes(backend: AttentionBackend, num_layers: int) -> int:
    """Return the bytes of one page over all layers, on one device.

    Args:
        backend: attention backend that allocates the pool.
        num_layers: number of layers.
    """
    leaves = jax.tree.leaves(jax.eval_shape(lambda: backend.allocate(1)))
    return num_layers * sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def fingerprint(form: Any, weights: Iterable[tuple[str, Weight]]) -> bytes:
    """Return 16 bytes that differ between models whose K/V may differ. Equal inputs give equal bytes on every machine.

    Args:
        form: geometry of the model, attention and pool, as nested dataclasses, sequences, arrays and scalars.
        weights: name and value of every weight of the model.
    """
    digest = xxhash.xxh3_128(json.dumps([KV_VERSION, _plain(form)], sort_keys=True).encode())
    for name, weight in weights:
        leaf = weight
        if isinstance(weight, Packed):
            leaf = weight.data
            digest.update(f"{weight.format}{weight.shape}{weight.digits}".encode())
        value = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{name}{value.shape}{value.dtype}".encode())
        digest.update(value.view(np.uint8).data if value.ndim else value.tobytes())
    return digest.digest()


def _plain(value: Any) -> Any:
    """Return a value as JSON types. `repr` is unsuitable: NumPy's texts differ between its versions."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tobytes().hex()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value.hex()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
