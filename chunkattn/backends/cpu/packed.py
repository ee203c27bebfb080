"""Products with weights that keep the codes of a GGUF file, by native operators.

`native/packed.h` describes the packed form, and docs/concepts/semantics.md the arithmetic. A packed weight is a flat array of
bytes whose panels of `ROWS` outputs lie one after the other, so a slice of whole panels is the packed weight of those outputs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8

from chunkattn.backends.cpu import library
from chunkattn.errors import ModelError

ROWS = 16
"""Outputs of a panel."""
DIGITS = (1, 2)
"""Digits of 8 bits in which a product may take its input."""


class PackedFormat(NamedTuple):
    """A format of GGUF files that can be packed.

    Attributes:
        name: name of the GGUF type.
        number: number of the format in the native library (`Packing`).
        block: values of a row in a block; a depth must be a multiple.
        source_bytes: bytes of a block in a file.
        panel_bytes: bytes of a packed block of each of `ROWS` outputs.
    """

    name: str
    number: int
    block: int
    source_bytes: int
    panel_bytes: int

    def packed_bytes(self, outputs: int, depth: int) -> int:
        """Return the size of a packed weight `[outputs, depth]`."""
        return outputs // ROWS * (depth // self.block) * self.panel_bytes

    def row_bytes(self, depth: int) -> int:
        """Return the size of a row of `depth` values in a file."""
        return depth // self.block * self.source_bytes


_SIZES = {
    "Q8_0": (32, 34, 32 + 512),
    "Q4_0": (32, 18, 32 + 256),
    "Q4_1": (32, 20, 64 + 256),
    "Q5_0": (32, 22, 32 + 320),
    "Q5_1": (32, 24, 64 + 320),
    "IQ4_NL": (32, 18, 32 + 256),
    "Q4_K": (256, 144, 64 + 8 * (32 + 256)),
    "Q5_K": (256, 176, 64 + 8 * (32 + 320)),
    "Q6_K": (256, 210, 32 + 8 * (32 + 384)),
}
FORMATS: Mapping[str, PackedFormat] = {
    name: PackedFormat(name, number, *sizes) for number, (name, sizes) in enumerate(_SIZES.items())
}
"""Formats by the name of their GGUF type."""


def refusal(format_name: str, outputs: int, depth: int) -> str | None:
    """Return the reason why a weight cannot be packed in this process, or None if it can.

    Args:
        format_name: name of a GGUF type.
        outputs: rows of the weight.
        depth: values of a row.
    """
    if (reason := library.refusal()) is not None:
        return reason
    if (form := FORMATS.get(format_name)) is None:
        return f"{format_name} cannot be packed; the formats are {', '.join(FORMATS)}"
    if not outputs or outputs % ROWS:
        return f"the outputs must be a multiple of {ROWS}, got {outputs:,}"
    if not depth or depth % form.block:
        return f"the depth must be a multiple of {form.block} in {format_name}, got {depth:,}"
    return None


def pack(format_name: str, rows: np.ndarray[Any, np.dtype[np.uint8]], out: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Pack rows as a GGUF file has them, on all processors of this process. The call releases the GIL.

    Args:
        format_name: name of the GGUF type.
        rows: uint8 `[outputs, bytes]`; a row is contiguous. A mapped file is read once.
        out: contiguous uint8 of `packed_bytes`; it may be a slice of whole panels of a larger weight.

    Raises:
        ModelError: a scale is NaN or infinite, or the weight cannot be packed here.
    """
    form = FORMATS.get(format_name)
    outputs, size = rows.shape
    depth = size // form.source_bytes * form.block if form else 0
    if reason := refusal(format_name, outputs, depth):
        raise ModelError(reason)
    assert form is not None
    assert size == form.row_bytes(depth)
    assert rows.dtype == out.dtype == np.uint8
    assert rows.strides[1] == 1
    assert out.flags.c_contiguous
    assert out.flags.writeable
    assert out.size == form.packed_bytes(outputs, depth)
    done = library.functions().chunkattn_pack(
        form.number, _address(rows), ctypes.c_int64(rows.strides[0]), outputs, depth, _address(out), _processors()
    )
    if not done:
        raise ModelError(f"a scale of {format_name} is NaN or infinite")


