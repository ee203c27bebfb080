"""Engines of the benchmarks, over random weights of a known geometry or over a GGUF file."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from chunkattn.backends import make_backend
from chunkattn.config import EngineConfig
from chunkattn.engine.build import attention_spec, build_core, enable_compile_cache, num_tracks
from chunkattn.engine.core import EngineCore
from chunkattn.engine.kv_pool import page_bytes
from chunkattn.engine.runner import Runner
from chunkattn.errors import ConfigError
from chunkattn.models.decoder import Decoder, random_decoder
from chunkattn.models.families import spec_from_config
from chunkattn.models.loader import DEMO_FOLDER, ModelFiles, load_tokenizer, open_files
from chunkattn.models.packed import unpacked
from chunkattn.models.spec import EMBEDDING, DecoderSpec
from chunkattn.models.weights import save_weights

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings"),
)


def sizes(*values: int) -> dict[str, int]:
    """Return the sizes of a configuration by their keys.

    Args:
        *values: vocabulary, hidden size, width of the MLP, layers, query heads, KV heads, size of a head, positions.
    """
    return dict(zip(_SIZES, values, strict=True))


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "rope_theta": 1e6}
"""Common options of the configurations of small Qwen3 models."""
GEOMETRIES = {
    "qwen3-0.6b": Qwen3Config(**sizes(151936, 1024, 3072, 28, 16, 8, 128, 40960), **QWEN3),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        tie_word_embeddings=False,
        rope_theta=1e6,
        **sizes(151936, 2048, 6144, 4, 32, 4, 128, 40960),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        tie_word_embeddings=True,
        **sizes(248320, 1024, 3584, 24, 8, 2, 256, 262144),
        linear_num_value_heads=16,
    ),
    "small": Qwen3Config(**sizes(4096, 256, 768, 4, 8, 4, 64, 40960), **QWEN3),
}


def spec_of(geometry: str) -> DecoderSpec:
    """Return the decoder's shape of a geometry."""
    return spec_from_config(GEOMETRIES[geometry])


def default_block_size(geometry: str) -> int:
    """Return the slots per page that the engine takes on this platform."""
    return attention_spec(EngineConfig(), spec_of(geometry), jnp.dtype("bfloat16")).block_size


def make_core(geometry: str, num_pages: int, *, dtype: str = "bfloat16", backend: str = "auto", **options: Any) -> EngineCore:
    """Return an engine over random weights.

    Args:
        geometry: name in `GEOMETRIES`.
        num_pages: size of the KV pool in pages.
        dtype: dtype of weights and activations.
        backend: name of the attention backend.
        **options: other options of the engine.
    """
    enable_compile_cache()
    model = random_decoder(spec_of(geometry), jnp.dtype(dtype))
    return core_of(model, EngineConfig(dtype=dtype, **options), num_pages, backend)


def core_of(model: Decoder, config: EngineConfig, num_pages: int, backend: str = "auto") -> EngineCore:
    """Return an engine over a decoder.

    Args:
        model: the decoder.
        config: options of the engine; `dtype` is the decoder's.
        num_pages: size of the KV pool in pages.
        backend: name of the attention backend.
    """
    spec = model.spec
    attention = make_backend(backend, attention_spec(config, spec, model.dtype))
    runner = Runner(model, attention, num_pages, config.max_logprobs, tracks=num_tracks(config, spec, 1, None).counts)
    return EngineCore(runner, config, spec.max_model_len)


def load_core(gguf: Path, num_pages: int, **options: Any) -> tuple[EngineCore, ModelFiles]:
    """Return an engine over the weights of a GGUF file, and the file's facts.

    Args:
        gguf: path of the file.
        num_pages: size of the KV pool in pages.
        **options: other options of the engine.

    Raises:
        ConfigError: the model does not generate.
        ModelError: the file cannot be read or is not supported.
    """
    config = EngineConfig(model=str(gguf), skip_tokenizer_init=True, chunk_calibration="off", **options)
    files = open_files(config)
    if files.spec.num_labels is not None:
        raise ConfigError(f"{gguf} is a classifier; pass the file of a language model")
    per_page = page_bytes(
        make_backend("auto", attention_spec(config, files.spec, files.dtype)), len(files.spec.attention_layers)
    )
    return build_core(replace(config, kv_cache_memory_bytes=num_pages * per_page), files), files


def save_model(geometry: str, folder: Path) -> None:
    """Write a bfloat16 checkpoint with random weights and the demo model's tokenizer.

    Greedy decoding picks ids of that tokenizer only.

    Args:
        geometry: name in `GEOMETRIES`.
        folder: folder to write to.
    """
    tokenizer = load_tokenizer(str(DEMO_FOLDER))
    tokenizer.save_pretrained(folder)
    config = deepcopy(GEOMETRIES[geometry])
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    model = random_decoder(spec_of(geometry), jnp.dtype("bfloat16"))
    # Zero the embeddings of ids without text, so every token can be streamed: a logit of 0 is never the highest.
    embedding = unpacked(model.weights[EMBEDDING]).at[len(tokenizer) :].set(0)
    save_weights(Decoder(model.spec, model.weights | {EMBEDDING: embedding}, model.dtype), folder)
