"""Compiled programs of a runner: their collectives and what they alias."""

import re
from collections import Counter
from typing import Any

import jax
import numpy as np

from chunkattn.engine.sample_inputs import empty_input

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast"
_CALL = re.compile(rf"= .*? ({_COLLECTIVES})(?:-start)?\(")


def collectives(compiled: jax.stages.Compiled) -> Counter[str]:
    """Collectives of a compiled program, by kind."""
    return Counter(found[1] for line in compiled.as_text().splitlines() if (found := _CALL.search(line)))


def compiled_step(llm: Any, rows: int) -> jax.stages.Compiled:
    """The step of some rows and short prompts."""
    runner, builder = llm.core.runner, llm.core.builder
    return runner.lower(builder.empty(rows, builder.width_buckets[0]), runner.pool.num_pages).compile()


def compiled_readouts(llm: Any, size: int) -> dict[str, jax.stages.Compiled]:
    """Programs that read picked rows, by name."""
    runner = llm.core.runner
    picked, greedy = runner.shards.zeros((size, runner.spec.hidden_size)), empty_input(size, runner.spec.vocab_size)
    return {
        "sample": runner._sample.lower(runner._head, picked, greedy, with_logprobs=True).compile(),
        "labels": runner._read_labels.lower(runner._head, picked, np.zeros((size, 2), np.int32)).compile(),
    }


def buffers(llm: Any) -> list[int]:
    """Addresses of the pool's buffers on every device."""
    leaves = jax.tree.leaves(llm.core.runner.pool.caches)
    return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]


def bytes_by_device(arrays: Any) -> list[int]:
    """Bytes that every device holds of some arrays."""
    held: Counter[Any] = Counter()
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())
