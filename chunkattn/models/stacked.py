"""`StackedExperts`: the tensors of a layer's experts, however a folder stores them, under the names of the parameters."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.quantized_folder import QuantizedFolder
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.spec import EXPERTS, DecoderSpec

_NUMBERED = re.compile(rf"(.*\.{EXPERTS}\.)(\d+)\.(.*)")
"""Name of a tensor of one expert: parts before and after its number."""
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parts of each stacked tensor of transformers, whose rows follow each other."""


class StackedExperts:
    """Tensors of a folder, with those of the experts of a layer as one tensor `[experts, out, in]`.

    Args:
        source: tensors of the folder.
        spec: shape of the decoder.

    Attributes:
        path: the folder.
        needs_all: see `SafetensorsFolder`.

    Raises:
        ModelError: a layer lacks an expert, or an expert is stored twice.
    """

    def __init__(self, source: SafetensorsFolder, spec: DecoderSpec) -> None:
        self.path: Path = source.path
        self.needs_all, self._source = source.needs_all, source
        self._names = set(source.names())
        self._experts: dict[str, dict[int, str]] = {}  # numbered tensors of each parameter
        self._parts: dict[str, tuple[str, slice]] = {}  # stacked tensor and rows of each parameter
        shapes = spec.parameters()
        for name in source.names():
            if match := _NUMBERED.fullmatch(name):
                self._experts.setdefault(match[1] + match[3], {})[int(match[2])] = name
                self._names.discard(name)
            before, _, module = name.rpartition(".")
            if before.rpartition(".")[2] == EXPERTS and module in _STACKED:
                self._split(name, before, _STACKED[module], shapes)
        for parameter in sorted(self._parts.keys() & self._experts.keys()):
            stacked, numbered = self._parts[parameter][0], next(iter(self._experts[parameter].values()))
            raise ModelError(f"{self.path}: tensors {stacked!r} and {numbered!r} stand for the same parameter; drop one")
        for parameter, experts in self._experts.items():
            if parameter in shapes and (lost := set(range(shapes[parameter][0])) - experts.keys()):
                raise ModelError(
                    f"{self.path}: {parameter!r} has {len(experts)} experts, the configuration says {shapes[parameter][0]}; "
                    f"expert {min(lost)} is missing"
                )
        self._names |= self._experts.keys() | self._parts.keys()

    def _split(self, name: str, before: str, parts: tuple[str, ...], shapes: dict[str, tuple[int, ...]]) -> None:
        """Find the parameters of a stacked tensor."""
        names = [f"{before}.{part}.weight" for part in parts]
        if not all(parameter in shapes for parameter in names):
            return
        heights, stored = [shapes[parameter][1] for parameter in names], self._source.shape(name)
        if len(stored) != 3 or stored[1] != sum(heights):
            raise ModelError(
                f"{self.path}: tensor {name!r} has shape {list(stored)}, the configuration says {sum(heights)} rows for each "
                f"of {shapes[names[0]][0]} experts"
            )
        self._names.discard(name)
        start = 0
        for parameter, height in zip(names, heights, strict=True):
            self._parts[parameter] = name, slice(start, start + height)
            start += height

    def names(self) -> Collection[str]:
        """Return the names of all tensors, stacked ones in place of those that they hold."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Args:
            name: name of the tensor.

        Raises:
            ModelError: the tensor holds no floating-point numbers, or experts of a layer differ in shape.
        """
        if name in self._parts:
            stored, rows = self._parts[name]
            count, _, columns = self._source.shape(stored)
            return count, rows.stop - rows.start, columns
        if name not in self._experts:
            return self._source.shape(name)
        shapes = {self._source.shape(expert): expert for expert in self._experts[name].values()}
        if len(shapes) > 1:
            one, other = list(shapes.values())[:2]
            raise ModelError(f"{self.path}: tensors {one!r} and {other!r} of two experts differ in shape")
        return (len(self._experts[name]), *next(iter(shapes)))

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, see `SafetensorsFolder.read`. Experts are read one at a time."""
        if name not in self._parts and name not in self._experts:
            return self._source.read(name, dtype, index)
        bounds = [part.indices(size) for part, size in zip((*index, *[slice(None)] * 3), self.shape(name), strict=False)]
        which, rows, columns = (slice(first, last) for first, last, _ in bounds)
        out = np.empty([part.stop - part.start for part in (which, rows, columns)], dtype)
        for place, number in zip(out, range(which.start, which.stop), strict=True):
            if name in self._experts:
                place[:] = self._source.read(self._experts[name][number], dtype, (rows, columns))
            else:
                stored, part = self._parts[name]
                held = slice(part.start + rows.start, part.start + rows.stop)
                place[:] = self._source.read(stored, dtype, (slice(number, number + 1), held, columns))[0]
        return out

    def stored_type(self, name: str) -> str:
        """Return the file's name of a tensor's dtype, such as `BF16`."""
        if name in self._experts:
            kinds = {self._source.stored_type(expert) for expert in self._experts[name].values()}
            return kinds.pop() if len(kinds) == 1 else " and ".join(sorted(kinds))
        return self._source.stored_type(self._parts.get(name, (name,))[0])

    def blocks(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return the blocks of a part of a quantised matrix, or of one expert's, see `GGUFTensors.blocks`."""
        assert isinstance(self._source, QuantizedFolder)
        if name not in self._experts:
            return self._source.blocks(name, index)
        which, *part = index
        return self._source.blocks(self._experts[name][which.start], tuple(part))

    def release(self, name: str) -> None:
        """Let go of a tensor's pages, see `SafetensorsFolder.release`."""
        for stored in self._experts[name].values() if name in self._experts else [self._parts.get(name, (name,))[0]]:
            self._source.release(stored)

    def why_missing(self, name: str) -> str:
        """Return why the folder lacks a tensor, see `SafetensorsFolder.why_missing`."""
        return self._source.why_missing(name)
