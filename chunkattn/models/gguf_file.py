"""GGUF files: their metadata, and their tensors, dequantised one at a time.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.gguf_names import GGUF_SUFFIX, SHARD, example_quant, gguf_models
from chunkattn.local_files import pointer_of_lfs
from chunkattn.models.gguf_metadata import VERSIONS, GGUFMetadata, StoredArray, StoredTensor

_EVERY = slice(None)
_PIECE = 1 << 22
"""Elements that are dequantised at a time: 16 MiB of float32."""


def find_gguf(folder: Path) -> Path | None:
    """Return the one GGUF model of a folder, the first file of a sharded model, or None if the folder has none.

    Args:
        folder: local folder.

    Raises:
        ModelError: the folder has several models.
    """
    models = gguf_models(file.name for file in folder.glob(f"*{GGUF_SUFFIX}"))
    if len(models) > 1:
        names = [files[0] for files in models.values()]
        quant = example_quant(names)
        how = "" if quant is None else f", or the folder with a quantisation, such as '{folder}:{quant}'"
        raise ModelError(f"{folder} holds {len(models)} GGUF models ({', '.join(names)}); pass the path of one file{how}")
    return next((folder / files[0] for files in models.values()), None)


@dataclass(frozen=True)
class GGUFFile:
    """GGUF model with its metadata and tensors. Arrays and tensors stay in the file until they are read.

    Attributes:
        path: local path of the file, or of the first shard.
        metadata: metadata of the first shard.
        tensors: tensors by GGUF name, those of all shards.
    """

    path: Path
    metadata: GGUFMetadata
    tensors: dict[str, StoredTensor]

    def fault(self, text: str) -> ModelError:
        """Return the error for a fault of the file."""
        return ModelError(f"{self.path}: {text}")

    def damaged(self, text: str) -> ModelError:
        """Return the error for a fault that a whole file of a recent llama.cpp has not."""
        return self.fault(f"{text}; the file is damaged or incomplete: get it again, or convert the model anew with llama.cpp")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value of the metadata, or `default` if the file has none.

        Args:
            key: name of the key; one that begins with a dot is of the file's architecture.
            kind: type, or types, that the value must have. An array is a list of strings, integers, floats or bools.
            default: value of a missing key.

        Raises:
            ModelError: the value has another type, or is damaged.
        """
        key = self.full(key)
        if key not in self.metadata.values:
            return default
        value = self.metadata.values[key]
        if isinstance(value, StoredArray):
            try:
                value = self.metadata.elements(value)
            except ValueError as error:
                raise self.damaged(f"the metadata {key!r} cannot be read ({error})") from error
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.damaged(f"the metadata {key!r} has the wrong type, {type(value).__name__}")
        return value

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """Return an array of the metadata, or None if the file has none.

        Args:
            key: see `get`.
            kind: type that every element must have; bools are no integers, and integers are floats.
            length: number of elements that an array with elements must have; None for any.

        Raises:
            ModelError: the value is no array, its elements have another type or another number, or it is damaged.
        """
        values = self.get(key, list)
        # The elements of an array have one type.
        if values and (type(values[0]), kind) not in ((kind, kind), (int, float)):
            raise self.fault(f"the metadata {key!r} must hold {kind.__name__}, not {type(values[0]).__name__}")
        if values and length not in (None, len(values)):
            raise self.damaged(f"{key} has {len(values)} entries for {length} tokens")
        return values

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a value of the metadata that the file must have; see `get`.

        Args:
            key: see `get`.
            kind: type, or types, that the value must have.

        Raises:
            ModelError: the key is missing, or its value has another type.
        """
        if self.full(key) not in self.metadata.values:
            raise self.damaged(f"the metadata {self.full(key)!r} is missing")
        return self.get(key, kind)

    def full(self, key: str) -> str:
        """Return the full name of a key, see `get`."""
        return f"{self.need('general.architecture', str)}{key}" if key.startswith(".") else key

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, the outermost axis first.

        Args:
            name: GGUF name of the tensor.
        """
        return self.tensors[name].shape

    def read(self, name: str, dtype: np.dtype, rows: np.ndarray | slice = _EVERY, columns: slice = _EVERY) -> np.ndarray:
        """Return a tensor or a part of it, dequantised and cast piece by piece. The rows of stacked matrices are those of all.

        Args:
            name: GGUF name of the tensor.
            dtype: dtype of the returned array.
            rows: stored row of each returned row, int `[out]` or a slice.
            columns: columns of a matrix to return. Only the blocks that hold them are dequantised.

        Raises:
            ModelError: the tensor's type cannot be dequantised, or the tensor holds infinite values or NaN.
        """
        from gguf.quants import dequantize

        stored = _matrix(self.tensors[name])
        shape = stored.shape
        places = np.arange(shape[0])[rows] if isinstance(rows, slice) else rows
        held, cut = _blocks(stored, columns) if len(shape) > 1 else ((), ())
        width = len(range(*columns.indices(shape[1]))) if len(shape) > 1 else 1
        out = np.empty((len(places), *[width] * (len(shape) > 1)), dtype)
        step = max(1, _PIECE // max(1, math.prod(shape[1:])))
        for start in range(0, len(places), step):
            piece = slice(start, start + step)
            data = np.asarray(stored.data[(_run(places[piece]), *held)])
            try:
                with np.errstate(all="ignore"):
                    values = dequantize(data, stored.tensor_type)
            except NotImplementedError:
                raise self.fault(
                    f"tensor {name!r} has type {stored.tensor_type.name}, which the gguf package cannot "
                    "dequantise; use a file of another quantisation, such as Q8_0 or Q4_K_M"
                ) from None
            if not np.isfinite(values).all():
                raise self.damaged(f"tensor {name!r} holds NaN or infinite values")
            out[piece] = values[(slice(None), *cut)]
        return out

    def blocks(self, name: str, rows: np.ndarray | slice, columns: slice) -> np.ndarray:
        """Return blocks of a quantised matrix, uint8 `[rows, bytes]`; a view of the file if the rows are neighbours.

        Args:
            name: GGUF name of the tensor.
            rows: stored row of each returned row, int `[out]` or a slice.
            columns: columns, whole blocks.
        """
        stored = _matrix(self.tensors[name])
        places = np.arange(stored.shape[0])[rows] if isinstance(rows, slice) else rows
        held, _ = _blocks(stored, columns)
        return np.asarray(stored.data[(_run(places), *held)])


def _matrix(stored: StoredTensor) -> StoredTensor:
    """Return a tensor of more than two axes as a matrix, whose rows are those of all its matrices."""
    if len(stored.shape) < 3:
        return stored
    *outer, columns = stored.shape
    rows = math.prod(outer)
    return stored._replace(shape=(rows, columns), data=stored.data.reshape(rows, -1))


def _run(places: np.ndarray) -> np.ndarray | slice:
    """Return ascending neighbours as a slice, which copies nothing out of the file; other indices as they are."""
    is_run = len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places)))
    return slice(int(places[0]), int(places[0]) + len(places)) if is_run else places


