"""`SplitTensors`: checkpoints that store modules as one tensor or under other names, by the names of the decoder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.gguf_spec import GGUFTensors
from chunkattn.models.quantized_folder import QuantizedFolder
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.spec import DecoderSpec
from chunkattn.models.stacked import StackedExperts

Source = SafetensorsFolder | GGUFTensors
"""Tensors of a checkpoint by the names of Hugging Face checkpoints."""


def split_tensors(source: Source, spec: DecoderSpec) -> Source | SplitTensors | StackedExperts:
    """Return the tensors of a checkpoint by the names of the decoder.

    Args:
        source: tensors of the checkpoint.
        spec: shape of the decoder.
    """
    if isinstance(source, SafetensorsFolder) and any(layer.experts is not None for layer in spec.layers):
        return StackedExperts(source, spec)
    return SplitTensors(source, spec) if spec.fused else source


class SplitTensors:
    """Tensors of a checkpoint whose fused modules are split, see `DecoderSpec.fused`.

    Args:
        source: tensors of the checkpoint.
        spec: shape of the decoder.

    Attributes:
        path: the folder or file.
        needs_all: see `SafetensorsFolder`.
    """

    def __init__(self, source: Source, spec: DecoderSpec) -> None:
        self.path: Path = source.path
        self.needs_all, self._source = source.needs_all, source
        self._places: dict[str, tuple[str, int, int]] = {}  # stored tensor, first row and end of each part
        self._rows: dict[str, int] = {}  # rows of all parts of a stored tensor
        self._names = set(source.names())
        for parameter, (rows, *_) in spec.parameters().items():
            module, _, leaf = parameter.rpartition(".")
            name = f"{spec.stored_module(module)}.{leaf}"
            if name != parameter and name in self._names:
                start = self._rows.get(name, 0)
                self._rows[name] = start + rows
                self._places[parameter] = name, start, start + rows
        self._names = (self._names - self._rows.keys()) | self._places.keys()

    def names(self) -> Collection[str]:
        """Return the names of all tensors, those of parts in place of fused ones."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Args:
            name: name of the tensor.

        Raises:
            ModelError: the tensor holds no floating-point numbers, or is fused and has another height than its parts together.
        """
        if name not in self._places:
            return self._source.shape(name)
        stored, start, end = self._places[name]
        rows, *others = self._source.shape(stored)
        if rows != self._rows[stored]:
            raise ModelError(f"{self.path}: tensor {stored!r} has {rows} rows, the configuration says {self._rows[stored]}")
        return (end - start, *others)

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, see `SafetensorsFolder.read`."""
        if name not in self._places:
            return self._source.read(name, dtype, index)
        first, *others = index or (slice(None),)
        stored, rows = self._place(name, first)
        return self._source.read(stored, dtype, (rows, *others))

    def stored_type(self, name: str) -> str:
        """Return the file's name of a tensor's dtype, such as `BF16`."""
        return self._source.stored_type(self._places.get(name, (name,))[0])

    def blocks(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return the blocks of a part of a quantised matrix, see `GGUFTensors.blocks`."""
        assert isinstance(self._source, (GGUFTensors, QuantizedFolder))
        stored, rows = self._place(name, index[0])
        return self._source.blocks(stored, (rows, *index[1:]))

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages, see `GGUFTensors.release`. The parts of a tensor are read one by one."""
        self._source.release(self._places.get(name, (name,))[0])

    def _place(self, name: str, rows: slice) -> tuple[str, slice]:
        """Return the stored tensor that holds some rows of a tensor, and these rows in it."""
        if name not in self._places:
            return name, rows
        stored, start, end = self._places[name]
        first, last, _ = rows.indices(end - start)
        return stored, slice(start + first, start + last)

    def why_missing(self, name: str) -> str:
        """Return why the checkpoint lacks a tensor, see `SafetensorsFolder.why_missing`."""
        return self._source.why_missing(name)
