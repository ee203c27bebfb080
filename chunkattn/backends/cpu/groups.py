"""Native products of groups of rows, each with a weight of its own: the experts of a layer.

A pair is a row and its group. Pairs lie group by group, and each has the same bits beside any number of others.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

from chunkattn.backends.cpu import library
from chunkattn.backends.cpu.linear import IN_STEP, any_rows
from chunkattn.backends.cpu.packed import DIGITS, FORMATS


def serves(x: Float[Array, "N in"], weights: Sequence[Float[Array, "E out in"]]) -> bool:
    """Return whether `multiply` computes products of these operands on CPUs."""
    if library.refusal() is not None or not all(x.dtype == weight.dtype == jnp.bfloat16 for weight in weights):
        return False
    return any_rows() or x.shape[1] % IN_STEP == 0


def multiply(
    x: Float[Array, "N in"], rows: Int32[Array, " M"], sizes: Int32[Array, " E"], *weights: Float[Array, "E out in"]
) -> list[Float32[Array, "M out"]]:
    """Return the products of pairs, for operands that `serves` accepts.

    Args:
        x: bfloat16 rows.
        rows: row of each pair.
        sizes: pairs of each group. Products of the pairs behind the last group are zero.
        *weights: bfloat16 weights of each group.
    """
    out = [jax.ShapeDtypeStruct((len(rows), weight.shape[1]), jnp.float32) for weight in weights]  # type: ignore[no-untyped-call]
    return list(jax.ffi.ffi_call(library.GROUPS, out)(x, rows, sizes, *weights))


def add_factors(
    x: Float[Array, "N in"],
    rows: Int32[Array, " M"],
    sizes: Int32[Array, " E"],
    *args: jax.Array,
) -> list[Float32[Array, "N out"]]:
    """Add the products of pairs with two factors of their group to rows. Rows in no pair keep their bits.

    Args:
        x: bfloat16 rows; `in` is a multiple of 32.
        rows: row of each pair, all different.
        sizes: pairs of each group; the pairs behind the last group add nothing.
        *args: of each matrix the bfloat16 factors `[E, rank, in]`, then of each `[E, out, depth]`, whose depth is a multiple of
            32, or 16 for an even `out`, and not below the rank, and then of each the float32 rows `[N, out]` that are added to.
    """
    count = len(args) // 3
    out = [jax.ShapeDtypeStruct(y.shape, jnp.float32) for y in args[2 * count :]]  # type: ignore[no-untyped-call]
    aliases = {3 + 2 * count + number: number for number in range(count)}
    return list(jax.ffi.ffi_call(library.FACTORS, out, input_output_aliases=aliases)(x, rows, sizes, *args))


def multiply_packed(
    x: Float32[Array, "N depth"],
    rows: Int32[Array, " M"],
    sizes: Int32[Array, " E"],
    *data: UInt8[Array, " bytes"],
    formats: Sequence[str],
    outputs: Sequence[int],
    digits: int,
) -> list[Float32[Array, "M outputs"]]:
    """Return the products of pairs with packed weights. The integers of a row are made once for all its groups.

    Args:
        x: float32 rows.
        rows: row of each pair.
        sizes: pairs of each group. Products of the pairs behind the last group are zero.
        *data: packed weights, each of all groups one after the other.
        formats: name of the GGUF type of each weight.
        outputs: outputs of each weight.
        digits: as for `packed.multiply`.
    """
    assert digits in DIGITS
    library.functions()
    out = [jax.ShapeDtypeStruct((len(rows), n), jnp.float32) for n in outputs]  # type: ignore[no-untyped-call]
    packings = np.array([FORMATS[name].number for name in formats], np.int32)
    return list(jax.ffi.ffi_call(library.PACKED_GROUPS, out)(x, rows, sizes, *data, packings=packings, digits=np.int32(digits)))
