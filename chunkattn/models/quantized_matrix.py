"""`Matrix`: a quantised matrix of a Hugging Face folder, decoded when it is read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.aligned import aligned_zeros
from chunkattn.models.quantized_formats import E4M3, FORMATS, Read, Scheme, halves, read_awq, read_columns, read_rows

_INTEGERS = ("I32", "I64", "I8", "U8")
_PIECE = 1 << 18
"""Values that are decoded at a time, which fit a processor's cache."""
_MOST_THREADS = 8
"""Pieces that are decoded at once. NumPy lets go of the GIL."""
_BLOCK = 32
"""Values of a block of the packed formats."""
_ACROSS: Mapping[Read, Read] = {read_rows: read_columns, read_columns: read_rows}
"""Readers of zero points whose words lie across those of the codes, by the reader of the codes."""
_SCALE = ("scale", "<f2")
_BLOCKS = {
    "Q8_0": np.dtype([_SCALE, ("codes", "V32")]),
    "Q5_0": np.dtype([_SCALE, ("fifths", "V4"), ("codes", "V16")]),
    "Q4_0": np.dtype([_SCALE, ("codes", "V16")]),
}
"""Blocks of the packed formats as a GGUF file has them."""


class Matrix:
    """A quantised matrix, whose values are decoded when they are read.

    Args:
        scheme: settings of the matrix.
        tensors: views of its tensors and their types in the file, by the last part of their names.
        where: folder and module, for errors.

    Attributes:
        shape: outputs and inputs.
        scheme: settings of the matrix.
        packed_format: packed format whose values are exactly those of the matrix; None for none.

    Raises:
        ModelError: a tensor is missing, of the wrong type or shape, or holds values that no such matrix has.
    """

    def __init__(self, scheme: Scheme, tensors: Mapping[str, tuple[str, np.ndarray]], where: str) -> None:
        self.scheme, self._form, self._where = scheme, FORMATS[scheme.format], where
        form = self._form
        scales = next((name for name in form.scales if name in tensors), form.scales[0])
        others = form.zeros if scheme.has_zeros else None, form.order if scheme.needs_order else None
        for name in (*form.needed, scales, *others):
            if name is not None and name not in tensors:
                raise self._fault(f"tensor {name!r} is missing; the checkpoint is incomplete, get it again")
        self._check_types(tensors, scales)
        self._codes, stored = tensors[form.codes][1], tensors[scales][1]
        if self._codes.ndim != 2 or not self._codes.size:
            raise self._fault(f"{form.codes!r} has shape {[*self._codes.shape]}, which is that of no matrix")
        self.shape = self._find_shape(tensors)
        outputs, inputs = self.shape
        self._rows, self._columns = scheme.block[0] or outputs, scheme.block[1] or inputs
        if scheme.format not in ("FP8", "GPTQ") and inputs % self._columns:  # the last group of these may be smaller
            raise self._fault(f"{inputs} inputs are no multiple of the group of {self._columns}")
        grid = -(-outputs // self._rows), -(-inputs // self._columns)
        stored = self._shaped(scales, stored, grid[::-1] if form.is_transposed else grid)
        stored = stored.view(jnp.float8_e8m0fnu) if stored.dtype == np.uint8 else stored
        self._scales = stored.T if form.is_transposed else stored
        self._factor = self._find_factor(tensors)
        self._stored_zeros = self._find_zeros(tensors, grid)
        zeros = self._zeros()
        self._middle = np.uint8(1 << (scheme.bits - 1))
        self._has_zeros = zeros is not None and bool((zeros != self._middle).any())
        if zeros is not None:
            self._check_zeros(zeros)
        self._order = self._find_order(tensors, grid[1])
        whole = self._scale_of(slice(0, outputs))
        if not np.isfinite(whole).all():
            raise self._fault(f"{scales!r} holds NaN or infinite scales; the file is damaged, get it again")
        self.packed_format = self._find_packed(whole)

    def _fault(self, text: str) -> ModelError:
        return ModelError(f"{self._where}: {text}")

    def _check_types(self, tensors: Mapping[str, tuple[str, np.ndarray]], scales: str) -> None:
        form = self._form
        types: dict[str | None, tuple[str, ...]] = {
            form.codes: (form.code_type,),
            scales: form.scale_types,
            form.zeros: ("I8",) if form.codes == "weight" else ("I32",),
            form.order: ("I32", "I64"),
            form.factor: ("F32",),
            form.divisor: ("F32",),
            form.shape: _INTEGERS,
        }
        if others := tensors.keys() - types.keys():
            raise self._fault(f"{scales!r} and {min(others)!r} stand for the same scales; drop one")
        for name, (kind, _) in tensors.items():
            if kind not in types[name]:
                raise self._fault(f"{name!r} is {kind} instead of {' or '.join(types[name])}")

    def _find_shape(self, tensors: Mapping[str, tuple[str, np.ndarray]]) -> tuple[int, int]:
        """Return the outputs and inputs that the codes have, or that the checkpoint states."""
        form, (first, second) = self._form, self._codes.shape
        count = 8 * self._codes.itemsize // self.scheme.bits
        if form.read is read_awq:
            return second * count, first
        if form.read is read_columns:
            return second, first * count
        if form.shape is None:
            return first, second * count
        stated = tensors[form.shape][1]
        if stated.shape != (2,) or stated[0] != first or -(-int(stated[1]) // count) != second:
            raise self._fault(f"{form.shape!r} is {stated.tolist()}, but {form.codes!r} has shape {[first, second]}")
        return first, int(stated[1])

    def _find_factor(self, tensors: Mapping[str, tuple[str, np.ndarray]]) -> np.ndarray | None:
        name = self._form.factor or self._form.divisor
        if name is None:
            return None
        if (value := tensors[name][1]).size != 1:
            raise self._fault(f"{name!r} has shape {[*value.shape]} instead of one number")
        if not (np.isfinite(value).all() and value.all()):
            raise self._fault(f"{name!r} is {value.item()}; the file is damaged, get it again")
        return value.reshape(1)

    def _find_zeros(self, tensors: Mapping[str, tuple[str, np.ndarray]], grid: tuple[int, int]) -> np.ndarray | None:
        """Return the stored zero points, in the shape that the format has for a grid of blocks; None for none."""
        form = self._form
        if form.zeros is None or form.zeros not in tensors:
            return None
        words = -(-grid[0] // (32 // self.scheme.bits))
        expected = (grid[1], words) if form.is_transposed else grid if form.code_type == "I8" else (words, grid[1])
        return self._shaped(form.zeros, tensors[form.zeros][1], expected)

    def _shaped(self, name: str, stored: np.ndarray, expected: tuple[int, int]) -> np.ndarray:
        """Return a tensor in its shape, of which an axis of length 1 may not be stored."""
        if stored.shape != expected and not (stored.ndim < 2 and stored.size == math.prod(expected) == max(expected)):
            raise self._fault(f"{name!r} has shape {[*stored.shape]} instead of {[*expected]}")
        return stored.reshape(expected)

    def _check_zeros(self, zeros: np.ndarray) -> None:
        top = 1 << self.scheme.bits
        if self.scheme.zero_shift and (zeros == top % 256).any():  # bytes wrap around, and no other one is 0
            raise self._fault(
                f"{self._form.zeros!r} holds zero points of {top}, which packages read in several ways; "
                "quantise the model with checkpoint_format gptq_v2"
            )
        if not self.scheme.has_zeros and self._has_zeros:
            raise self._fault(f"{self._form.zeros!r} holds zero points, but quantization_config says that there are none")

    def _zeros(self) -> np.ndarray | None:
        """Return the codes of the zero points, uint8 `[blocks of outputs, blocks of inputs]`; None for none."""
        form, bits, stored = self._form, self.scheme.bits, self._stored_zeros
        if stored is None:
            return None
        outputs, groups = slice(0, -(-self.shape[0] // self._rows)), slice(0, -(-self.shape[1] // self._columns))
        if (across := _ACROSS.get(form.read)) is not None:
            zeros = self._codes_in(across(stored, bits, groups, outputs)).T
        else:
            zeros = self._codes_in(form.read(stored, bits, outputs, groups))
        return zeros[outputs, groups] + np.uint8(self.scheme.zero_shift)

    def _codes_in(self, packed: np.ndarray) -> np.ndarray:
        """Return the codes that lie in bytes, uint8 `[outputs, inputs]`."""
        return halves(packed) if self.scheme.bits == 4 else packed

    def _find_order(self, tensors: Mapping[str, tuple[str, np.ndarray]], groups: int) -> np.ndarray | None:
        """Return the group of each input; None for groups in order."""
        if (name := self._form.order) is None or name not in tensors:
            return None
        order, inputs = tensors[name][1], self.shape[1]
        if order.shape != (inputs,):
            raise self._fault(f"{name!r} has shape {[*order.shape]} instead of {[inputs]}")
        if np.array_equal(order, np.arange(inputs) // self._columns) or (name == "weight_g_idx" and (order == -1).all()):
            return None
        if order.min() < 0 or order.max() >= groups:
            raise self._fault(f"{name!r} holds groups from {order.min()} to {order.max()}, and there are {groups}")
        if name == "weight_g_idx" and (not self.scheme.needs_order or (np.bincount(order) != self._columns).any()):
            raise self._fault(
                f"{name!r} does not divide the inputs as quantization_config says; the file is damaged, get it again"
            )
        return order

    def _find_packed(self, scales: np.ndarray) -> str | None:
        """Return the packed format that has the matrix's values exactly."""
        if self._form.values is not None or self._order is not None or self.shape[1] % _BLOCK:
            return None
        if self._columns % _BLOCK and self._columns != self.shape[1]:
            return None
        with np.errstate(over="ignore"):
            if not np.array_equal(scales.astype(np.float16), scales):
                return None
        if self._has_zeros:
            return "Q5_0" if self.scheme.bits == 4 else None
        return "Q8_0" if self.scheme.bits == 8 else "Q4_0"

    def _scale_of(self, rows: slice) -> np.ndarray:
        """Return the scales of outputs, float32 `[outputs or 1, blocks of inputs]`."""
        part = self._of_rows(self._scales, rows)
        scales = E4M3.take(part.view(np.uint8)) if part.dtype == jnp.float8_e4m3fn else part.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._factor is not None:
                scales = scales / self._factor if self._form.divisor else scales * self._factor
        return scales

    def _of_rows(self, blocks: np.ndarray, rows: slice) -> np.ndarray:
        """Return the blocks of outputs, `[outputs or 1, blocks of inputs]`."""
        if len(blocks) == 1 or self._rows == 1:
            return blocks[:1] if len(blocks) == 1 else blocks[rows]
        return blocks[np.arange(rows.start, rows.stop) // self._rows]

    def _paired(self, values: np.ndarray, blocks: np.ndarray, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return a view of contiguous values, and their blocks in a shape that broadcasts to it."""
        start, stop, size = columns.start, columns.stop, self._columns
        if blocks.shape[1] == 1:
            return values, blocks
        if self._order is None and not (start % size or stop % size):
            return values.reshape(len(values), (stop - start) // size, size), blocks[:, start // size : stop // size, None]
        order = np.arange(start, stop) // size if self._order is None else self._order[columns]
        return values, blocks.take(order, axis=1)

    def _bounds(self, index: tuple[slice, ...]) -> tuple[slice, slice]:
        """Return the rows and columns of an index."""
        parts = (part.indices(size) for part, size in zip((*index, slice(None), slice(None)), self.shape, strict=False))
        rows, columns = (slice(first, max(first, last)) for first, last, _ in parts)
        return rows, columns

    def _in_pieces(self, work: Callable[[slice, np.ndarray], None], rows: slice, width: int, out: np.ndarray) -> None:
        """Call a function with the outputs of each piece and their part of the result, on several threads."""
        step = max(8, _PIECE // max(1, width) // 8 * 8)
        step = -(-step // self._rows) * self._rows if self._rows <= step else step
        pieces = [slice(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step)]
        parts = [out[piece.start - rows.start : piece.stop - rows.start] for piece in pieces]
        if len(pieces) == 1:
            work(pieces[0], parts[0])
        else:
            with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
                [*threads.map(work, pieces, parts)]

    def read(self, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return values, decoded in float32 and rounded once, piece by piece.

        Args:
            dtype: dtype of the returned array.
            index: rows and columns.
        """
        rows, columns = self._bounds(index)
        out = aligned_zeros((rows.stop - rows.start, columns.stop - columns.start), dtype)
        zeros = self._zeros() if self._has_zeros else None

        def decode(piece: slice, part: np.ndarray) -> None:
            values = self._unscaled(piece, columns, zeros)
            view, scales = self._paired(values, self._scale_of(piece), columns)
            with np.errstate(over="ignore", invalid="ignore"):
                view *= scales
                part[:] = values

        self._in_pieces(decode, rows, columns.stop - columns.start, out)
        return out

    def _unscaled(self, rows: slice, columns: slice, zeros: np.ndarray | None) -> np.ndarray:
        """Return values before they are scaled, float32 `[rows, columns]`, in an array of their own."""
        first = columns.start // 8 * 8
        packed = self._form.read(self._codes, self.scheme.bits, rows, slice(first, columns.stop))
        part = slice(columns.start - first, columns.stop - first)
        if self._form.values is not None:
            return np.ascontiguousarray(self._form.values.take(packed).view(np.float32)[:, part])
        codes = self._codes_in(packed)[:, part]
        if zeros is None:
            return (codes - self._middle).view(np.int8).astype(np.float32)
        view, spread = self._paired(codes, self._of_rows(zeros, rows), columns)
        narrow = (view - spread).view(np.int8) if self.scheme.bits == 4 else view.astype(np.int16) - spread
        return narrow.astype(np.float32).reshape(codes.shape)

    def blocks(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return blocks of `packed_format` as a GGUF file has them, uint8 `[rows, bytes]`.

        Args:
            index: rows and columns, whole blocks.
        """
        rows, columns = self._bounds(index)
        assert self.packed_format is not None
        starts = np.arange(columns.start, columns.stop, _BLOCK) // self._columns
        out = np.empty((rows.stop - rows.start, len(starts)), _BLOCKS[self.packed_format])
        zeros = self._zeros() if self._has_zeros else None

        def write(piece: slice, blocks: np.ndarray) -> None:
            blocks["scale"] = self._scale_of(piece).astype(np.float16)[:, starts]
            codes = self._codes_in(self._form.read(self._codes, self.scheme.bits, piece, columns))
            if self.scheme.bits == 8:
                blocks["codes"] = (codes ^ self._middle).view("V32")
                return
            if zeros is not None:
                view, spread = self._paired(codes, 16 - self._of_rows(zeros, piece), columns)
                codes = (view + spread).reshape(codes.shape)
                blocks["fifths"] = np.packbits(codes >> 4, axis=1, bitorder="little").view("V4")
                codes &= 15
            quarters = codes.view(np.uint64).reshape(-1, 4)
            pairs = np.empty((len(quarters), 2), np.uint64)
            for half in (0, 1):
                pairs[:, half] = quarters[:, half] | quarters[:, half + 2] << np.uint64(4)
            blocks["codes"] = pairs.view("V16").reshape(blocks.shape)

        self._in_pieces(write, rows, columns.stop - columns.start, out)
        return out.view(np.uint8)
