"""Changes of a decoder's shape that single model families need.

Each of these functions gets the Hugging Face configuration and the shape without the change, and returns the shape with it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from chunkattn.errors import ModelError
from chunkattn.models.mixers import GatedDeltaNet, QueryGrowth
from chunkattn.models.spec import AFTER, AROUND, DecoderSpec, Experts, Fused, LayerSpec, Mlp
from chunkattn.rope.rotary import is_positive

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINDOWED, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
"""Types of layers by their names in transformers."""
_FUSED_PROJECTIONS: Fused = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)
_SHARED_MLP: Fused = (
    ("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")),
    ("shared_mlp.output_linear", ("mlp.down_proj",)),
)
_CONVOLUTION = ("linear_attn.conv1d", ("linear_attn.conv_q", "linear_attn.conv_k", "linear_attn.conv_v"))
_QKV = ("linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v")
_FUSED_DELTA_NET: Fused = (("linear_attn.in_proj_qkv", _QKV), _CONVOLUTION)
_INTERLEAVED_DELTA_NET: Fused = (
    ("linear_attn.in_proj_qkvz", (*_QKV, "linear_attn.in_proj_z")),
    ("linear_attn.in_proj_ba", ("linear_attn.in_proj_b", "linear_attn.in_proj_a")),
)


def factor(config: PretrainedConfig, key: str) -> float:
    """Return a number of a configuration.

    Args:
        config: the configuration.
        key: key of the number.

    Raises:
        ModelError: the number is not positive and finite.
    """
    value = getattr(config, key)
    if not is_positive(value):
        raise wrong(f"{key} must be a positive finite number, got {value!r}")
    return float(value)


def wrong(text: str) -> ModelError:
    """Return the error for a wrong setting.

    Args:
        text: what is wrong with which key.
    """
    return ModelError(f"configuration: {text}")


def delta_net(config: PretrainedConfig) -> GatedDeltaNet:
    """Return the recurrent layer of a configuration.

    Args:
        config: configuration of a hybrid.

    Raises:
        ModelError: a size or the activation is not supported, or attention has no output gate.
    """
    parts = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [getattr(config, f"linear_{part}") for part in parts]
    for part, size in zip(parts, sizes, strict=True):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 + (part == "conv_kernel_dim"):
            raise wrong(f"linear_{part} must be an integer above {int(part == 'conv_kernel_dim')}, got {size!r}")
    if sizes[1] % sizes[0]:
        raise wrong(f"linear_num_value_heads {sizes[1]} is not a multiple of linear_num_key_heads {sizes[0]}")
    if not getattr(config, "attn_output_gate", True):
        raise wrong("attn_output_gate is false: attention without an output gate is not supported")
    if config.hidden_act not in ("silu", "swish"):
        raise wrong(f"hidden_act {config.hidden_act!r} is not supported by recurrent layers; only silu is")
    return GatedDeltaNet(*sizes)


def gemma(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add 1 to the weights of norms, and scale the embeddings."""
    if getattr(config, "use_bidirectional_attention", None):
        raise wrong("use_bidirectional_attention is true: bidirectional attention is not supported")
    return replace(spec, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def gemma3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add norms behind attention and MLP, a scale of the scores, and a cap of the logits."""
    if config.attn_logit_softcapping is not None:
        raise wrong(f"attn_logit_softcapping {config.attn_logit_softcapping!r} is not supported")
    scale = factor(config, "query_pre_attn_scalar") ** -0.5
    cap = None if config.final_logit_softcapping is None else factor(config, "final_logit_softcapping")
    return replace(
        gemma(config, spec).map(lambda layer: replace(layer, norms=AROUND).with_attention(scale=scale)),
        logit_cap=cap,
    )


def granite(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Scale embeddings, scores, residuals and logits."""
    residual, scale = factor(config, "residual_multiplier"), factor(config, "attention_multiplier")
    return replace(
        spec.map(lambda layer: replace(layer, residual_scale=residual).with_attention(scale=scale)),
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=1 / factor(config, "logits_scaling"),
    )


def granite_hybrid(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let all layers be Granite's, with the MLP of shared experts as their only one, and perhaps without rotary embedding."""
    if (experts := config.num_local_experts) != 0:
        raise wrong(f"num_local_experts {experts!r}: experts are not supported by Granite 4, only dense models (0) are")
    kinds = list(config.layer_types)
    if unknown := sorted(set(kinds) - {FULL}):
        raise ModelError(f"layer type {unknown[0]!r} is not supported by Granite 4; only {FULL} is")
    if len(kinds) != spec.num_layers:
        raise wrong(f"layer_types has {len(kinds)} entries for {spec.num_layers} layers")
    width = config.shared_intermediate_size
    if not isinstance(width, int) or width < 1:
        raise wrong(f"shared_intermediate_size must be a positive integer, got {width!r}")
    rotates = config.position_embedding_type == "rope"

    def change(layer: LayerSpec) -> LayerSpec:
        layer = layer if rotates else layer.with_attention(rotary=None)
        return replace(layer, feed_forward=layer.feed_forward and replace(layer.feed_forward, size=width))

    return replace(granite(config, spec.map(change)), fused=_SHARED_MLP)


def ministral3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let queries grow with their position."""
    rope = config.rope_parameters
    beta, period = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if beta != 0 and not is_positive(beta):
        raise wrong(f"rope_parameters: llama_4_scaling_beta must be 0 or a positive finite number, got {beta!r}")
    if not isinstance(period, int) or period < 1:
        raise wrong(f"rope_parameters: original_max_position_embeddings must be a positive integer, got {period!r}")
    growth = QueryGrowth(float(beta), period) if beta else None
    return spec.map(lambda layer: layer.with_attention(growth=growth))


def olmo2(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Put the norms behind attention and MLP."""
    return spec.map(lambda layer: replace(layer, norms=AFTER))


def phi3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Read projections of one input from one tensor."""
    return replace(spec, fused=_FUSED_PROJECTIONS)


def experts(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Put experts in place of the MLP of every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    for name in names:
        value = getattr(config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise wrong(f"{name} must be a positive integer, got {value!r}")
    count, used, size, step = (getattr(config, name) for name in names)
    if used > count:
        raise wrong(f"num_experts_per_tok {used} is more than num_experts {count}")
    dense = config.mlp_only_layers
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < spec.num_layers for layer in dense):
        raise wrong(f"mlp_only_layers must be a list of layers below {spec.num_layers}, got {dense!r}")
    if config.hidden_act not in ("silu", "swish"):
        raise wrong(f"hidden_act {config.hidden_act!r} is not supported by experts; only silu is")
    experts = Experts(count, used, size, is_normalised=bool(config.norm_topk_prob))
    layers = (
        layer if index in dense or (index + 1) % step else replace(layer, feed_forward=None, experts=experts)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def shared_experts(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Put experts in place of MLPs as `experts` does, each layer with an MLP of all rows beside them, which has a gate."""
    shared = config.shared_expert_intermediate_size
    if not isinstance(shared, int) or isinstance(shared, bool) or shared < 1:
        raise wrong(f"shared_expert_intermediate_size must be a positive integer, got {shared!r}")

    def change(layer: LayerSpec) -> LayerSpec:
        return replace(layer, experts=layer.experts and replace(layer.experts, shared=Mlp(shared), gates_shared=True))

    return experts(config, spec).map(change)


def qwen2_moe(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add experts as `shared_experts` does, and let the biases of attention have a key of their own."""
    biases = bool(config.qkv_bias)
    return shared_experts(config, spec).map(lambda layer: layer.with_attention(qkv_bias=biases))


def qwen3_5(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add 1 to the weights of norms but those inside recurrent layers, and read the projections of these from one tensor."""
    return replace(spec, norm_offset=1.0, fused=_FUSED_DELTA_NET)


def qwen3_5_moe(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Change the shape as `qwen3_5` does, with experts in every layer, whose factors are normalised."""
    config = copy.copy(config)
    config.decoder_sparse_step, config.mlp_only_layers, config.norm_topk_prob = 1, [], True
    return qwen3_5(config, shared_experts(config, spec))


def qwen3_next(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add 1 to the weights of norms as `qwen3_5` does; the stored projections have the rows of one key head after another."""
    heads = 1 if spec.recurrent is None else spec.recurrent.key_heads
    turns = tuple((stored, heads) for stored, _ in _INTERLEAVED_DELTA_NET)
    spec = replace(spec, norm_offset=1.0, fused=(*_INTERLEAVED_DELTA_NET, _CONVOLUTION), interleaved=turns)
    return shared_experts(config, spec)


def seed_oss(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let the bias of the output projection have a key of its own."""
    o_bias = bool(config.attention_out_bias)
    return spec.map(lambda layer: layer.with_attention(o_bias=o_bias))


def smollm3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let the layers without rotary embedding see no positions."""
    rotates = config.no_rope_layers
    if not isinstance(rotates, list) or len(rotates) < spec.num_layers:
        raise wrong(f"no_rope_layers must have an entry for each of {spec.num_layers} layers, got {rotates!r}")
    layers = [
        layer if rotate else layer.with_attention(rotary=None) for layer, rotate in zip(spec.layers, rotates, strict=False)
    ]
    return replace(spec, layers=tuple(layers))
