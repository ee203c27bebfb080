"""`read_torch`: the plain values and tensors of a file of `torch.save`, without PyTorch and without running what it holds."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from chunkattn.errors import ModelError
from chunkattn.local_files import cause_of

_MAX_BYTES = 1 << 30
"""Largest size of all tensors of a file."""
_DTYPES: dict[str, Any] = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "BoolStorage": np.bool_,
}
"""Storage classes of PyTorch with their dtypes."""


def read_torch(file: Path) -> Any:
    """Return the value of a file of `torch.save`; tensors become NumPy arrays.

    Only plain values, dicts, lists and tensors are read: the unpickler knows no other class, and calls nothing of the file's.

    Args:
        file: file in the zip format of PyTorch 1.6 and later.

    Raises:
        ModelError: the file is no such file, is damaged or too large, or holds another class.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_BYTES:
                raise ModelError(f"{file} is larger than {_MAX_BYTES >> 20} MiB, too large for a head")
            name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if name is None:
                raise ModelError(f"{file} is no file of torch.save: it has no data.pkl")
            folder = name.removesuffix("data.pkl")
            if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
                raise ModelError(f"{file} holds big-endian tensors, which are not read")
            with archive.open(name) as opened:
                return _Unpickler(opened, archive, f"{folder}data/").load()
    except ModelError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ModelError(f"{file} cannot be read: {cause_of(file, error)}; get it again, or save it as safetensors") from None


class _Unpickler(pickle.Unpickler):
    """Unpickler of plain values and tensors.

    Args:
        opened: the pickle.
        archive: zip archive with the storages.
        folder: folder of the storages.
    """

    def __init__(self, opened: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(opened)
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a known class.

        Raises:
            ModelError: the class is not known.
        """
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _DTYPES:
            return np.dtype(_DTYPES[name])
        raise ModelError(f"the file holds {module}.{name}, and only plain values and tensors are read")

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Return the storage that a tensor names."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not str(key).isalnum():
            raise ModelError(f"the file holds a {kind!r}, and only storages are read")
        return np.frombuffer(self._archive.read(f"{self._folder}{key}"), dtype)[:count]


def _tensor(storage: np.ndarray, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
    """Return a tensor over a storage. Only contiguous tensors lie within it for certain."""
    contiguous = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    sizes = zip(shape, stride, contiguous, strict=True)
    if min((offset, *shape), default=0) < 0 or any(size > 1 and step != own for size, step, own in sizes):
        raise ModelError("the file holds a tensor that is not contiguous; save it as safetensors")
    part = storage[offset : offset + math.prod(shape)]
    return part.reshape(shape).copy()
