"""`StatePool`: the slots and seats of recurrent layers on the device, and the programs that move states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.recurrence import Recurrence, RecurrentCache, Seats, Slots, Window
from chunkattn.engine.host_calls import CopyStates, Tell
from chunkattn.engine.programs import ProgramCounts
from chunkattn.engine.step_sizes import bucket_for, buckets
from chunkattn.models.shards import WHOLE, Shards

_MOST_COPIED = 64
_COPY_SIZES = buckets(1, _MOST_COPIED, 8)
"""Sizes to which the tracks of a copy are padded."""


class StatePool:
    """Owner of the states of all recurrent layers.

    Args:
        recurrence: form of the layers, of the heads of one device.
        num_layers: number of recurrent layers.
        num_slots: number of slots. With 0, nothing is allocated, and programs can only be lowered.
        num_seats: number of seats.
        compiles: counter of traced programs by name, to which this pool adds its programs.
        shards: devices that share the pool. Each holds its own heads.
        tell: see `Runner`.

    Attributes:
        caches: cache of each layer. A step takes the arrays as a donation and gives new ones back.
        partitions: partition of every array of the pool.
    """

    def __init__(
        self,
        recurrence: Recurrence,
        num_layers: int,
        num_slots: int,
        num_seats: int,
        compiles: ProgramCounts,
        shards: Shards,
        tell: Tell | None,
    ) -> None:
        self.recurrence, self.num_slots, self.num_seats = recurrence, num_slots, num_seats
        self._num_layers, self._shards, self._tell = num_layers, shards, tell
        self.partitions = [_partition(shards)] * num_layers
        self._allocate: Callable[[], RecurrentCache] = partial(recurrence.allocate, num_slots, num_seats)
        if shards.mesh is not None:
            self._allocate = jax.jit(shards.map(self._allocate, outputs=self.partitions[0]))
        pool, slots = self.partitions, [cache.slots for cache in self.partitions]
        self._copy = compiles.jit("copy", _copy, shards, [pool], pool, donate_argnums=0)
        self._fetch = compiles.jit("pages", _fetch, shards, [pool], slots)
        self._store = compiles.jit("pages", _store, shards, [pool, WHOLE, slots], pool, donate_argnums=0)
        self.caches: list[RecurrentCache] = []
        if num_slots:
            self.reset()

    def reset(self) -> None:
        """Allocate new slots and seats of zeros; `Runner.reset` tells the other hosts."""
        self.caches = []  # frees the old pool before the new pool is allocated
        self.caches = [self._allocate() for _ in range(self._num_layers)]

    def shapes(self) -> list[RecurrentCache]:
        """Return the shapes and dtypes of the caches, of all devices."""
        allocate = partial(self.recurrence.allocate, self.num_slots, self.num_seats)
        return jax.eval_shape(lambda: [self._shards.map(allocate, outputs=p)() for p in self.partitions])

    @property
    def slot_shapes(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of one slot in every array of slots."""
        leaves = jax.tree.leaves([cache.slots for cache in self.caches])
        return [((1, *leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves]

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot over all layers and heads, whatever device holds them."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.slot_shapes)

    def copy(self, pairs: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy tracks.

        Args:
            pairs: slot and seat that are copied, then the slot and seat that get the copies.
        """
        if self._tell:
            self._tell(CopyStates(tuple(pairs)))
        for first in range(0, len(pairs), _MOST_COPIED):
            block = np.asarray(pairs[first : first + _MOST_COPIED], np.int32)
            padding = bucket_for(len(block), _COPY_SIZES) - len(block)
            nowhere = np.tile(np.asarray([(0, 0, self.num_slots, self.num_seats)], np.int32), (padding, 1))
            self.caches = self._copy(self.caches, *np.concatenate([block, nowhere]).T)

    def read(self, slot: int) -> Callable[[], list[np.ndarray]]:
        """Copy a slot out of the pool, without waiting for the copy, which is made before any later step runs.

        Returns:
            Function that waits for the copy and returns one array `[1, ...]` for every array of slots.
        """
        leaves = jax.tree.leaves(self._fetch(self.caches, np.asarray([slot], np.int32)))
        return lambda: list(jax.device_get(leaves))

    def write(self, slot: int, arrays: Sequence[np.ndarray]) -> None:
        """Write arrays that `read` returned to a slot; a slot of `num_slots` is nowhere."""
        treedef = jax.tree.structure([cache.slots for cache in self.caches])
        self.caches = self._store(self.caches, np.asarray([slot], np.int32), jax.tree.unflatten(treedef, arrays))

    def copies(self) -> list[Callable[[], None]]:
        """Return calls that compile the programs that copy tracks."""
        return [partial(self.copy, [(0, 0, self.num_slots, self.num_seats)] * size) for size in _COPY_SIZES]

    def transfers(self) -> list[Callable[[], None]]:
        """Return calls that compile the programs that copy slots to and from a KV store."""
        return [lambda: self.write(self.num_slots, self.read(0)())]


def state_bytes(recurrence: Recurrence, num_layers: int) -> tuple[int, int]:
    """Return the bytes of a slot and of a seat over all layers, on one device.

    Args:
        recurrence: form of the layers on one device.
        num_layers: number of recurrent layers.
    """
    cache = jax.eval_shape(lambda: recurrence.allocate(1, 1))
    slot, seat = (sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(of)) for of in cache)
    return num_layers * slot, num_layers * seat


def _partition(shards: Shards) -> RecurrentCache:
    """Return the partition of one layer's cache: all devices divide the heads."""
    second: Any = WHOLE if shards.mesh is None else shards.heads_at(1)
    third: Any = WHOLE if shards.mesh is None else shards.heads_at(2)
    window = Window(third, third, third)
    return RecurrentCache(Slots(second, window), Seats(third, third, third, window))


# Traced functions


def _copy(
    caches: list[RecurrentCache], slots: jax.Array, seats: jax.Array, to_slots: jax.Array, to_seats: jax.Array
) -> list[RecurrentCache]:
    def moved(source: jax.Array, target: jax.Array, tree: Any) -> Any:
        return jax.tree.map(lambda pool: pool.at[target].set(pool[source], mode="drop"), tree)

    return [RecurrentCache(moved(slots, to_slots, c.slots), moved(seats, to_seats, c.seats)) for c in caches]


def _fetch(caches: list[RecurrentCache], slots: jax.Array) -> list[Slots]:
    return [jax.tree.map(lambda pool: pool[slots], cache.slots) for cache in caches]


def _store(caches: list[RecurrentCache], slots: jax.Array, values: list[Slots]) -> list[RecurrentCache]:
    def written(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[slots].set(new, mode="drop")

    return [c._replace(slots=jax.tree.map(written, c.slots, new)) for c, new in zip(caches, values, strict=True)]
