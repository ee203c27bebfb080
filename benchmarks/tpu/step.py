"""A whole decoder step with every layer of a real geometry, compiled for a chip and compared with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import LlamaConfig

from benchmarks.tpu.attention import MIB, compile_call, compiled_backend
from benchmarks.tpu.chips import CHIPS
from chunkattn.bench.geometry import GEOMETRIES
from chunkattn.config import EngineConfig
from chunkattn.engine.batch import BatchBuilder
from chunkattn.engine.build import attention_spec
from chunkattn.engine.kv_pool import page_bytes
from chunkattn.engine.runner import Runner
from chunkattn.models.decoder import Decoder
from chunkattn.models.spec import spec_from_config

WIDEST = 1 << 15
"""Pages of the longest page table, which fills a pool of the chip's memory or reaches the kernel's limit."""
MODELS = {
    "qwen3-0.6b": GEOMETRIES["qwen3-0.6b"],
    "llama-3-8b": LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=5e5,
        tie_word_embeddings=False,
    ),
}
SHARE = 0.85
"""Share of the memory for weights and pages together, as in the engine."""


@dataclass(frozen=True)
class Step:
    """One step: a model, the engine's settings, rows and the width of the page tables."""

    chip: str
    model: str
    rows: int
    width: int = 256
    max_num_seqs: int = 64
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    layers: int | None = None
    """Number of layers to compile; all by default. The pool keeps the pages of the whole model."""


def steps(chip: str, layers: int | None = None) -> Iterator[Step]:
    """Yield prefill and decode steps of the models with weights small enough to leave room for pages."""
    for model in MODELS:
        weights = _weight_bytes(model)
        if weights < SHARE * CHIPS[chip].hbm_bytes - (1 << 30):
            yield Step(chip, model, 2048, layers=layers)
            yield Step(chip, model, 64, layers=layers)
            if model == "qwen3-0.6b":
                yield Step(chip, model, 2048, width=WIDEST, layers=layers)
                yield Step(chip, model, 2048, kv_cache_dtype="fp8", layers=layers)


def _decoder(model: str, layers: int | None = None) -> Decoder:
    """Return the model without its weights' values."""
    config = deepcopy(MODELS[model])
    config.num_hidden_layers = layers or config.num_hidden_layers
    return nnx.eval_shape(lambda: Decoder(spec_from_config(config), jnp.dtype("bfloat16"), rngs=nnx.Rngs(0)))


def _weight_bytes(model: str) -> int:
    leaves = jax.tree.leaves(nnx.state(_decoder(model)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def compile_step(step: Step) -> dict[str, Any]:
    """Compile a step with the pool that the engine would allocate beside the weights, and return the result for JSON."""
    chip = CHIPS[step.chip]
    config = EngineConfig(
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=max(step.rows, step.max_num_seqs),
        block_size=step.block_size,
        kv_cache_dtype=step.kv_cache_dtype,
    )
    decoder = _decoder(step.model, step.layers)
    spec = decoder.spec
    backend = compiled_backend(step.chip)(attention_spec(config, spec, jnp.dtype("bfloat16")))
    weights = _weight_bytes(step.model)
    pages = int(chip.hbm_bytes * SHARE - weights) // page_bytes(backend, MODELS[step.model].num_hidden_layers)
    runner = Runner(decoder, backend, 1, config.max_logprobs)
    builder = BatchBuilder(
        runner.backends,
        token_buckets=(step.rows,),
        max_spans=config.max_num_seqs + 32,
        max_table_pages=step.width,
        block_size=step.block_size,
    )
    result = {"kind": "step", **asdict(step), "pages": pages, "weights_mib": round(weights / MIB)}
    result |= compile_call(lambda: runner.lower(builder.empty(step.rows, step.width), pages, chip.sharding()))
    if result["compiled"]:
        result["hbm_limit_mib"] = chip.hbm_bytes // MIB
        result["fits"] = result["hbm_mib"] <= result["hbm_limit_mib"]
    return result
