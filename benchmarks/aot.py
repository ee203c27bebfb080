"""Compilation ahead of time for a device that may be absent: what a program needs of its memory, and whole decoder steps."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import LlamaConfig

from chunkattn.backends import AttentionBackend, AttentionBatch, AttentionSpec
from chunkattn.backends.base import Weighing
from chunkattn.config import EngineConfig
from chunkattn.engine.build import attention_spec
from chunkattn.engine.plan import Chip, Plan, plan
from chunkattn.engine.runner import Runner
from chunkattn.engine.step import StepBuilder
from chunkattn.models.decoder import Decoder
from chunkattn.models.families import spec_from_config
from chunkattn.models.joined import joined_weights, joins
from chunkattn.models.shards import ONE_DEVICE, Shards
from chunkattn.tools.bench.geometry import GEOMETRIES, sizes

MIB = 2**20
Program = Callable[[Runner, StepBuilder, int], jax.stages.Lowered]
_COLLECTIVE = re.compile(r"\s(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")
_LLAMA = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "tie_word_embeddings": False}
MODELS = {
    "qwen3-0.6b": GEOMETRIES["qwen3-0.6b"],
    "llama-3-8b": LlamaConfig(**sizes(128256, 4096, 14336, 32, 32, 8, 128, 8192), **_LLAMA),
    "llama-3-70b": LlamaConfig(**sizes(128256, 8192, 28672, 80, 64, 8, 128, 8192), **_LLAMA),
}


class LayerCase:
    """Sizes of one layer's call, whose dataclasses name the fields; `weighs` is true if the step weighs chunks anew."""

    head_dim: int
    block_size: int
    dtype: str
    heads: int
    kv_heads: int
    rows: int
    sequences: int
    width: int
    pages: int
    window: int | None
    weighs: bool
    kv_dtype: str | None = None

    @property
    def spec(self) -> AttentionSpec:
        """Return the spec that the backend gets."""
        kept = None if self.kv_dtype is None else jnp.dtype(self.kv_dtype)
        dtype = jnp.dtype(self.dtype)
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, dtype, self.block_size, (self.window,), kept)

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of one layer's K and V."""
        return 2 * self.pages * self.kv_heads * self.block_size * self.head_dim * self.spec.cache_dtype.itemsize

    def batch(self) -> AttentionBatch:
        """Return an empty step of these sizes; compilation depends on the sizes alone."""
        row, seq = np.zeros(self.rows, np.int32), np.zeros(self.sequences, np.int32)
        table = np.zeros((self.sequences, self.width), np.int32)
        weighing = Weighing(seq, *np.ones((2, self.sequences), np.float32)) if self.weighs else None
        return AttentionBatch(0, row, row, row, seq, table, table, self.block_size, weighing)


def compile_call(
    lower: Callable[[], jax.stages.Lowered], read: Callable[[jax.stages.Compiled], dict[str, Any]] = lambda _: {}
) -> dict[str, Any]:
    """Compile a call and return its success and its use of the device's memory.

    Args:
        lower: lowers the call.
        read: returns further results of the compiled program.
    """
    began = time.perf_counter()
    try:
        compiled = lower().compile()
    except Exception as error:  # any error of the compiler is a result
        return {"compiled": False, "error": str(error).strip()}
    memory = compiled.memory_analysis()
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    aliased, temporary = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    return {
        "compiled": True,
        "seconds": round(time.perf_counter() - began, 1),
        **read(compiled),
        "temporary_mib": round(temporary / MIB, 1),
        "arguments_mib": round(arguments / MIB, 1),
        "aliased_mib": round(aliased / MIB, 1),
        "hbm_mib": round((arguments + results - aliased + temporary) / MIB, 1),
    }


def collectives(compiled: jax.stages.Compiled) -> dict[str, Counter[str]]:
    """Return the number of collectives of a program, by kind."""
    return {"collectives": Counter(_COLLECTIVE.findall(compiled.as_text() or ""))}


@dataclass(frozen=True)
class Step:
    """One decoder step: a model, the engine's settings, rows and the width of the page tables."""

    chip: str
    model: str
    rows: int
    width: int = 256
    max_num_seqs: int = 64
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    layers: int | None = None
    """Number of layers to compile; all by default. The pool keeps the pages of the whole model."""


def decoder(model: str, layers: int | None = None, platform: str = "cpu", shards: Shards | None = None) -> Decoder:
    """Return a model without its weights' values.

    Args:
        model: name in `MODELS`.
        layers: number of layers; None for all.
        platform: platform that the weights are stored for.
        shards: devices that share the model.
    """
    config = deepcopy(MODELS[model])
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    spec = spec_from_config(config).stored_for(platform)
    dtype, held, shapes = jnp.dtype("bfloat16"), shards or ONE_DEVICE, spec.parameters()
    if joins(platform):
        for name, joined in joined_weights(spec).items():
            shapes = {n: shape for n, shape in shapes.items() if n not in joined.parts} | {name: joined.shape(held)}
    return Decoder(spec, {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}, dtype, held)


def planned(model: str, memory_bytes: int, config: EngineConfig | None = None, size: int = 1) -> Plan:
    """Return what a model in bfloat16 takes of the memory of each of its devices."""
    spec = spec_from_config(MODELS[model])
    return plan(config or EngineConfig(), spec, jnp.dtype("bfloat16"), Chip("the device", memory_bytes), size)


def lower_step(
    step: Step,
    backend: Callable[[AttentionSpec], AttentionBackend],
    memory_bytes: int,
    where: jax.sharding.Sharding | Sequence[jax.Device],
    program: Program | None = None,
) -> tuple[dict[str, Any], Callable[[], jax.stages.Lowered]]:
    """Return the sizes of a step beside the pool that the engine would allocate, and a function that lowers the step.

    Args:
        step: step to lower.
        backend: makes the attention backend.
        memory_bytes: memory of a device in bytes.
        where: sharding of all arrays on one device, or the devices that share the model.
        program: lowers another program than the step, from its runner, its builder and the number of pages.
    """
    config = EngineConfig(
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=max(step.rows, step.max_num_seqs),
        block_size=step.block_size,
        kv_cache_dtype=step.kv_cache_dtype,
    )
    sharding = where if isinstance(where, jax.sharding.Sharding) else None
    devices = list(sharding.device_set) if sharding else list(where)
    shards = ONE_DEVICE if sharding else Shards.over(devices, decoder(step.model, step.layers).spec)
    model = decoder(step.model, step.layers, devices[0].platform, shards)
    attention = backend(attention_spec(config, model.spec, jnp.dtype("bfloat16"), shards))
    memory = planned(step.model, memory_bytes, config, shards.size)
    runner = Runner(model, attention, 0, config.max_logprobs)
    builder = StepBuilder(
        runner.backends,
        token_buckets=(step.rows,),
        max_spans=config.max_num_seqs + 32,
        max_table_pages=step.width,
        block_size=step.block_size,
    )
    sizes = {"pages": memory.num_pages, "weights_mib": round(memory.weight_bytes / MIB)}
    if program is not None:
        return sizes, lambda: program(runner, builder, memory.num_pages)
    return sizes, lambda: runner.lower(builder.empty(step.rows, step.width), memory.num_pages, sharding)
