"""JAX's own attention kernel for Hopper, compiled for comparison: dense, without pages or chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import compile_call
from benchmarks.nvidia.hopper import sharding
from benchmarks.nvidia.kernels import forget_kernels, read_kernels

ROWS = 64
"""Rows of a warpgroup's tile, in the peer and in our kernel."""


@dataclass(frozen=True)
class Peer:
    """One compilation of `attention_mgpu`, in float16, the only dtype that it supports in JAX 0.11.

    Attributes:
        head_dim: size of a head.
        slots: slots of a KV tile.
        stages: KV tiles in flight.
        causal: whether rows see the slots up to their own; the kernel then has a second loop, with a mask.
    """

    head_dim: int = 128
    slots: int = 128
    stages: int = 2
    causal: bool = True


def peers(head_dim: int) -> Iterator[Peer]:
    """Yield the compilations to compare with at a head size."""
    yield Peer(head_dim, 64 if head_dim > 128 else 128)


def compile_peer(peer: Peer, dumps: Path) -> dict[str, Any]:
    """Compile a peer and return the result for JSON.

    Args:
        peer: the peer.
        dumps: folder given to `hopper.prepare`.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=ROWS, block_kv=peer.slots, max_concurrent_steps=peer.stages, use_schedule_barrier=True, causal=peer.causal
    )

    def array(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 2048, heads, peer.head_dim), jnp.float16, sharding=sharding())

    def lower() -> jax.stages.Lowered:
        call = jax.jit(lambda q, k, v: attention_mgpu.attention(q, k, v, config))
        return call.lower(array(16), array(8), array(8))

    result = {"kind": "attention_mgpu", **asdict(peer), **compile_call(lower)}
    if not result["compiled"]:
        forget_kernels(dumps)
        return result
    (kernel,) = read_kernels(dumps)
    return result | {"kernels": {result["kind"]: kernel.facts(peer.slots)}}
