"""A layer of experts in Qwen3-30B-A3B's shape, compiled for a device: its temporary memory shows whether weights are copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import MIB, compile_call
from chunkattn.models.experts import mix, route
from chunkattn.models.linear import multiply
from chunkattn.models.spec import EXPERTS, Experts

_HIDDEN = 2048
_DTYPE = jnp.dtype("bfloat16")


@dataclass(frozen=True)
class ExpertsCase:
    """A layer's call over some rows, with the weights as the device multiplies them."""

    chip: str
    rows: int


def cases(chip: str) -> Iterator[ExpertsCase]:
    """Yield a decode of one row, one of many rows, and a prefill."""
    for rows in (1, 64, 2048):
        yield ExpertsCase(chip, rows)


def compile_experts(case: ExpertsCase, where: jax.sharding.Sharding, *, inputs_first: bool) -> dict[str, Any]:
    """Compile a call and return the result for JSON.

    Args:
        case: the call.
        where: sharding of all arrays on the device.
        inputs_first: layout of the weights, see `Experts`.
    """
    spec = Experts(count=128, used=8, size=768, inputs_first=inputs_first)
    shapes = {"x": (case.rows, _HIDDEN)} | spec.parameters(_HIDDEN)
    x, router, *weights = (jax.ShapeDtypeStruct(shape, _DTYPE, sharding=where) for shape in shapes.values())  # type: ignore[no-untyped-call]

    def layer(x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return mix(x, *route(multiply(x, router), spec), gate, up, down, spec, _DTYPE)

    experts_bytes = sum(_DTYPE.itemsize * weight.size for weight in weights)
    sizes = {"kind": EXPERTS, **asdict(case), "experts_mib": round(experts_bytes / MIB)}
    return sizes | compile_call(lambda: jax.jit(layer).lower(x, router, *weights))
