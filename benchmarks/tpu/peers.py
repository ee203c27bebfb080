"""JAX's own kernels for the same work, compiled the same way: splash attention and ragged paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from benchmarks.tpu.attention import TILE, compile_kernels, peak_share
from benchmarks.tpu.chips import CHIPS
from benchmarks.tpu.schedule import UnknownSchedule, pick, read_schedules


@dataclass(frozen=True)
class Splash:
    """Splash attention over a mask of `prefix` tokens and chunks of `chunk` tokens.

    Attributes:
        rows: rows of a query tile.
        slots: slots of a KV tile.
        compute: slots multiplied at once.
    """

    chip: str
    head_dim: int
    rows: int
    slots: int
    compute: int
    tokens: int = 4096
    prefix: int = 1024
    chunk: int = 512

    def lower(self) -> Any:
        """Lower two heads for the chip."""
        where, token = CHIPS[self.chip].sharding(), np.arange(self.tokens)
        start = np.where(token < self.prefix, 0, token - (token - self.prefix) % self.chunk)
        seen = (token <= token[:, None]) & ((token < self.prefix) | (token >= start[:, None]))
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([masks.NumpyMask(seen)] * 2),
            block_sizes=splash.BlockSizes(
                block_q=self.rows,
                block_kv=self.slots,
                block_kv_compute=self.compute,
                k_layout=splash.QKVLayout.SEQ_MINOR,  # fewer bundles than the default, measured
            ),
            head_shards=1,
            q_seq_shards=1,
        )
        q = jax.ShapeDtypeStruct((2, self.tokens, self.head_dim), jnp.bfloat16)
        return jax.jit(lambda *qkv: kernel(*qkv), in_shardings=where, out_shardings=where).lower(q, q, q)


@dataclass(frozen=True)
class Ragged:
    """Ragged paged attention, plain causal, without chunks.

    Attributes:
        kv_pages: pages of a KV tile.
        queries: rows of a query tile.
    """

    chip: str
    head_dim: int
    block_size: int
    kv_pages: int
    queries: int
    heads: int = 16
    kv_heads: int = 8
    rows: int = 2048
    sequences: int = 64
    width: int = 256
    pages: int = 4096

    def lower(self) -> Any:
        """Lower one layer's call for the chip."""
        where = CHIPS[self.chip].sharding()
        shapes: list[tuple[tuple[int, ...], Any]] = [
            ((self.rows, self.heads, self.head_dim), jnp.bfloat16),
            ((self.pages, self.block_size, 2 * self.kv_heads, self.head_dim), jnp.bfloat16),
            ((self.sequences,), jnp.int32),
            ((self.sequences, self.width), jnp.int32),
            ((self.sequences + 1,), jnp.int32),
            ((1,), jnp.int32),
        ]

        def call(*arrays: Any) -> Any:
            return ragged_paged_attention(
                *arrays,
                sm_scale=self.head_dim**-0.5,
                num_kv_pages_per_block=self.kv_pages,
                num_queries_per_block=self.queries,
                vmem_limit_bytes=96 << 20,
            )

        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        with jax.default_device(next(iter(where.device_set))):  # the kernel reads the default device
            return jax.jit(call, in_shardings=where, out_shardings=where).lower(*arrays)


def peers(chip: str, head_dim: int) -> Iterator[Splash | Ragged]:
    """Yield the kernels to compare with; the best of each kind counts."""
    for rows, slots, compute in ((512, 512, 512), (512, 1024, 512), (1024, 1024, 512), (1024, 2048, 512), (512, 1024, 1024)):
        yield Splash(chip, head_dim, rows, slots, compute)
    if head_dim == 128:  # ragged paged attention supports 128 and 256
        for kv_pages, queries in ((32, 32), (32, 64), (16, 128), (32, 128)):
            yield Ragged(chip, head_dim, 16, kv_pages, queries)


def compile_peer(peer: Splash | Ragged, schedules: Path) -> dict[str, Any]:
    """Compile a peer and return the result for JSON, like `attention.compile_case`."""
    result = {"kind": "splash" if isinstance(peer, Splash) else "ragged_paged", **asdict(peer)}
    result |= compile_kernels(peer.lower)
    names, tiles = ("ragged", "paged", "RPA"), 0.0
    if isinstance(peer, Splash):
        names, tiles = ("splash",), peer.rows * peer.slots / TILE
    try:
        by_name = read_schedules(schedules)
        if not result["compiled"]:
            return result
        schedule = pick(by_name, *names)
    except UnknownSchedule as error:
        return result | {"unread": str(error)}
    chip = CHIPS[peer.chip]
    if isinstance(peer, Ragged):
        tiles = peer.queries * peer.heads * peer.kv_pages * peer.block_size / TILE
    bundles = sum(block.bundles for block in schedule.multiplying)
    slots = {unit: sum(block.slots[unit] for block in schedule.multiplying) for unit in schedule.capacity}
    macs = 2 * TILE * peer.head_dim
    return result | {
        "prefill": {
            "bundles_per_tile": round(bundles / tiles, 2),
            "slots_per_tile": {unit: round(count / tiles, 2) for unit, count in slots.items()},
            "slot_shares": {unit: round(n / (schedule.capacity[unit] * bundles), 3) for unit, n in slots.items()},
            "inner_loop_mxu_peak_share": peak_share(macs * tiles, bundles, chip),
        }
    }
