"""`GGUFMetadata`: keys and table of tensors of one GGUF file, over a memory map.

Arrays stay in the file until they are asked for, so the metadata of a large vocabulary cost no memory. Every length is compared
with the bytes left in the file before anything is allocated.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

VERSIONS = (2, 3)
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
"""NumPy's name of each type of number in the metadata."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_AXES = 4
_ALIGNMENT = 32
"""Alignment of tensors in a file without `general.alignment`."""


class StoredTensor(NamedTuple):
    """Tensor of a GGUF file.

    Attributes:
        tensor_type: type of its elements or blocks.
        shape: its shape, the outermost axis first.
        data: its rows: numbers, or uint8 blocks. They stay in the file until they are read.
        file: map of the file.
        start: offset of `data` in the file.
    """

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray
    file: mmap.mmap
    start: int

    def release(self) -> None:
        """Let the system take back the memory of the file's pages that were read. A later read brings them again."""
        first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self.file, "madvise") and self.data.nbytes:
            self.file.madvise(mmap.MADV_DONTNEED, first, self.start + self.data.nbytes - first)


class StoredArray(NamedTuple):
    """Array of the metadata that lies in the file.

    Attributes:
        kind: type of its elements.
        length: number of its elements.
        start: offset of its first element.
    """

    kind: int
    length: int
    start: int


class GGUFMetadata:
    """Metadata of one file.

    Attributes:
        values: values by key; arrays as `StoredArray`.
        tensors: tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Read the keys and the table of tensors.

        Args:
            path: file that begins with `GGUF` and a version in `VERSIONS`.

        Raises:
            ValueError: the file is damaged or truncated.
            OSError: the file cannot be read.
        """
        with path.open("rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._file)
        self._at = 8
        self.values: dict[str, Any] = {}
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        for _ in range(num_keys):
            key = self._text()
            if key in self.values:
                raise ValueError(f"the key {key!r} is there twice")
            self.values[key] = self._value(self._number("<I"))
        table = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.values.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, got {alignment!r}")
        self._at = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(shape, kind, offset) for name, shape, kind, offset in table}
        if len(self.tensors) < len(table):
            raise ValueError("two tensors have one name")

    def elements(self, array: StoredArray) -> list[Any]:
        """Return the elements of an array.

        Raises:
            ValueError: a string is not UTF-8.
        """
        if array.kind != _STRING and array.length:
            return np.frombuffer(self._bytes, _dtype(array.kind), array.length, array.start).tolist()
        texts, at, data, unpack = [], array.start, self._bytes, struct.Struct("<Q").unpack_from
        for _ in range(array.length):
            end = at + 8 + unpack(data, at)[0]
            texts.append(str(data[at + 8 : end], "utf-8"))
            at = end
        return texts

    def _take(self, size: int) -> int:
        """Step over some bytes of the file, and return where they begin."""
        start = self._at
        if size > len(self._bytes) - start:
            raise ValueError(f"bytes {start} to {start + size} of a file of {len(self._bytes)} bytes")
        self._at += size
        return start

    def _number(self, kind: str) -> Any:
        return struct.unpack_from(kind, self._bytes, self._take(struct.calcsize(kind)))[0]

    def _text(self) -> str:
        size = self._number("<Q")
        start = self._take(size)
        return str(self._bytes[start : start + size], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            dtype = _dtype(kind)
            return np.frombuffer(self._bytes, dtype, 1, self._take(dtype.itemsize))[0].item()
        kind, count = self._number("<I"), self._number("<Q")
        array = StoredArray(kind, count, self._at)
        if kind == _ARRAY:
            raise ValueError("arrays of arrays are not supported")
        if kind != _STRING:
            self._take(_dtype(kind).itemsize * count)
            return array
        if 8 * count > len(self._bytes) - self._at:
            raise ValueError(f"an array of {count} strings in a file of {len(self._bytes)} bytes")
        at, end, data, unpack = self._at, len(self._bytes) - 8, self._bytes, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                raise ValueError(f"a string at byte {at} of a file of {len(self._bytes)} bytes")
            at += 8 + unpack(data, at)[0]
        self._take(at - self._at)
        return array

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type and offset of the next tensor in the table."""
        name, axes = self._text(), self._number("<I")
        if not 1 <= axes <= _MAX_AXES:
            raise ValueError(f"tensor {name!r} has {axes} axes instead of 1 to {_MAX_AXES}")
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _tensor(self, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        plain = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
        tensor_type = GGMLQuantizationType(kind)
        dtype = np.dtype(plain.get(tensor_type.name, "u1"))
        stored = shape if tensor_type.name in plain else quant_shape_to_byte_shape(shape, tensor_type)
        block, size = GGML_QUANT_SIZES[tensor_type]
        count = math.prod(stored)
        if count * dtype.itemsize != math.prod(shape) * size // block:
            raise ValueError(f"a tensor of shape {list(shape)} is not stored as {tensor_type.name}")
        begin, end = self._at + offset, self._at + offset + count * dtype.itemsize
        if end > len(self._bytes):
            raise ValueError(f"a tensor at bytes {begin} to {end} of a file of {len(self._bytes)} bytes")
        data = np.frombuffer(self._bytes, dtype, count, begin).reshape(stored)
        return StoredTensor(tensor_type, shape, data, self._file, begin)


def _dtype(kind: int) -> np.dtype:
    name = "?" if kind == _BOOL else _NUMBERS.get(kind)
    if name is None:
        raise ValueError(f"there is no type {kind} of metadata")
    return np.dtype(name)
