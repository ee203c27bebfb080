"""`QuantizedFolder`: a folder of quantised matrices, dequantised or repacked one at a time."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.quantized_config import Quantization, quantization_of
from chunkattn.models.quantized_formats import FORMATS, LEAVES, TYPES, Scheme
from chunkattn.models.quantized_matrix import Matrix
from chunkattn.models.safetensors_folder import SafetensorsFolder

logger = logging.getLogger(__name__)

_OF_ACTIVATIONS = {"input_scale", "input_global_scale", "input_zero_point", "activation_scale", "output_scale"}
"""Tensors of a module that say how its input is quantised."""
_OF_CACHE = {f"{name}_{kind}" for name in ("q", "k", "v", "kv") for kind in ("scale", "global_scale", "zero_point")}
"""Tensors of a module that say how K/V and queries are quantised."""
_FLOATS = ("F64", "F32", "BF16", "F16")


def open_folder(folder: Path, stack: ExitStack, *, is_nested: bool = False) -> SafetensorsFolder:
    """Return the tensors of a folder, quantised or not; see `SafetensorsFolder`.

    Args:
        folder: the folder.
        stack: holder of the open files.
        is_nested: whether the decoder is the language part of a multimodal model.

    Raises:
        ModelError: see `SafetensorsFolder` and `QuantizedFolder`.
    """
    quantization = quantization_of(folder)
    if quantization is None:
        return SafetensorsFolder(folder, stack, is_nested=is_nested)
    return QuantizedFolder(folder, stack, quantization, is_nested=is_nested)


class QuantizedFolder(SafetensorsFolder):
    """Tensors of a folder, with each quantised matrix as one tensor `[out, in]`.

    The files decide which modules are quantised, and the configuration how. The scales of all matrices are checked first.
    """

    def __init__(self, folder: Path, stack: ExitStack, quantization: Quantization, *, is_nested: bool = False) -> None:
        """Open the files and find the quantised matrices.

        Args:
            folder: the folder.
            stack: holder of the open files.
            quantization: settings of the matrices.
            is_nested: see `SafetensorsFolder`.

        Raises:
            ModelError: a file is missing or unreadable, or the tensors of a matrix are not those of its format.
        """
        super().__init__(folder, stack, is_nested=is_nested)
        self._matrices: dict[str, Matrix] = {}
        self._quantization = quantization
        of_cache = [name for name in self._stored if name.rpartition(".")[2] in _OF_CACHE]
        for name in of_cache:
            del self._stored[name]
        if of_cache or quantization.has_cache_scheme:
            logger.warning("%s: the checkpoint's scheme and scales of K/V are not used; K/V has the kv_cache_dtype", folder)
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self._stored:
            module, _, leaf = name.rpartition(".")
            modules[module][leaf] = name
        self._parts: dict[str, list[str]] = {}  # tensors of each matrix
        for module, leaves in modules.items():
            plain = "weight" in leaves and super().stored_type(leaves["weight"]) in _FLOATS
            if leaves.keys() & LEAVES or ("weight" in leaves and not plain):
                self._matrices[f"{module}.weight"] = self._matrix(module, leaves)
                self._parts[f"{module}.weight"] = [name for leaf, name in leaves.items() if leaf != "bias"]
        counts = Counter(matrix.scheme.format for matrix in self._matrices.values())
        for form, count in counts.items():
            logger.info("%s: %d matrices of %s, decoded at the load; activations are not quantised", folder, count, form)

    def _matrix(self, module: str, leaves: dict[str, str]) -> Matrix:
        """Return the matrix of a module, and check that the module has no tensor of another format."""
        where = f"{self.path}: module {module!r}"
        scheme = self._scheme(module, where, leaves)
        form = FORMATS[scheme.format]
        if foreign := leaves.keys() - form.leaves - _OF_ACTIVATIONS - {"bias"}:
            raise ModelError(f"{where} has the tensor {min(foreign)!r}, which {scheme.format} does not have; get it again")
        tensors = {leaf: self._view(name) for leaf, name in leaves.items() if leaf in form.leaves}
        return Matrix(scheme, tensors, where)

    def _scheme(self, module: str, where: str, leaves: dict[str, str]) -> Scheme:
        stored = {self._stored[name][1].removesuffix(f".{leaf}") for leaf, name in leaves.items()}
        tail = module.removeprefix("model.")
        names = [*sorted(stored), module, *(f"{prefix}{tail}" for prefix in ("language_model.model.", "model.language_model."))]
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        scheme = self._quantization.scheme_of(dict.fromkeys(names), kind)
        if scheme is None:
            raise ModelError(f"{where} is stored quantised, but quantization_config leaves it out; get the checkpoint again")
        return scheme

    def _view(self, name: str) -> tuple[str, np.ndarray]:
        file, stored_name = self._stored[name]
        kind = super().stored_type(name)
        if kind not in TYPES:
            raise ModelError(f"{self.path}: tensor {stored_name!r} is {kind}, which no supported quantisation has")
        return kind, file.view(stored_name, TYPES[kind])

    def names(self) -> Collection[str]:
        """Return the names of all tensors, those of quantised matrices in place of what they consist of."""
        parts = {part for parts in self._parts.values() for part in parts}
        return (self._stored.keys() - parts) | self._matrices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, see `SafetensorsFolder.shape`."""
        return self._matrices[name].shape if name in self._matrices else super().shape(name)

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, see `SafetensorsFolder.read`. Matrices are decoded in float32 and rounded once."""
        if name not in self._matrices:
            return super().read(name, dtype, index)
        return self._matrices[name].read(dtype, index)

    def stored_type(self, name: str) -> str:
        """Return the packed format that has a matrix's values exactly, or the name of its own format."""
        if (matrix := self._matrices.get(name)) is None:
            return super().stored_type(name)
        return matrix.packed_format or matrix.scheme.format

    def blocks(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return the blocks of a part of a matrix that has a packed format, see `GGUFTensors.blocks`."""
        return self._matrices[name].blocks(index)

    def release(self, name: str) -> None:
        """Give back the memory of the pages of a quantised matrix.

        Args:
            name: name of the tensor.
        """
        for part in self._parts.get(name, ()):
            file, stored_name = self._stored[part]
            file.release(stored_name)
