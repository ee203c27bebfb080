"""Formats of quantised matrices in Hugging Face folders: the tensors that each format stores, and the decoder.

A value is `(code - zero point) * scale`. Outputs and inputs are in blocks of one scale each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from chunkattn.errors import ModelError

TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""NumPy's type of each type of a safetensors file that a format stores."""
_NUMBERS = ("F32", "BF16", "F16")
_INTEGERS = ("I32", "I64", "I8", "U8")
_PIECE = 1 << 21
"""Values that are decoded at a time."""
_BLOCK = 32
"""Values of a block of Q8_0, Q5_0 and Q4_0."""
_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_FP4 = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)
"""Values of the low and of the high half of a byte."""
_FP8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place of each of 8 neighbours in a word of AWQ's GEMM kernel."""


@dataclass(frozen=True)
class Scheme:
    """Settings of a quantised matrix.

    Attributes:
        format: key of `FORMATS`.
        bits: bits of a code.
        block: outputs and inputs that share a scale; None for all.
        has_zeros: whether the matrix has zero points.
        zero_shift: number to add to stored zero points.
        needs_order: whether the inputs' groups must be stored one by one.
    """

    format: str
    bits: int
    block: tuple[int | None, int | None]
    has_zeros: bool = False
    zero_shift: int = 0
    needs_order: bool = False


Unpack = Callable[[np.ndarray, int, slice, slice], np.ndarray]
"""Returns the codes of outputs and inputs `[outputs, inputs]` from the stored codes and their bits."""


@dataclass(frozen=True)
class Format:
    """Tensors of a quantised matrix, by the last part of their names.

    Attributes:
        codes: name of the codes.
        code_type: their type.
        unpack: their decoder.
        scales: names of the scales, of which one is stored.
        scale_types: their types.
        is_transposed: whether inputs come before outputs.
        zeros: name of the zero points; None for a format without.
        order: name of the groups of the inputs; None for inputs in order.
        factor: name of a factor of all scales.
        divisor: name of a divisor of all scales.
        shape: name of the shape `[outputs, inputs]`, where the codes do not tell.
    """

    codes: str
    code_type: str
    unpack: Unpack
    scales: tuple[str, ...] = ("weight_scale",)
    scale_types: tuple[str, ...] = _NUMBERS
    is_transposed: bool = False
    zeros: str | None = None
    order: str | None = None
    factor: str | None = None
    divisor: str | None = None
    shape: str | None = None

    @property
    def needed(self) -> list[str]:
        """Return the names of the tensors that every matrix has beside its scales."""
        return [name for name in (self.codes, self.factor, self.divisor, self.shape) if name is not None]

    @property
    def leaves(self) -> set[str]:
        """Return the names of all tensors."""
        return {*self.needed, *self.scales, *(name for name in (self.zeros, self.order) if name is not None)}


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the halves of bytes, uint8 `[..., 2 * bytes]`, the low one first."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(*packed.shape[:-1], -1)