def _blocks(stored: StoredTensor, columns: slice) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the stored elements or bytes of a row that hold some columns, and the place of the columns among their values."""
    from gguf import GGML_QUANT_SIZES

    if columns == _EVERY:
        return (), ()
    first, last, _ = columns.indices(stored.shape[1])
    block, size = GGML_QUANT_SIZES[stored.tensor_type] if stored.data.dtype == np.uint8 else (1, 1)
    begin, end = first // block, -(-last // block)
    return (slice(begin * size, end * size),), (slice(first - begin * block, last - begin * block),)


def open_gguf(path: Path) -> GGUFFile:
    """Read the metadata and the table of tensors of a GGUF model, those of all shards for a sharded one.

    Args:
        path: local path of the file, or of the first shard.

    Raises:
        ModelError: a file is missing, damaged, truncated, or no GGUF file.
    """
    shard = SHARD.search(path.name)
    if shard is not None and int(shard[1]) != 1:
        first = SHARD.sub(f"-00001-of-{shard[2]}.gguf", path.name)
        raise ModelError(f"{path} is shard {int(shard[1])} of {int(shard[2])}; pass the first shard, {first}")
    metadata = _read(path)
    whole = GGUFFile(path, metadata, dict(metadata.tensors))
    count = whole.get("split.count", int, 1)
    if count > 1:
        if shard is None or int(shard[2]) != count:
            raise ModelError(f"{path} is the first of {count} shards, so its name must end in -00001-of-{count:05}.gguf")
        for number in range(2, count + 1):
            other = path.with_name(SHARD.sub(f"-{number:05}-of-{count:05}.gguf", path.name))
            if not other.is_file():
                raise ModelError(f"shard {other} is missing; put all {count} shards into one folder")
            whole.tensors.update(_read(other).tensors)
    return whole


def _read(path: Path) -> GGUFMetadata:
    try:
        with path.open("rb") as file:
            head = file.read(8)
        if head[:4] != b"GGUF":
            reason = pointer_of_lfs(path) or f"it begins with {head[:4]!r} instead of b'GGUF'; get it again"
            raise ModelError(f"{path} is no GGUF file: {reason}")
        version = int.from_bytes(head[4:], "little")
        if len(head) == 8 and version not in VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} is not supported, only little-endian files of version 2 or 3 are")
        return GGUFMetadata(path)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as GGUF ({error}); the file is truncated, damaged, or newer than the installed gguf "
            "package: get it again, or update gguf"
        ) from error
