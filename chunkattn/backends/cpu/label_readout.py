"""Native operator that reads the logits of labels, and the normaliser of each row, from hidden states and a head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from chunkattn.backends.cpu import library, linear

MAX_ROWS = 256
"""Rows that are read at a time: up to a hidden size of 2,048 they share one walk over the head."""


def serves(head: Array) -> bool:
    """Return whether the operator reads rows of this head, `[vocab, hidden]`: in bfloat16, on AMX tiles."""
    return linear.serves(head, head) and linear.any_rows()


def read_labels(
    hidden: Float[Array, "N hidden"],
    head: BFloat16[Array, "vocab hidden"],
    labels: Int32[Array, "N L"],
) -> tuple[Float32[Array, "N L"], Float32[Array, "N 2"]]:
    """Return the logits of labels and, up to rounding, what `normaliser` returns for the whole row. No logits are kept.

    A row has the same bits beside any number of other rows. Rows behind the last that has a label are not computed: their
    values are NaN, as are the logits of ids outside the vocabulary.

    Args:
        hidden: hidden states, rounded to bfloat16 here.
        head: weight of the logits, which `serves` accepts.
        labels: token ids; -1 stands for none.
    """
    shapes = [jax.ShapeDtypeStruct((len(hidden), width), jnp.float32) for width in (labels.shape[1], 2)]  # type: ignore[no-untyped-call]
    logits, normalisers = jax.ffi.ffi_call(library.READ, shapes)(hidden.astype(head.dtype), head, labels)
    return logits, normalisers