def _bytes_or_halves(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes in int32 words, uint8 `[..., codes]`."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return _halves(packed) if bits == 4 else packed


def _whole(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    part = codes[rows, columns]
    return _FP8[part.view(np.uint8)] if part.dtype == ml_dtypes.float8_e4m3fn else part


def _fp4(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return values of E2M1, two in a byte (OCP Microscaling Formats 1.0)."""
    first = columns.start // 2
    part = _FP4[codes[rows, first : -(-columns.stop // 2)]].reshape(rows.stop - rows.start, -1)
    return part[:, columns.start - 2 * first : columns.stop - 2 * first]


def _words(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return signed codes, of which neighbours in a row share a word."""
    count = 32 // bits
    first = columns.start // count
    part = _bytes_or_halves(codes[rows, first : -(-columns.stop // count)], bits)
    part = part[:, columns.start - first * count : columns.stop - first * count]
    return (part - np.uint8(1 << (bits - 1))).view(np.int8)


def _awq(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return codes of `[inputs, outputs / 8]` words.

    Source: `awq/utils/packing_utils.py` of https://github.com/casper-hansen/AutoAWQ
    """
    first = rows.start // 8
    part = _bytes_or_halves(codes[columns, first : -(-rows.stop // 8)], bits)
    part = part.reshape(len(part), -1, 8)[..., _AWQ_PLACES].reshape(len(part), -1)
    return part[:, rows.start - 8 * first : rows.stop - 8 * first].T


def _gptq(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return codes of `[inputs / n, outputs]` words.

    Source: `gptqmodel/nn_modules/qlinear` of https://github.com/ModelCloud/GPTQModel
    """
    count = 32 // bits
    first = columns.start // count
    words = np.ascontiguousarray(codes[first : -(-columns.stop // count), rows].T)
    return _bytes_or_halves(words, bits)[:, columns.start - first * count : columns.stop - first * count]


FORMATS: Mapping[str, Format] = {
    "FP8": Format("weight", "F8_E4M3", _whole, scales=("weight_scale_inv", "weight_scale")),
    "INT8": Format("weight", "I8", _whole, zeros="weight_zero_point"),
    "packed integers": Format(
        "weight_packed", "I32", _words, zeros="weight_zero_point", order="weight_g_idx", shape="weight_shape"
    ),
    "NVFP4": Format("weight_packed", "U8", _fp4, scale_types=("F8_E4M3",), divisor="weight_global_scale"),
    "NVFP4 of ModelOpt": Format("weight", "U8", _fp4, scale_types=("F8_E4M3",), factor="weight_scale_2"),
    "MXFP4": Format("weight_packed", "U8", _fp4, scale_types=("U8", "F8_E8M0")),
    "AWQ": Format("qweight", "I32", _awq, scales=("scales",), is_transposed=True, zeros="qzeros"),
    "GPTQ": Format("qweight", "I32", _gptq, scales=("scales",), is_transposed=True, zeros="qzeros", order="g_idx"),
}
"""Formats by the name that logs and errors give them."""
LEAVES = frozenset().union(*(form.leaves for form in FORMATS.values())) - {"weight"}
"""Names of tensors that no unquantised module has."""


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of MXFP4's blocks, float32 `[..., blocks * 32]`; a scale of 255 gives NaN.

    Args:
        blocks: uint8 `[..., blocks, 16]`, two values in a byte.
        scales: uint8 `[..., blocks]`, exponents with a bias of 127.
    """
    with np.errstate(over="ignore"):
        values = _FP4[blocks].reshape(*blocks.shape[:-1], -1) * _exponents(scales)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def _exponents(scales: np.ndarray) -> np.ndarray:
    return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


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
        form, bits = self._form, scheme.bits
        scales = next((name for name in form.scales if name in tensors), form.scales[0])
        zeros = [form.zeros] if scheme.has_zeros and form.zeros else []
        order = [form.order] if scheme.needs_order and form.order else []
        for name in (*form.needed, scales, *zeros, *order):
            if name not in tensors:
                raise self._fault(f"tensor {name!r} is missing; the checkpoint is incomplete, get it again")
        self._check_types(tensors, scales)
        self._codes, stored = tensors[form.codes][1], tensors[scales][1]
        if self._codes.ndim != 2:
            raise self._fault(f"{form.codes!r} has shape {[*self._codes.shape]}, but only matrices are quantised")
        self.shape = self._find_shape(tensors)
        outputs, inputs = self.shape
        self._rows, self._columns = scheme.block[0] or outputs, scheme.block[1] or inputs
        if scheme.format != "FP8" and inputs % self._columns:
            raise self._fault(f"{inputs} inputs are no multiple of the group of {self._columns}")
        grid = -(-outputs // self._rows), -(-inputs // self._columns)
        expected = grid[::-1] if form.is_transposed else grid
        if stored.shape != expected and not (stored.size == grid[0] * grid[1] == max(grid) and stored.ndim < 2):
            raise self._fault(f"{scales!r} has shape {[*stored.shape]} instead of {[*expected]}")
        self._scales = stored.reshape(expected).T if form.is_transposed else stored.reshape(expected)
        self._factor = self._find_factor(tensors)
        self._zeros = self._find_zeros(tensors, grid)
        self._order = self._find_order(tensors, grid[1])
        whole = self._scale_of(slice(0, outputs))
        if not np.isfinite(whole).all():
            raise self._fault(f"{scales!r} holds NaN or infinite scales; the file is damaged, get it again")
        self.packed_format = self._find_packed(whole, bits)

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
        count = 32 // self.scheme.bits
        if form.unpack is _awq:
            return second * count, first
        if form.unpack is _gptq:
            return second, first * count
        if form.unpack is _fp4:
            return first, 2 * second
        if form.shape is None:
            return first, second
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
        """Return the zero points, int16 `[blocks of outputs, blocks of inputs]`; None where all are 0."""
        form, bits = self._form, self.scheme.bits
        if form.zeros is None or form.zeros not in tensors:
            return None
        stored, everything = tensors[form.zeros][1], slice(0, grid[1])
        words = -(-grid[0] // (32 // bits))
        expected = (grid[1], words) if form.is_transposed else grid if form.code_type == "I8" else (words, grid[1])
        if stored.shape != expected and not (stored.ndim < 2 and stored.size == grid[0] and grid[1] == 1):
            raise self._fault(f"{form.zeros!r} has shape {[*stored.shape]} instead of {[*expected]}")
        stored = stored.reshape(expected)
        if form.unpack is _awq:
            zeros = _awq(stored, bits, slice(0, grid[0]), everything)
        elif form.is_transposed:
            zeros = _bytes_or_halves(stored, bits)[:, : grid[0]].T
        elif form.code_type == "I8":
            zeros = stored
        else:
            zeros = _words(stored.T, bits, everything, slice(0, grid[0])).T
        zeros = zeros.astype(np.int16) + np.int16(self.scheme.zero_shift)
        if self.scheme.zero_shift and (zeros == 1 << bits).any():
            raise self._fault(
                f"{form.zeros!r} holds zero points of {1 << bits}, which packages read in several ways; "
                "quantise the model with checkpoint_format gptq_v2"
            )
        if not self.scheme.has_zeros and zeros.any():
            raise self._fault(f"{form.zeros!r} holds zero points, but quantization_config says that there are none")
        return zeros if zeros.any() else None

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

    def _find_packed(self, scales: np.ndarray, bits: int) -> str | None:
        """Return the packed format that has the matrix's values exactly."""
        if self._form.code_type not in ("I8", "I32") or self._order is not None or self.shape[1] % _BLOCK:
            return None
        if self._columns % _BLOCK and self._columns != self.shape[1]:
            return None
        with np.errstate(over="ignore"):
            if not np.array_equal(scales.astype(np.float16), scales):
                return None
        is_unsigned = self._form.is_transposed
        middle = 1 << (bits - 1) if is_unsigned else 0
        is_centred = not middle if self._zeros is None else bool((self._zeros == middle).all())
        if is_centred:
            return "Q8_0" if bits == 8 else "Q4_0"
        return "Q5_0" if bits == 4 else None

    def _scale_of(self, rows: slice) -> np.ndarray:
        """Return the scales of outputs, float32 `[outputs or 1, blocks of inputs]`."""
        part = self._of_rows(self._scales, rows)
        scales = _exponents(np.ascontiguousarray(part)) if part.dtype == np.uint8 else part.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._factor is not None:
                scales = scales / self._factor if self._form.divisor else scales * self._factor
        return scales

    def _of_rows(self, blocks: np.ndarray, rows: slice) -> np.ndarray:
        """Return the blocks of outputs, `[outputs or 1, blocks of inputs]`."""
        if len(blocks) == 1 or self._rows == 1:
            return blocks[:1] if len(blocks) == 1 else blocks[rows]
        return blocks[np.arange(rows.start, rows.stop) // self._rows]

    def _of_columns(self, blocks: np.ndarray, columns: slice) -> np.ndarray:
        """Return the blocks of each input, `[outputs or 1, inputs or 1]`."""
        if blocks.shape[1] == 1 and self._order is None:
            return blocks
        groups = np.arange(columns.start, columns.stop) // self._columns if self._order is None else self._order[columns]
        return blocks[:, groups]

    def _bounds(self, index: tuple[slice, ...]) -> tuple[slice, slice]:
        """Return the rows and columns of an index."""
        parts = (part.indices(size) for part, size in zip((*index, slice(None), slice(None)), self.shape, strict=False))
        rows, columns = (slice(first, max(first, last)) for first, last, _ in parts)
        return rows, columns

    def _pieces(self, rows: slice, columns: slice) -> list[slice]:
        step = max(1, _PIECE // max(1, columns.stop - columns.start))
        step = -(-step // self._rows) * self._rows if self._rows <= step else step
        return [slice(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step)]

    def read(self, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return values, decoded in float32 and rounded once, piece by piece.

        Args:
            dtype: dtype of the returned array.
            index: rows and columns.
        """
        rows, columns = self._bounds(index)
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
        for piece in self._pieces(rows, columns):
            values = self._form.unpack(self._codes, self.scheme.bits, piece, columns).astype(np.float32)
            if self._zeros is not None:
                values -= self._of_columns(self._of_rows(self._zeros, piece), columns)
            with np.errstate(over="ignore", invalid="ignore"):
                values *= self._of_columns(self._scale_of(piece), columns)
                out[piece.start - rows.start : piece.stop - rows.start] = values
        return out

    def blocks(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return blocks of `packed_format` as a GGUF file has them, uint8 `[rows, bytes]`.

        Args:
            index: rows and columns, whole blocks.
        """
        rows, columns = self._bounds(index)
        codes = self._form.unpack(self._codes, self.scheme.bits, rows, columns).astype(np.int16)
        if self._zeros is not None:
            codes -= self._of_columns(self._of_rows(self._zeros, rows), columns)
        count = codes.shape[1] // _BLOCK
        starts = self._of_columns(self._scale_of(rows), columns)
        starts = np.broadcast_to(starts[:, ::_BLOCK] if starts.shape[1] > 1 else starts, (len(codes), count))
        scales = starts.astype(np.float16)[..., None].view(np.uint8)
        codes = codes.reshape(len(codes), count, _BLOCK)
        if self.packed_format == "Q8_0":
            return np.concatenate([scales, codes.astype(np.int8).view(np.uint8)], axis=2).reshape(len(codes), -1)
        codes += 8 if self.packed_format == "Q4_0" else 16
        low = (codes & 15).astype(np.uint8)
        parts = [scales, low[..., : _BLOCK // 2] | low[..., _BLOCK // 2 :] << 4]
        if self.packed_format == "Q5_0":
            parts.insert(1, np.packbits((codes >> 4).astype(np.uint8), axis=2, bitorder="little"))
        return np.concatenate(parts, axis=2).reshape(len(codes), -1)