def quantize_q8_0(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Round weights to Q8_0 on all processors of this process, with the bytes that the gguf package gives.

    A block with a value that is NaN or infinite gets NaN as its scale, which `pack` refuses.

    Args:
        weights: float32 or bfloat16 `[outputs, depth]`; the depth is a multiple of 32.

    Returns:
        Rows as a GGUF file has them, uint8 `[outputs, bytes]`.
    """
    form = FORMATS["Q8_0"]
    outputs, depth = weights.shape
    bf16 = weights.dtype == jnp.bfloat16
    assert bf16 or weights.dtype == np.float32
    assert depth % form.block == 0
    weights = np.ascontiguousarray(weights)
    rows = np.empty((outputs, form.row_bytes(depth)), np.uint8)
    library.functions().chunkattn_quantize_q8_0(
        _address(weights), bf16, ctypes.c_int64(weights.size // form.block), _address(rows), _processors()
    )
    return rows


def multiply(
    x: Float32[Array, "N depth"], data: UInt8[Array, " bytes"], *, format: str, outputs: int, digits: int
) -> Float32[Array, "N outputs"]:
    """Return the product of rows with a packed weight.

    The bits of a row depend on that row alone. A row with NaN or infinity gives NaN, and leaves other rows as they are.

    Args:
        x: float32 rows.
        data: the packed weight `[outputs, depth]`.
        format: name of the GGUF type.
        outputs: outputs of the weight.
        digits: 1 to take 8 bits of a value of `x`, 2 to take 15; each block of 32 values has a scale.

    Raises:
        BackendError: the native operators cannot run in this process.
    """
    (product,) = multiply_several(x, (data,), formats=(format,), outputs=(outputs,), digits=digits)
    return product


def multiply_several(
    x: Float32[Array, "N depth"],
    data: Sequence[UInt8[Array, " bytes"]],
    *,
    formats: Sequence[str],
    outputs: Sequence[int],
    digits: int,
) -> tuple[Float32[Array, "N outputs"], ...]:
    """Return the products of the same rows with several packed weights, in one native call.

    The bits are those of `multiply`.

    Args:
        x: float32 rows.
        data: the packed weights.
        formats: name of the GGUF type of each weight.
        outputs: outputs of each weight.
        digits: as for `multiply`.
    """
    assert digits in DIGITS
    assert x.dtype == jnp.float32
    library.functions()
    out = [jax.ShapeDtypeStruct((len(x), n), jnp.float32) for n in outputs]  # type: ignore[no-untyped-call]
    packings = np.array([FORMATS[name].number for name in formats], np.int32)
    call = jax.ffi.ffi_call(library.PACKED_MULTIPLY, out)
    return tuple(call(x, *data, packings=packings, digits=np.int32(digits)))


def gather(
    data: UInt8[Array, " bytes"], ids: Int32[Array, " T"], *, format: str, outputs: int, depth: int
) -> Float32[Array, "T depth"]:
    """Return dequantised rows of a packed weight, with the bits of the gguf package.

    Args:
        data: the packed weight `[outputs, depth]`.
        ids: int32 rows to return; one outside `[0, outputs)` gives NaN.
        format: name of the GGUF type.
        outputs: outputs of the weight.
        depth: values of a row.
    """
    library.functions()
    out = jax.ShapeDtypeStruct((len(ids), depth), jnp.float32)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call(library.PACKED_GATHER, out)
    rows: Float32[Array, "T depth"] = call(data, ids, packing=np.int32(FORMATS[format].number), outputs=np.int32(outputs))
    return rows


def _address(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
