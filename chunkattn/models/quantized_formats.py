"""Formats of quantised matrices in Hugging Face folders: the tensors that each format stores, and the reader of its codes.

A value is `(code - zero point) * scale`. Outputs and inputs are in blocks of one scale each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""NumPy's type of each type of a safetensors file that a format stores."""
_NUMBERS = ("F32", "BF16", "F16")
_BYTES = np.arange(256, dtype=np.uint8)
E4M3 = _BYTES.view(jnp.float8_e4m3fn).astype(np.float32)
"""Value of each byte."""
_E2M1 = _BYTES[:16].view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1).view(np.uint64)[:, 0]
"""Bits of the values of both halves of each byte (OCP Microscaling Formats 1.0)."""


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


Read = Callable[[np.ndarray, int, slice, slice], np.ndarray]
"""Returns codes of outputs and inputs, uint8 `[outputs, bytes]`; of two codes in a byte, that of the first input is lower.

The arguments are the stored codes, their bits, outputs and inputs. The inputs begin at a multiple of 8. What follows them up
to the end of a word may be returned, too.
"""


@dataclass(frozen=True, eq=False)
class Format:
    """Tensors of a quantised matrix, by the last part of their names.

    Attributes:
        codes: name of the codes.
        code_type: their type.
        read: their reader.
        values: bits of the float32 values that each byte stands for; None for integers, whose middle one stands for 0.
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
    read: Read
    values: np.ndarray | None = None
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


def halves(packed: np.ndarray) -> np.ndarray:
    """Return the halves of bytes, uint8 `[outputs, 2 * bytes]`, the lower one first."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(np.uint8)


def read_rows(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Read codes of `[outputs, inputs]`, of which neighbours may share a byte or a word."""
    return codes.view(np.uint8)[rows, columns.start * bits // 8 : -(-columns.stop * bits // 8)]


def read_signed_rows(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Read bytes of `[outputs, inputs]` with signs."""
    return read_rows(codes, bits, rows, columns) ^ np.uint8(128)


def read_columns(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Read words of `[inputs / n, outputs]`.

    Source: `gptqmodel/nn_modules/qlinear` of https://github.com/ModelCloud/GPTQModel
    """
    count = 32 // bits
    words = codes[columns.start // count : -(-columns.stop // count), rows]
    return np.ascontiguousarray(words.T).view(np.uint8)


def read_awq(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Read words of `[inputs, outputs / 8]`, whose halves of bytes hold the outputs 0, 2, 4, 6, 1, 3, 5 and 7.

    Source: `awq/utils/packing_utils.py` of https://github.com/casper-hansen/AutoAWQ
    """
    first = rows.start // 8
    words = np.ascontiguousarray(codes[columns, first : -(-rows.stop // 8)])
    if len(words) % 2:
        words = np.pad(words, ((0, 1), (0, 0)))
    one, two = words[::2].view(np.uint8), words[1::2].view(np.uint8)
    # Two inputs in a byte: the outputs 0, 4, 1 and 5 of each word, then 2, 6, 3 and 7.
    pairs = np.stack([one & 15 | two << 4, one >> 4 | two & 0xF0]).reshape(2, len(one), words.shape[1], 2, 2)
    return pairs.transpose(2, 4, 0, 3, 1).reshape(8 * words.shape[1], len(one))[rows.start - 8 * first : rows.stop - 8 * first]


FORMATS: Mapping[str, Format] = {
    "FP8": Format("weight", "F8_E4M3", read_rows, E4M3, scales=("weight_scale_inv", "weight_scale")),
    "INT8": Format("weight", "I8", read_signed_rows, zeros="weight_zero_point"),
    "packed integers": Format(
        "weight_packed", "I32", read_rows, zeros="weight_zero_point", order="weight_g_idx", shape="weight_shape"
    ),
    "NVFP4": Format("weight_packed", "U8", read_rows, _PAIRS, scale_types=("F8_E4M3",), divisor="weight_global_scale"),
    "NVFP4 of ModelOpt": Format("weight", "U8", read_rows, _PAIRS, scale_types=("F8_E4M3",), factor="weight_scale_2"),
    "MXFP4": Format("weight_packed", "U8", read_rows, _PAIRS, scale_types=("U8", "F8_E8M0")),
    "AWQ": Format("qweight", "I32", read_awq, scales=("scales",), is_transposed=True, zeros="qzeros"),
    "GPTQ": Format("qweight", "I32", read_columns, scales=("scales",), is_transposed=True, zeros="qzeros", order="g_idx"),
}
"""Formats by the name that logs and errors give them."""
LEAVES = frozenset().union(*(form.leaves for form in FORMATS.values())) - {"weight"}
"""Names of tensors that no unquantised module has."""
