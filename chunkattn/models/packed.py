"""`Packed`: a matrix in the blocks of a quantised file, which CPUs multiply as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from chunkattn.backends.cpu import packed as native


@partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["format", "outputs", "depth", "digits", "count"])
@dataclass(frozen=True, eq=False)
class Packed:
    """Matrix `[outputs, depth]`, or several, in packed blocks.

    On several devices `data` holds the parts of all devices in ascending order, and the sizes are those of one part.

    Attributes:
        data: uint8 `[bytes]`, of several matrices one after the other.
        format: GGUF's name of the blocks, such as `Q4_K`.
        outputs: number of outputs, a multiple of `native.ROWS`.
        depth: number of inputs, a multiple of the format's block.
        digits: bytes of a value of the rows that are multiplied: 1 (int8) or 2 (int16).
        count: number of stacked matrices; None for one matrix that is not stacked.
    """

    data: jax.Array
    format: str
    outputs: int
    depth: int
    digits: int
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return `(outputs, depth)`, behind the number of stacked matrices."""
        return (self.outputs, self.depth) if self.count is None else (self.count, self.outputs, self.depth)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return int(self.data.nbytes)

    def rows(self, ids: jax.Array) -> jax.Array:
        """Return rows of the matrix, float32 `[T, depth]`.

        Args:
            ids: int32 `[T]` numbers of the rows, below `outputs`.
        """
        return native.gather(self.data, ids, format=self.format, outputs=self.outputs, depth=self.depth)


Weight = jax.Array | Packed
"""A parameter of the decoder."""


def multiply_packed(x: jax.Array, weights: Sequence[Packed]) -> list[jax.Array]:
    """Return `x @ weight.T` for each of several matrices of one model, float32 `[N, outputs]`, by one native call.

    Args:
        x: rows `[N, depth]`, which become integers of `digits` bytes with a scale for each 32 values.
        weights: matrices of one depth and one number of digits.
    """
    data, formats, outputs = zip(*((w.data, w.format, w.outputs) for w in weights), strict=True)
    return [*native.multiply_several(x.astype(jnp.float32), data, formats=formats, outputs=outputs, digits=weights[0].digits)]


def unpacked(weight: Weight) -> jax.Array:
    """Return a parameter that is never packed where the caller reads it."""
    assert not isinstance(weight, Packed)
    return weight
