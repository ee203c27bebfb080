"""`SplitTensors`: checkpoints that store modules as one tensor or under other names, by the names of the decoder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.gguf_tensors import GGUFTensors
from chunkattn.models.mixers import CONVOLUTIONS
from chunkattn.models.quantized_folder import QuantizedFolder
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.spec import DecoderSpec
from chunkattn.models.stacked import StackedExperts
from chunkattn.models.stored_rows import stored_rows

Source = SafetensorsFolder | GGUFTensors
"""Tensors of a checkpoint by the names of Hugging Face checkpoints."""


def split_tensors(source: Source, spec: DecoderSpec) -> Source | SplitTensors | StackedExperts:
    """Return the tensors of a checkpoint by the names of the decoder.

    Args:
        source: tensors of the checkpoint.
        spec: shape of the decoder.
    """
    stacked: Source | StackedExperts = source
    if isinstance(source, SafetensorsFolder) and any(layer.experts is not None for layer in spec.layers):
        stacked = StackedExperts(source, spec)
    return SplitTensors(stacked, spec) if spec.fused else stacked


class SplitTensors:
    """Tensors of a checkpoint whose fused modules are split, see `DecoderSpec.fused`.

    Args:
        source: tensors of the checkpoint.
        spec: shape of the decoder.

    Attributes:
        path: the folder or file.
        needs_all: see `SafetensorsFolder`.
    """

    def __init__(self, source: Source | StackedExperts, spec: DecoderSpec) -> None:
        self.path: Path = source.path
        self.needs_all, self._source = source.needs_all, source
        names = set(source.names())
        self._places = {
            parameter: rows for parameter, rows in stored_rows(spec).items() if rows.name != parameter and rows.name in names
        }
        self._names = (names - {rows.name for rows in self._places.values()}) | self._places.keys()

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
        part = self._places[name]
        rows, *others = self._source.shape(part.name)
        if rows != part.stored:
            raise ModelError(f"{self.path}: tensor {part.name!r} has {rows} rows, the configuration says {part.stored}")
        if name.endswith(CONVOLUTIONS) and len(others) > 1 and others[0] == 1:  # a channel reads itself alone
            others = others[1:]
        return (part.turns * part.count, *others)

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, see `SafetensorsFolder.read`."""
        if name not in self._places:
            return self._source.read(name, dtype, index)
        part, (first, *others) = self._places[name], index or (slice(None),)
        if len(self._source.shape(part.name)) > len(self.shape(name)):
            others = [slice(None), *others]
        pieces = [self._source.read(part.name, dtype, (rows, *others)) for rows in part.slices(first)]
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return values.reshape(len(values), -1) if name.endswith(CONVOLUTIONS) else values

    def stored_type(self, name: str) -> str:
        """Return the file's name of a tensor's dtype, such as `BF16`."""
        return self._source.stored_type(self._stored(name))

    def blocks(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return the blocks of a part of a quantised matrix, see `GGUFTensors.blocks`."""
        assert isinstance(self._source, (GGUFTensors, QuantizedFolder, StackedExperts))
        if name not in self._places:
            return self._source.blocks(name, index)
        part = self._places[name]
        pieces = [self._source.blocks(part.name, (rows, *index[1:])) for rows in part.slices(index[0])]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages, see `GGUFTensors.release`. The parts of a tensor are read one by one."""
        self._source.release(self._stored(name))

    def _stored(self, name: str) -> str:
        """Return the stored tensor that holds a tensor."""
        return self._places[name].name if name in self._places else name

    def why_missing(self, name: str) -> str:
        """Return why the checkpoint lacks a tensor, see `SafetensorsFolder.why_missing`."""
        return self._source.why_missing(name)
