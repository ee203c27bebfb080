"""Formats of quantised matrices in Hugging Face folders: the tensors that each format stores, and the decoder.

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
_E2M1 = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
_FP4 = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1).view(np.uint64)[:, 0]
"""Bits of the values of the low and of the high half of a byte."""
_FP8 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
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
    return out.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def bytes_or_halves(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes in int32 words, uint8 `[..., codes]`."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return _halves(packed) if bits == 4 else packed


def unpack_whole(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return codes that are integers or numbers of E4M3, which become float32."""
    part = codes[rows, columns]
    return _FP8.take(part.view(np.uint8)) if part.dtype == jnp.float8_e4m3fn else part


def unpack_fp4(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return values of E2M1, two in a byte (OCP Microscaling Formats 1.0)."""
    first = columns.start // 2
    part = _FP4.take(codes[rows, first : -(-columns.stop // 2)]).view(np.float32)
    return part[:, columns.start - 2 * first : columns.stop - 2 * first]


def unpack_words(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return signed codes, of which neighbours in a row share a word."""
    count = 32 // bits
    first = columns.start // count
    part = bytes_or_halves(codes[rows, first : -(-columns.stop // count)], bits)
    part = part[:, columns.start - first * count : columns.stop - first * count]
    return (part - np.uint8(1 << (bits - 1))).view(np.int8)


def unpack_awq(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return codes of `[inputs, outputs / 8]` words.

    Source: `awq/utils/packing_utils.py` of https://github.com/casper-hansen/AutoAWQ
    """
    first = rows.start // 8
    part = bytes_or_halves(codes[columns, first : -(-rows.stop // 8)], bits)
    part = part.reshape(len(part), part.shape[1] // 8, 8)[..., _AWQ_PLACES].reshape(part.shape)
    return part[:, rows.start - 8 * first : rows.stop - 8 * first].T


def unpack_gptq(codes: np.ndarray, bits: int, rows: slice, columns: slice) -> np.ndarray:
    """Return codes of `[inputs / n, outputs]` words.

    Source: `gptqmodel/nn_modules/qlinear` of https://github.com/ModelCloud/GPTQModel
    """
    count = 32 // bits
    first = columns.start // count
    words = np.ascontiguousarray(codes[first : -(-columns.stop // count), rows].T)
    return bytes_or_halves(words, bits)[:, columns.start - first * count : columns.stop - first * count]


FORMATS: Mapping[str, Format] = {
    "FP8": Format("weight", "F8_E4M3", unpack_whole, scales=("weight_scale_inv", "weight_scale")),
    "INT8": Format("weight", "I8", unpack_whole, zeros="weight_zero_point"),
    "packed integers": Format(
        "weight_packed", "I32", unpack_words, zeros="weight_zero_point", order="weight_g_idx", shape="weight_shape"
    ),
    "NVFP4": Format("weight_packed", "U8", unpack_fp4, scale_types=("F8_E4M3",), divisor="weight_global_scale"),
    "NVFP4 of ModelOpt": Format("weight", "U8", unpack_fp4, scale_types=("F8_E4M3",), factor="weight_scale_2"),
    "MXFP4": Format("weight_packed", "U8", unpack_fp4, scale_types=("U8", "F8_E8M0")),
    "AWQ": Format("qweight", "I32", unpack_awq, scales=("scales",), is_transposed=True, zeros="qzeros"),
    "GPTQ": Format("qweight", "I32", unpack_gptq, scales=("scales",), is_transposed=True, zeros="qzeros", order="g_idx"),
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
        values = _FP4.take(blocks).view(np.float32) * exponents(scales)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def exponents(scales: np.ndarray) -> np.ndarray:
    """Return scales of E8M0, uint8 exponents with a bias of 127, in float32; 255 gives NaN."""
    return scales.view(jnp.float8_e8m0fnu).astype(np.float32)
