"""A recurrent layer in Qwen3.5's shape, compiled for a device: its temporary memory shows whether states are copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.aot import MIB, compile_call
from chunkattn.backends import xla_recurrence
from chunkattn.backends.recurrence import NO_WALK, Inputs, RecurrentSpec
from chunkattn.backends.recurrent_pieces import cut

RECURRENT = "recurrent"
_SPEC = RecurrentSpec(16, 32, 128, 128)
_SLOTS, _SEATS = 256, 128


@dataclass(frozen=True)
class RecurrentCase:
    """A layer's call over some rows of some walks."""

    chip: str
    rows: int
    walks: int


def cases(chip: str) -> Iterator[RecurrentCase]:
    """Yield a step of decodes and a prefill."""
    for rows in (64, 2048):
        yield RecurrentCase(chip, rows, 64)


def compile_recurrent(case: RecurrentCase, where: jax.sharding.Sharding) -> dict[str, Any]:
    """Compile a call and return the result for JSON.

    Args:
        case: the call.
        where: sharding of all arrays on the device.
    """
    keys, values, heads = _SPEC.key_heads * _SPEC.key_dim, _SPEC.value_heads * _SPEC.value_dim, _SPEC.value_heads

    def shaped(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]

    of_rows = [shaped(case.rows, size) for size in (keys, keys, values, heads, heads)]
    taps = [shaped(size, _SPEC.taps) for size in (keys, keys, values)]
    inputs = Inputs(*[*of_rows, *taps, shaped(heads), shaped(heads)])
    form = xla_recurrence.XlaRecurrence(_SPEC)
    cache = jax.tree.map(lambda x: shaped(*x.shape), jax.eval_shape(lambda: form.allocate(_SLOTS, _SEATS)))
    lanes = xla_recurrence.num_lanes(case.rows, case.walks)
    built = cut(_SPEC, np.array([NO_WALK] * case.walks, np.int32), case.rows, xla_recurrence.MOST_PREPARED, lanes)
    arrays = jax.tree.map(lambda x: shaped(*x.shape, dtype=x.dtype), built)
    pool_bytes = sum(4 * x.size for x in jax.tree.leaves(cache))
    sizes = {"kind": RECURRENT, **asdict(case), "pool_mib": round(pool_bytes / MIB)}
    return sizes | compile_call(lambda: jax.jit(form.forward, donate_argnums=1).lower(inputs, cache, arrays))
