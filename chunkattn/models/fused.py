"""`SplitTensors`: checkpoints that store projections of one input as one tensor, under the names of the single projections."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.spec import DecoderSpec

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parts of each fused module, whose rows follow each other."""


class SplitTensors:
    """Tensors of a folder whose fused projections are split.

    Args:
        source: tensors of the folder.
        spec: shape of the decoder.

    Attributes:
        path: the folder.
        needs_all: see `SafetensorsFolder`.
    """

    def __init__(self, source: SafetensorsFolder, spec: DecoderSpec) -> None:
        self.path: Path = source.path
        self.needs_all, self._source = source.needs_all, source
        self._places: dict[str, tuple[str, int, int]] = {}  # stored tensor, first row and end of each part
        self._names, shapes = set(source.names()), spec.parameters()
        for name in source.names():
            before, _, rest = name.rpartition(".")[0].rpartition(".")
            start = 0
            for part in _FUSED.get(rest, ()):
                leaf = name.rpartition(".")[2]
                parameter = f"{before}.{part}.{leaf}"
                if parameter in shapes:
                    end = start + shapes[parameter][0]
                    self._places[parameter] = name, start, end
                    start = end
            if start:
                self._names.discard(name)
        self._rows = {name: end for name, _, end in self._places.values()}  # the last part of a tensor comes last
        self._names |= self._places.keys()

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
        """Return a tensor or a part of it, see `SafetensorsFolder.read`.

        Args:
            name: name of the tensor.
            dtype: dtype of the returned array.
            index: slices of the first axes.
        """
        if name not in self._places:
            return self._source.read(name, dtype, index)
        stored, start, end = self._places[name]
        rows, *others = index or (slice(None),)
        first, last, _ = rows.indices(end - start)
        return self._source.read(stored, dtype, (slice(start + first, start + last), *others))

    def stored_type(self, name: str) -> str:
        """Return the file's name of a tensor's dtype, such as `BF16`."""
        return self._source.stored_type(self._places.get(name, (name,))[0])

    def release(self, name: str) -> None:
        """Let go of a tensor's pages, see `SafetensorsFolder.release`."""

    def why_missing(self, name: str) -> str:
        """Return why the folder lacks a tensor, see `SafetensorsFolder.why_missing`."""
        return self._source.why_missing(name)
