"""`AdapterSlots`: the LoRA adapters of an engine, stacked on its devices, and the products of rows with them.

The factors of every matrix are stacked, `[slots, rank, in]` and `[slots, out, rank]`, with zeros up to the largest rank: a zero
adds exactly zero. The rows of a step are sorted by their slot, and both products are products of groups, which add a row up in
one order for any company. A row without an adapter keeps the bits of its product with the matrix.

Axes: `T` rows, `S` slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32

from chunkattn.backends.cpu import groups as native
from chunkattn.config import EngineConfig
from chunkattn.models.adapters import Adapter, layer_matrices
from chunkattn.models.experts import multiply_groups
from chunkattn.models.shards import Shards, divided
from chunkattn.models.spec import DecoderSpec

Stacks = dict[str, tuple[Any, Any]]
"""Two arrays for each module, the factors of its inputs and of its outputs."""
_DEPTH, _HALF = 32, 16
"""Multiple of which the products' depths are, `chunkattn.backends.cpu.linear.IN_STEP`; or its half."""


@dataclass(frozen=True)
class SlotShape:
    """Shape of the stacked factors.

    Attributes:
        count: number of slots.
        rank: largest rank.
        matrices: shape of each matrix that has factors, by the name of the parameter.
    """

    count: int
    rank: int
    matrices: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(config: EngineConfig, spec: DecoderSpec, adapters: Iterable[Adapter]) -> SlotShape | None:
        """Return the shape for an engine; None for an engine without adapters by request.

        Args:
            config: options of the engine.
            spec: shape of the decoder.
            adapters: adapters of `lora_modules`. Without `enable_lora`, their matrices alone have factors.
        """
        listed, matrices = list(adapters), layer_matrices(spec)
        if not listed and not config.enable_lora:
            return None
        if not config.enable_lora:
            used = set[str]().union(*(adapter.touched for adapter in listed))
            matrices = {name: shape for name, shape in matrices.items() if name in used}
        count = max(len(listed), config.max_loras if config.enable_lora else 0)
        return SlotShape(count, config.max_lora_rank, matrices)

    @property
    def depth(self) -> int:
        """Return the number of columns of the factors of outputs."""
        return _HALF if self.rank <= _HALF else -(-self.rank // _DEPTH) * _DEPTH

    def factors(self, outputs: int, inputs: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the shapes of the stacked factors of a matrix."""
        return (self.count, self.rank, inputs), (self.count, outputs, self.depth)

    def num_values(self, shards: Shards) -> int:
        """Return the number of values that each device holds."""
        held = (shards.held(name, shape) for name, shape in self.matrices.items())
        return sum(math.prod(factor) for outputs, inputs in held for factor in self.factors(outputs, inputs))


class AdapterSlots:
    """Adapters of an engine on the devices of its model.

    Args:
        shape: shape of the factors.
        dtype: dtype of the factors.
        shards: devices of the model.

    Attributes:
        shape: shape of the factors.
        count: number of slots, which is the slot of rows without an adapter.
        arrays: the stacked factors by module.
        partitions: partition of each array.
    """

    def __init__(self, shape: SlotShape, dtype: Any, shards: Shards) -> None:
        self.shape, self.count, self._dtype = shape, shape.count, dtype
        self.arrays: Stacks = {}
        self.partitions: Stacks = {}
        for name, matrix in shape.matrices.items():
            out, inward = (*shards.partition(name), None, None)[:2]
            of = divided(None, None, inward), divided(None, out)
            self.partitions[_module(name)] = of
            a, b = shape.factors(*matrix)
            self.arrays[_module(name)] = _zeros(a, dtype, shards, of[0]), _zeros(b, dtype, shards, of[1])

    def put(self, slot: int, adapter: Adapter) -> None:
        """Write the factors of a checked adapter to a slot.

        Args:
            slot: number of the slot.
            adapter: the adapter.
        """
        for name, matrix in self.shape.matrices.items():
            a, b = (np.zeros(factor[1:], self._dtype) for factor in self.shape.factors(*matrix))
            if (delta := adapter.deltas.get((name, None))) is not None:
                rank = len(delta.a)
                a[:rank] = delta.a
                b[:, :rank] = np.asarray(delta.b, np.float32) * np.float32(delta.scale)
            module = _module(name)
            stacks = self.arrays[module]
            self.arrays[module] = _write(stacks[0], slot, a), _write(stacks[1], slot, b)


class RowAdapters(NamedTuple):
    """Adapters of the rows of a step. The pairs of a row and its slot are sorted by slot; rows without an adapter are last.

    Attributes:
        stacks: factors by module, of one device.
        rows: row of each pair.
        sizes: number of pairs of each slot.
        places: pair of each row.
        is_adapted: whether a row has an adapter.
    """

    stacks: Mapping[str, tuple[jax.Array, jax.Array]]
    rows: Int32[Array, " T"]
    sizes: Int32[Array, " S"]
    places: Int32[Array, " T"]
    is_adapted: Bool[Array, " T"]

    @staticmethod
    def of(stacks: Mapping[str, tuple[jax.Array, jax.Array]], slots: Int32[Array, " T"], count: int) -> RowAdapters:
        """Sort the rows of a step.

        Args:
            stacks: factors by module.
            slots: slot of each row; `count` for none.
            count: number of slots.
        """
        order = jnp.argsort(slots, stable=True).astype(jnp.int32)
        sizes = jnp.sum(slots[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
        return RowAdapters(stacks, order, sizes, jnp.argsort(order).astype(jnp.int32), slots < count)

    def add(
        self, products: Sequence[Float32[Array, "T out"]], x: Float[Array, "T in"], modules: Sequence[str]
    ) -> list[Float32[Array, "T out"]]:
        """Return products of rows with matrices, with those of their adapters added.

        Args:
            products: products of the rows with the matrices.
            x: the rows.
            modules: module of each product.
        """
        own = [place for place, module in enumerate(modules) if module in self.stacks]
        if not own:
            return list(products)
        a, b = ([self.stacks[modules[place]][factor] for place in own] for factor in (0, 1))
        x = x.astype(a[0].dtype)
        fits = x.shape[1] % _DEPTH == 0 and all(stack.shape[1] % 2 == 0 for stack in b)
        sums = partial(jax.lax.platform_dependent, cpu=native.add_factors) if fits and native.serves(x, a) else _now
        found = sums(x, self.rows, self.sizes, *a, *b, *(products[place] for place in own), default=self._add)
        added = dict(zip(own, found, strict=True))
        return [added.get(place, product) for place, product in enumerate(products)]

    def _add(self, x: jax.Array, rows: jax.Array, sizes: jax.Array, *args: jax.Array) -> list[jax.Array]:
        """Return sums as `native.add_factors` does."""
        count, numbers = len(args) // 3, jnp.arange(len(x), dtype=jnp.int32)
        inner, sums = multiply_groups(x, rows, sizes, args[:count]), list[jax.Array]()
        for values, b, y in zip(inner, args[count : 2 * count], args[2 * count :], strict=True):
            padded = jnp.pad(values, ((0, 0), (0, b.shape[2] - values.shape[1])))
            (outer,) = multiply_groups(padded, numbers, sizes, [b])
            sums.append(jnp.where(self.is_adapted[:, None], y + outer[self.places], y))
        return sums


def _now(*args: jax.Array, default: Callable[..., list[jax.Array]]) -> list[jax.Array]:
    return default(*args)


def _module(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _zeros(shape: tuple[int, ...], dtype: Any, shards: Shards, partition: PartitionSpec) -> jax.Array:
    if (sharding := shards.sharding(partition)) is None:
        return jnp.zeros(shape, dtype)
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)()


@partial(jax.jit, donate_argnums=0)
def _write(stack: jax.Array, slot: int, values: np.ndarray) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, values, slot, 0)
