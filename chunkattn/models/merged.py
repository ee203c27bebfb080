"""`MergedTensors`: tensors of a checkpoint with an adapter added to them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np

from chunkattn.backends.cpu.packed import FORMATS
from chunkattn.models.adapters import Adapter
from chunkattn.models.fused import Source, SplitTensors
from chunkattn.models.spec import EMBEDDING, HEAD
from chunkattn.models.stacked import StackedExperts

logger = logging.getLogger(__name__)

_PIECE = 1 << 22
"""Elements of a matrix that are added up at a time."""


class MergedTensors:
    """Tensors of a checkpoint, those that an adapter touches with its products added in float32.

    Args:
        source: tensors of the checkpoint, by the names of the decoder.
        adapter: the adapter.

    Attributes:
        path: folder or file of the checkpoint.
        needs_all: see `SafetensorsFolder`.
    """

    def __init__(self, source: Source | SplitTensors | StackedExperts, adapter: Adapter) -> None:
        self.path: Path = source.path
        self.needs_all, self.base, self._adapter = source.needs_all, source, adapter
        self._touched = adapter.touched
        names = [name for name in self._touched if name in source.names()]
        packed = sum(source.stored_type(name) in FORMATS for name in names)
        logger.info("adapter %s: merged into %d matrices%s", adapter.path, len(self._touched), _of_blocks(packed))

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return {*self.base.names(), *({HEAD} & self._touched)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, see `SafetensorsFolder.shape`."""
        head = self._adapter.heads.get(name)
        return self.base.shape(self._stored(name)) if head is None else head.shape

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, rounded once, see `SafetensorsFolder.read`."""
        if name not in self._touched:
            return self.base.read(name, dtype, index)
        with np.errstate(over="ignore", invalid="ignore"):
            if (head := self._adapter.heads.get(name)) is not None:
                return np.asarray(head[index], dtype)
            bounds = zip((*index, *[slice(None)] * 3), self.shape(name), strict=False)
            *experts, rows, columns = (range(*part.indices(size)) for part, size in bounds)
            out = np.empty([len(part) for part in (*experts, rows, columns)], dtype)
            for place, number in zip(out, *experts, strict=True) if experts else [(out, None)]:
                self._add(place, name, number, rows, columns)
            return out

    def _add(self, out: np.ndarray, name: str, number: int | None, rows: range, columns: range) -> None:
        """Write rows and columns of a matrix, some rows at a time."""
        step, inner = max(1, _PIECE // max(len(columns), 1)), slice(columns.start, columns.stop)
        delta = self._adapter.deltas.get((name, number))
        which = () if number is None else (slice(number, number + 1),)
        for first in range(rows.start, rows.stop, step):
            outer = slice(first, min(first + step, rows.stop))
            values = self.base.read(self._stored(name), np.dtype(np.float32), (*which, outer, inner)).reshape(-1, len(columns))
            if delta is not None:
                values = values + delta.part(outer, inner)
            out[first - rows.start : outer.stop - rows.start] = values

    def _stored(self, name: str) -> str:
        """Return the checkpoint's tensor of a name: the embedding for a head that is not stored."""
        return EMBEDDING if name == HEAD and HEAD not in self.base.names() else name

    def stored_type(self, name: str) -> str:
        """Return the file's name of a tensor's dtype; `F32` for a sum."""
        return "F32" if name in self._touched else self.base.stored_type(name)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages, see `GGUFTensors.release`."""
        self.base.release(self._stored(name))

    def why_missing(self, name: str) -> str:
        """Return why the checkpoint lacks a tensor, see `SafetensorsFolder.why_missing`."""
        return self.base.why_missing(name)


def _of_blocks(count: int) -> str:
    return f"; {count} of them are blocks in the file and are dequantised" if count else ""
