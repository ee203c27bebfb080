"""Native form of the gated delta rule. A row has the same bits in any company, on any number of threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from chunkattn.backends.cpu import library
from chunkattn.backends.recurrence import Inputs, Recurrence, RecurrentCache


class NativeRecurrence(Recurrence):
    """Computes the rows of a walk one block after the other, and writes the cache in place.

    Walks outside the cache or the step, and walks that share what only one may write, are an error of the call.
    """

    @staticmethod
    def serves() -> bool:
        """Return whether the operator runs in this process."""
        return library.refusal() is None

    def build(self, walks: Int32[np.ndarray, "B 8"], num_rows: int) -> Int32[np.ndarray, "B 8"]:
        """Return the walks."""
        return walks

    def forward(
        self, inputs: Inputs, cache: RecurrentCache, arrays: Int32[Array, "B 8"]
    ) -> tuple[Float32[Array, "T Hv dv"], RecurrentCache]:
        """Return the outputs and the cache, see `Recurrence`."""
        library.functions()
        kept, tree = jax.tree.flatten(cache)
        shapes = [(len(inputs.q), self.spec.value_heads, self.spec.value_dim), *(x.shape for x in kept)]
        results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]  # type: ignore[no-untyped-call]
        aliases = {1 + len(inputs) + i: 1 + i for i in range(len(kept))}
        call = jax.ffi.ffi_call(library.RECURRENCE, results, input_output_aliases=aliases)
        out, *written = call(arrays, *inputs, *kept)
        return out, jax.tree.unflatten(tree, written)
