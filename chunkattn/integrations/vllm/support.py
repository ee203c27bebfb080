"""Checks at start: models and options whose answers the connector could not keep exact."""

from __future__ import annotations

from typing import Any

import torch

from chunkattn.integrations.vllm.rotation import KeyRotation

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that the parity tests cover: every layer has full causal attention and the same rotary embedding."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings with one table by position. Others change the table with the length of a prompt, or are untested."""
RECURRENT = (
    "recurrent layers, such as Gated DeltaNet: their state after a document cannot be moved or joined to others; "
    "use chunkattn.LLM, or vLLM without chunkattn for plain prompts"
)
CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")


class UnsupportedError(ValueError):
    """The engine cannot serve chunked prompts exactly."""


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Check an engine's configuration, in scheduler and workers.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`.

    Raises:
        UnsupportedError: a feature is refused. The message names it.
    """
    transfer, model, parallel = vllm_config.kv_transfer_config, vllm_config.model_config, vllm_config.parallel_config
    text_config = model.hf_text_config
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    refusals = {
        'kv_load_failure_policy other than "fail": vLLM would recompute a miss causally': (
            transfer.kv_load_failure_policy != "fail"
        ),
        'kv_role other than "kv_both"': transfer.kv_role != "kv_both",
        RECURRENT: has_recurrent_layers(text_config),
        f"architecture {model.architecture}; supported are {', '.join(ARCHITECTURES)}": model.architecture not in ARCHITECTURES,
        "multimodal models": model.is_multimodal_model,
        "hybrid models": len(groups) != 1 or model.is_hybrid,
        "MLA": model.use_mla,
        "sliding window and chunked attention": _is_windowed(model, text_config, spec),
        f"rotary embedding of type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}": rope_type not in ROPE_TYPES,
        "multimodal rotary embedding": "mrope_section" in rope,
        "dual chunk attention": getattr(text_config, "dual_chunk_attention_config", None) is not None,
        "queries scaled by position": getattr(text_config, "llama_4_scaling", None) is not None,
        f"KV cache of type {vllm_config.cache_config.cache_dtype}": vllm_config.cache_config.cache_dtype not in CACHE_DTYPES,
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise UnsupportedError(f"chunked prompts in vLLM do not support {refusal}")


def has_recurrent_layers(text_config: Any) -> bool:
    """Return whether a layer of a model keeps a state instead of K/V.

    Args:
        text_config: transformers' configuration of the language model.
    """
    types = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None) or ()
    return any(name.startswith(("linear_attention", "mamba", "recurrent", "conv")) for name in types)


def check_layers(layers: list[tuple[Any, torch.Tensor]], num_hidden_layers: int, block_size: int) -> None:
    """Check a worker's attention layers and their caches `[B, H, N, 2D]`.

    Raises:
        UnsupportedError: a layer or its cache is not as the connector expects.
    """
    if len(layers) != num_hidden_layers:
        raise UnsupportedError(f"{num_hidden_layers} layers have {len(layers)} KV caches: layers that share K/V are refused")
    shape = None
    for layer, cache in layers:
        name = getattr(layer, "layer_name", "a layer")
        if getattr(layer, "sliding_window", None) is not None:
            raise UnsupportedError(f"{name} has a sliding window")
        if cache.ndim != 4 or cache.shape[2] != block_size:
            raise UnsupportedError(
                f"{name} has a KV cache of shape {list(cache.shape)}, not [blocks, heads, {block_size}, 2 * head]"
            )
        if shape not in (None, cache.shape[1:]):
            raise UnsupportedError("layers with KV caches of several shapes")
        shape = cache.shape[1:]


def model_rotation(max_gap: int) -> KeyRotation:
    """Return the rotation of this process's model.

    Args:
        max_gap: largest number of positions by which a key moves below position 0.

    Raises:
        UnsupportedError: the process holds several rotary embeddings, or the gap exceeds the table.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT  # vLLM gives a connector no handle on the model

    embeddings = set(_ROPE_DICT.values())
    if len(embeddings) != 1:
        raise UnsupportedError(f"the process holds {len(embeddings)} rotary embeddings, not 1")
    (embedding,) = embeddings
    table = getattr(embedding, "cos_sin_cache", None)
    if not isinstance(table, torch.Tensor) or table.ndim != 2:
        raise UnsupportedError(f"rotary embedding {type(embedding).__name__} has no table by position")
    if max_gap >= table.shape[0]:
        raise UnsupportedError(f"chunk_position_gap {max_gap} exceeds the rotary embedding's {table.shape[0]} positions")
    return KeyRotation(table, embedding.is_neox_style)


def _is_windowed(model: Any, text_config: Any, spec: Any) -> bool:
    # Without vLLM's hybrid memory allocator, layers with and without window share one group and one specification.
    layer_types = getattr(text_config, "layer_types", None) or ()
    return (
        model.get_sliding_window() is not None
        or any(kind != "full_attention" for kind in layer_types)
        or type(spec).__name__ != "FullAttentionSpec"
        or spec.sliding_window is not None
        or spec.attention_chunk_size is not None
    )
