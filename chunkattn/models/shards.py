"""`Shards`: the devices that share one model, and the part of each parameter that each device holds.

Query heads, the heads of recurrent layers, the MLP and the vocabulary are divided over all devices. KV heads are divided as
well; where there are fewer KV heads than devices, a group of devices shares one. A step runs whole under one `shard_map`:
each device computes its own heads and its own columns of the MLP, and the devices add up the two results of a layer.

Source: Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from chunkattn.errors import ConfigError
from chunkattn.models.aligned import aligned
from chunkattn.models.mixers import EXACT
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.spec import EXPERTS, TRANSPOSED, DecoderSpec

Function = TypeVar("Function", bound=Callable[..., Any])
Index = tuple[slice, ...]
"""Part of a tensor, one slice an axis. The empty tuple is the whole tensor."""
Read = Callable[[Index], np.ndarray]
"""Function that reads a part of a tensor."""

KV_HEADS = "kv_heads"
"""Axis of the mesh that divides the KV heads."""
_ALL = (KV_HEADS, "same_kv_head")
"""Both axes of the mesh. The devices along the second one share their KV heads."""


def divided(*axes: str | tuple[str, ...] | None) -> PartitionSpec:
    """Return a partition: for each axis of an array, the axes of the mesh that divide it, or None."""
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


WHOLE = divided()
"""Partition of an array that every device holds."""
_OUTPUTS = {
    **dict.fromkeys(("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), divided(_ALL)),
    **dict.fromkeys(("k_proj", "v_proj"), divided(KV_HEADS)),
    **dict.fromkeys((f"in_proj_{part}" for part in "qkvzba"), divided(_ALL)),
    **dict.fromkeys(("qkv_proj", "gate_up_proj", "in_proj_qkvzba"), divided(_ALL)),
    **dict.fromkeys((f"conv_{part}" for part in "qkv"), divided(_ALL)),
}
"""Partition of the modules that are divided along axis 0 of their weight, and of their bias."""
_INPUTS = ("o_proj", "out_proj", "down_proj")
"""Modules whose weight is divided along its inputs. Their products are added up over the devices before the bias."""


@dataclass(frozen=True)
class Shards:
    """The devices of one model.

    Attributes:
        mesh: the devices, `[KV heads, devices that share one]`; None for one device, which runs plain programs. Absent devices
            have an abstract mesh.
    """

    mesh: Mesh | AbstractMesh | None = None

    @classmethod
    def over(cls, devices: Sequence[jax.Device], spec: DecoderSpec) -> Shards:
        """Return the shards of a decoder over devices.

        Args:
            devices: one device or more.
            spec: shape of the decoder.

        Raises:
            ConfigError: the heads, KV heads or MLP cannot be divided by the number of devices.
        """
        kv_heads, others = _axes(len(devices), spec)
        return cls() if len(devices) == 1 else cls(Mesh(np.asarray(devices).reshape(kv_heads, others), _ALL))

    @classmethod
    def absent(cls, size: int, spec: DecoderSpec) -> Shards:
        """Return the shards of a decoder over devices that are not there, to compute shapes.

        Args:
            size: number of devices.
            spec: shape of the decoder.

        Raises:
            ConfigError: as `over`.
        """
        axes = _axes(size, spec)
        return cls() if size == 1 else cls(AbstractMesh(axes, _ALL))

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def kv_size(self) -> int:
        """Return the number of parts that the KV heads are divided into."""
        return 1 if self.mesh is None else self.mesh.shape[KV_HEADS]

    @property
    def devices(self) -> list[jax.Device]:
        """Return the devices; the default device if there is no mesh."""
        if self.mesh is None:
            return [jax.devices()[0]]
        assert isinstance(self.mesh, Mesh), "the devices are absent"
        return list(self.mesh.devices.flat)

    def partition(self, name: str) -> PartitionSpec:
        """Return the partition of a parameter.

        Args:
            name: name of the parameter in checkpoints, of a module and `weight` or `bias`.
        """
        *outer, module, leaf = name.split(".")
        if EXPERTS in outer:  # every device holds some columns of each expert
            return divided(None, None, _ALL) if (module in _INPUTS) == (leaf != TRANSPOSED) else divided(None, _ALL)
        if module in _INPUTS and leaf == "weight":
            return divided(None, _ALL)
        return divided(_ALL) if name.endswith(EXACT) else _OUTPUTS.get(module, WHOLE)

    @staticmethod
    def heads_at(axis: int) -> PartitionSpec:
        """Return the partition of an array with an axis of heads, which all devices divide."""
        return divided(*[None] * axis, _ALL)

    def partition_of_parts(self, name: str) -> PartitionSpec:
        """Return the partition of the bytes of a packed parameter, see `load_parts`."""
        axis, _ = self.division(name)
        return divided(*self.partition(name)[axis : axis + 1])

    def division(self, name: str) -> tuple[int, int]:
        """Return the axis along which a matrix is divided, and the number of distinct parts; axis 0 for a whole matrix.

        Args:
            name: name of the parameter in checkpoints.
        """
        axes = tuple(self.partition(name))
        axis = next((number for number, by in enumerate(axes) if by is not None), 0)
        if self.mesh is None or not axes:
            return axis, 1
        return axis, self.kv_size if axes[axis] == KV_HEADS else self.size

    def held(self, name: str, shape: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
        """Return the shape of the part of a parameter that a device holds.

        Args:
            name: name of the parameter in checkpoints.
            shape: shape of the whole tensor.
            unit: number of which a part's rows of the vocabulary are a multiple.
        """
        padded, sharding = self._padded(name, shape, unit), self.sharding(self.partition(name))
        return padded if sharding is None else sharding.shard_shape(padded)

    def _padded(self, name: str, shape: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
        """Return the shape of a tensor, whose axis 0 is filled up to a multiple of the devices where it is the vocabulary."""
        rows = self.size * unit
        return (-(-shape[0] // rows) * rows, *shape[1:]) if _is_table(name) else shape

    def load(self, name: str, shape: tuple[int, ...], read: Read) -> jax.Array:
        """Return a parameter on the devices. Each distinct part is read once.

        Rows of zeros fill up a vocabulary that the number of devices does not divide.

        Args:
            name: name of the parameter in checkpoints.
            shape: shape of the whole tensor.
            read: reads a part of the tensor.
        """
        if self.mesh is None:
            # The host keeps the tensor until the device has it.
            return jax.block_until_ready(jax.device_put(self._held(read(()))))  # type: ignore[no-untyped-call]
        sharding = self.sharding(self.partition(name))
        assert sharding is not None
        padded = self._padded(name, shape)
        holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(padded).items():
            bounds = tuple(part.indices(length)[:2] for part, length in zip(index or (), padded, strict=True))
            holders.setdefault(bounds, []).append(device)
        parts = []
        for ((first, last), *others), devices in holders.items():
            end = min(last, shape[0])
            values = read((slice(min(first, end), end), *(slice(*other) for other in others)))
            if missing := last - first - len(values):
                values = np.pad(values, ((0, missing), *[(0, 0)] * len(others)))
            values = self._held(values)
            parts += [jax.device_put(values, device) for device in devices]
        # The host keeps a part until the device has it.
        jax.block_until_ready(parts)  # type: ignore[no-untyped-call]
        return jax.make_array_from_single_device_arrays(padded, sharding, parts)

    def _held(self, values: np.ndarray) -> np.ndarray:
        """Return an array that a CPU's device may keep as it is."""
        return aligned(values) if self.devices[0].platform == "cpu" else values

    def load_parts(self, name: str, size: int, pack: Callable[[int], np.ndarray]) -> jax.Array:
        """Return a packed parameter on the devices, uint8: the bytes of all parts in ascending order.

        Args:
            name: name of the parameter in checkpoints.
            size: bytes of a part.
            pack: returns the bytes of a part by its number, as an array of its own. Each part is packed once.
        """
        if self.mesh is None:
            return jax.device_put(pack(0), may_alias=True)
        sharding, whole = self.sharding(self.partition_of_parts(name)), (size * self.division(name)[1],)
        assert sharding is not None
        holders: dict[int, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(whole).items():
            first = index[0].start if index else None
            holders.setdefault((first or 0) // size, []).append(device)
        arrays = [
            jax.device_put(values, device)
            for number, devices in holders.items()
            for values in [pack(number)]
            for device in devices
        ]
        jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
        return jax.make_array_from_single_device_arrays(whole, sharding, arrays)

    def zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray | jax.Array:
        """Return zeros on every device as results of programs are; on the host for one device."""
        if self.mesh is None:
            return np.zeros(shape, dtype)
        return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=self.sharding(WHOLE))(shape, dtype)

    def agree(self, value: int) -> bool:
        """Return whether all hosts of the devices have one value. All of them call this function together."""
        return self.least(value) == -self.least(-value)

    def least(self, value: int) -> int:
        """Return the least of the values that the hosts of the devices have. All of them call this function together."""
        if jax.process_count() == 1:
            return int(value)
        return int(multihost_utils.process_allgather(np.int32(value)).min())

    def sharding(self, partition: PartitionSpec) -> NamedSharding | None:
        """Return the sharding of an array of a partition, or None for one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, partition)

    def map(self, function: Function, inputs: Sequence[Any] = (), outputs: Any = WHOLE) -> Function:
        """Return a function that runs on every device on its own parts of the arrays; the function itself for one device.

        Args:
            function: traced function. Its keyword arguments are static.
            inputs: partition of each of the first arguments, or a tree of partitions. Later arguments are whole.
            outputs: partition of the result, or a tree of partitions.
        """
        if self.mesh is None:
            return function

        @wraps(function)
        def mapped(*arrays: Any, **static: Any) -> Any:
            specs = (*inputs, *[WHOLE] * (len(arrays) - len(inputs)))
            run = jax.shard_map(partial(function, **static), mesh=self.mesh, in_specs=specs, out_specs=outputs, check_vma=False)
            return run(*arrays)

        return mapped  # type: ignore[return-value]

    # For traced functions inside `map`, on the part of one device.

    def embed(self, table: Weight, ids: jax.Array) -> jax.Array:
        """Return the rows of the embedding, float32 `[T, hidden]`.

        Args:
            table: rows of the embedding that the device holds, `[rows, hidden]`.
            ids: int32 `[T]` token ids, of the whole vocabulary.
        """
        if self.mesh is None:
            return _take(table, ids)
        count = table.shape[0]
        rows = ids - jax.lax.axis_index(_ALL) * count
        is_held = (rows >= 0) & (rows < count)
        return self.total(jnp.where(is_held[:, None], _take(table, jnp.where(is_held, rows, 0)), 0))

    def total(self, x: jax.Array) -> jax.Array:
        """Return the sum of an array over the devices."""
        return x if self.mesh is None else jax.lax.psum(x, _ALL)  # type: ignore[no-untyped-call]

    def gather(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """Return the logits of the whole vocabulary.

        Args:
            logits: float32 `[N, rows]`, the logits of the rows of the head that the device holds.
            vocab_size: number of logits to return.
        """
        if self.mesh is None:
            return logits[:, :vocab_size]  # a packed head has whole panels
        return jax.lax.all_gather(logits, _ALL, axis=1, tiled=True)[:, :vocab_size]


ONE_DEVICE = Shards()
"""Shards of a model that one device holds."""


def _axes(size: int, spec: DecoderSpec) -> tuple[int, int]:
    """Return the lengths of the axes of the mesh.

    Raises:
        ConfigError: the heads, KV heads or MLP cannot be divided by the number of devices.
    """
    if reason := indivisible(size, spec):
        sizes = [n for n in range(1, spec.heads[0] + 1) if not indivisible(n, spec)]
        raise ConfigError(f"{reason} tensor_parallel_size={size}; use {one_of(sizes)}")
    kv_heads = min(size, spec.heads[1])
    return kv_heads, size // kv_heads


def one_of(sizes: Sequence[int]) -> str:
    """Return numbers in words, such as `1, 2 or 4`."""
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last


def _take(table: Weight, rows: jax.Array) -> jax.Array:
    """Return rows of a table, float32 `[T, hidden]`."""
    return table.rows(rows) if isinstance(table, Packed) else jnp.take(table, rows, axis=0).astype(jnp.float32)


def _is_table(name: str) -> bool:
    """Return whether axis 0 of a parameter is the vocabulary."""
    return name.split(".")[-2] in ("embed_tokens", "lm_head")


def indivisible(size: int, spec: DecoderSpec) -> str | None:
    """Return what a number of devices cannot divide, as the beginning of a sentence, or None.

    Args:
        size: number of devices.
        spec: shape of the decoder.
    """
    if size > 1 and any(mixer.qk_norm == "whole" for mixer in spec.attention.values()):
        return "norms over all heads cannot be divided by"
    num_heads, num_kv_heads, _ = spec.heads
    columns = {(width, what) for layer in spec.layers for width, what in layer.columns.items()}
    heads = ((num_heads, "attention heads"),) if spec.attention else ()
    keys = () if spec.recurrent is None else ((spec.recurrent.key_heads, "key heads of the recurrent layers"),)
    for number, what in (*heads, *keys, *sorted(columns)):
        if number % size:
            return f"{number} {what} cannot be divided by"
    if num_kv_heads % size and size % num_kv_heads:
        return f"{num_kv_heads} KV heads can be neither divided nor shared equally by"
    return None
