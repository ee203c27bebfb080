"""The supported model families, and the decoder's shape from a Hugging Face configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from chunkattn.errors import ModelError
from chunkattn.models.spec import AFTER, AROUND, Attention, DecoderSpec, Experts, Fused, LayerSpec, Mlp, QueryGrowth
from chunkattn.rope.rotary import is_positive, make_rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLASSIFIER, _LANGUAGE_MODEL, _BARE = "ForSequenceClassification", "ForCausalLM", "Model"
_MULTIMODAL = "ForConditionalGeneration"
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Types of layers by their names in transformers."""
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of the MLP by their names in transformers."""
_FUSED_PROJECTIONS: Fused = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)
_SHARED_MLP: Fused = (
    ("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")),
    ("shared_mlp.output_linear", ("mlp.down_proj",)),
)


@dataclass(frozen=True)
class Family:
    """Facts of one model family that its class in transformers decides, whatever a configuration holds.

    Attributes:
        name: name for readers.
        prefixes: first part of the names of its classes; checkpoints may name the class by any of them.
        qkv_bias: whether the query, key and value projections have biases; None if `attention_bias` decides.
        o_bias: whether the output projection has a bias; None if `attention_bias` decides.
        mlp_bias: whether the MLP's projections have biases; None if `mlp_bias` decides.
        qk_norm: what is normalised of queries and keys: nothing, each head, or the whole projection.
        windows: layers with a sliding window: none, all if `sliding_window` is set, or those of `layer_types`.
        classifies: whether transformers has a sequence classifier of the family.
        partial_rotary: whether `partial_rotary_factor` counts, by which a part of each head is rotated.
        activation_key: key of the MLP's activation.
        limit_is_scaled: whether `max_position_embeddings` includes the factor of a linear scaling.
        deltas: what else is its own: returns the shape with it. It gets the configuration and the shape without it.
    """

    name: str
    prefixes: tuple[str, ...]
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: Literal["head", "whole"] | None
    windows: Literal["none", "all", "layer_types"]
    classifies: bool = True
    partial_rotary: bool = False
    activation_key: str = "hidden_act"
    limit_is_scaled: bool = False
    deltas: Callable[[PretrainedConfig, DecoderSpec], DecoderSpec] = lambda config, spec: spec


def _gemma(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add 1 to the weights of norms, and scale the embeddings."""
    if getattr(config, "use_bidirectional_attention", None):
        raise _wrong("use_bidirectional_attention is true: bidirectional attention is not supported")
    return replace(spec, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def _gemma3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Add norms behind attention and MLP, a scale of the scores, and a cap of the logits."""
    if config.attn_logit_softcapping is not None:
        raise _wrong(f"attn_logit_softcapping {config.attn_logit_softcapping!r} is not supported")
    scale = _factor(config, "query_pre_attn_scalar") ** -0.5
    cap = None if config.final_logit_softcapping is None else _factor(config, "final_logit_softcapping")
    return replace(
        _gemma(config, spec).map(lambda layer: replace(layer, norms=AROUND, mixer=replace(layer.mixer, scale=scale))),
        logit_cap=cap,
    )


def _granite(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Scale embeddings, scores, residuals and logits."""
    residual, scale = _factor(config, "residual_multiplier"), _factor(config, "attention_multiplier")
    return replace(
        spec.map(lambda layer: replace(layer, residual_scale=residual, mixer=replace(layer.mixer, scale=scale))),
        embedding_scale=_factor(config, "embedding_multiplier"),
        logit_scale=1 / _factor(config, "logits_scaling"),
    )


def _granite_hybrid(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let all layers be Granite's, with the MLP of shared experts as their only one, and perhaps without rotary embedding."""
    if (experts := config.num_local_experts) != 0:
        raise _wrong(f"num_local_experts {experts!r}: experts are not supported by Granite 4, only dense models (0) are")
    kinds = list(config.layer_types)
    if unknown := sorted(set(kinds) - {FULL}):
        raise ModelError(f"layer type {unknown[0]!r} is not supported by Granite 4; only {FULL} is")
    if len(kinds) != spec.num_layers:
        raise _wrong(f"layer_types has {len(kinds)} entries for {spec.num_layers} layers")
    width = config.shared_intermediate_size
    if not isinstance(width, int) or width < 1:
        raise _wrong(f"shared_intermediate_size must be a positive integer, got {width!r}")
    rotates = config.position_embedding_type == "rope"

    def change(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer if rotates else replace(layer.mixer, rotary=None)
        return replace(layer, mixer=mixer, feed_forward=layer.feed_forward and replace(layer.feed_forward, size=width))

    return replace(_granite(config, spec.map(change)), fused=_SHARED_MLP)


def _ministral3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let queries grow with their position."""
    rope = config.rope_parameters
    beta, period = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if beta != 0 and not is_positive(beta):
        raise _wrong(f"rope_parameters: llama_4_scaling_beta must be 0 or a positive finite number, got {beta!r}")
    if not isinstance(period, int) or period < 1:
        raise _wrong(f"rope_parameters: original_max_position_embeddings must be a positive integer, got {period!r}")
    growth = QueryGrowth(float(beta), period) if beta else None
    return spec.map(lambda layer: replace(layer, mixer=replace(layer.mixer, growth=growth)))


def _olmo2(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Put the norms behind attention and MLP."""
    return spec.map(lambda layer: replace(layer, norms=AFTER))


def _phi3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Read projections of one input from one tensor."""
    return replace(spec, fused=_FUSED_PROJECTIONS)


def _experts(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Put experts in place of the MLP of every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    for name in names:
        value = getattr(config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _wrong(f"{name} must be a positive integer, got {value!r}")
    count, used, size, step = (getattr(config, name) for name in names)
    if used > count:
        raise _wrong(f"num_experts_per_tok {used} is more than num_experts {count}")
    dense = config.mlp_only_layers
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < spec.num_layers for layer in dense):
        raise _wrong(f"mlp_only_layers must be a list of layers below {spec.num_layers}, got {dense!r}")
    if config.hidden_act not in ("silu", "swish"):
        raise _wrong(f"hidden_act {config.hidden_act!r} is not supported by experts; only silu is")
    experts = Experts(count, used, size, is_normalised=bool(config.norm_topk_prob))
    layers = (
        layer if index in dense or (index + 1) % step else replace(layer, feed_forward=None, experts=experts)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _qwen2_moe(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Put experts in place of MLPs as `_experts` does, each layer with an MLP of all rows beside them, which has a gate."""
    shared, biases = config.shared_expert_intermediate_size, bool(config.qkv_bias)
    if not isinstance(shared, int) or isinstance(shared, bool) or shared < 1:
        raise _wrong(f"shared_expert_intermediate_size must be a positive integer, got {shared!r}")

    def change(layer: LayerSpec) -> LayerSpec:
        experts = layer.experts and replace(layer.experts, shared=Mlp(shared), gates_shared=True)
        return replace(layer, mixer=replace(layer.mixer, qkv_bias=biases), experts=experts)

    return _experts(config, spec).map(change)


def _seed_oss(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let the bias of the output projection have a key of its own."""
    o_bias = bool(config.attention_out_bias)
    return spec.map(lambda layer: replace(layer, mixer=replace(layer.mixer, o_bias=o_bias)))


def _smollm3(config: PretrainedConfig, spec: DecoderSpec) -> DecoderSpec:
    """Let the layers without rotary embedding see no positions."""
    rotates = config.no_rope_layers
    if not isinstance(rotates, list) or len(rotates) < spec.num_layers:
        raise _wrong(f"no_rope_layers must have an entry for each of {spec.num_layers} layers, got {rotates!r}")
    layers = [
        layer if rotate else replace(layer, mixer=replace(layer.mixer, rotary=None))
        for layer, rotate in zip(spec.layers, rotates, strict=False)
    ]
    return replace(spec, layers=tuple(layers))


FAMILIES = {
    "llama": Family("Llama 2/3.x", ("Llama", "LLaMA"), None, None, None, None, "none"),
    "mistral": Family("Mistral", ("Mistral",), False, False, False, None, "all"),
    # transformers reads a Mistral configuration with `layer_types` as Ministral's.
    "ministral": Family("Ministral", ("Ministral", "Mistral"), False, False, False, None, "layer_types"),
    "ministral3": Family("Ministral 3", ("Ministral3",), False, False, False, None, "all", deltas=_ministral3),
    "qwen2": Family("Qwen2/2.5", ("Qwen2",), True, False, False, None, "layer_types"),
    "qwen3": Family("Qwen3", ("Qwen3",), None, None, False, "head", "layer_types"),
    "qwen2_moe": Family("Qwen2 MoE", ("Qwen2Moe",), None, False, False, None, "layer_types", deltas=_qwen2_moe),
    "qwen3_moe": Family("Qwen3 MoE", ("Qwen3Moe",), None, None, False, "head", "all", deltas=_experts),
    "gemma": Family("Gemma", ("Gemma",), None, None, False, None, "none", deltas=_gemma),
    "gemma3_text": Family(
        "Gemma 3",
        ("Gemma3", "Gemma3Text"),
        None,
        None,
        False,
        "head",
        "layer_types",
        activation_key="hidden_activation",
        limit_is_scaled=True,
        deltas=_gemma3,
    ),
    "granite": Family("Granite 3", ("Granite",), None, None, None, None, "none", classifies=False, deltas=_granite),
    "granitemoehybrid": Family(
        "Granite 4", ("GraniteMoeHybrid",), None, None, False, None, "none", classifies=False, deltas=_granite_hybrid
    ),
    "olmo2": Family("OLMo 2", ("Olmo2",), None, None, False, "whole", "none", deltas=_olmo2),
    "phi3": Family("Phi-3/4-mini", ("Phi3",), False, False, False, None, "all", partial_rotary=True, deltas=_phi3),
    "seed_oss": Family("Seed-OSS", ("SeedOss",), None, None, None, None, "none", deltas=_seed_oss),
    "smollm3": Family("SmolLM3", ("SmolLM3",), None, None, None, None, "layer_types", deltas=_smollm3),
}
"""Supported families by `model_type`.

Source: `configuration_*.py` and `modeling_*.py` of each family in https://github.com/huggingface/transformers
"""
NESTED = {"gemma3": ("Gemma3", ("gemma3_text",)), "mistral3": ("Mistral3", ("mistral", "ministral3"))}
"""First part of the names of classes, and families of the language part, of multimodal models by `model_type`."""


def language_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the decoder: that of a multimodal model's language part, or `config` itself.

    Args:
        config: configuration of the checkpoint.

    Raises:
        ModelError: the language part is of a family that the multimodal model cannot have.
    """
    if config.model_type not in NESTED:
        return config
    _, kinds = NESTED[config.model_type]
    part = copy.copy(config.text_config)
    if part.model_type not in kinds:
        raise _wrong(f"text_config: model_type {part.model_type!r} of a {config.model_type} model must be {' or '.join(kinds)}")
    part.architectures, part.tie_word_embeddings = None, config.tie_word_embeddings
    for key in ("dtype", "eos_token_id"):
        if (value := getattr(config, key, None)) is not None:
            setattr(part, key, value)
    return part


def spec_from_config(config: PretrainedConfig, max_model_len: int | None = None) -> DecoderSpec:
    """Return the decoder's shape from a Hugging Face configuration.

    Args:
        config: configuration of the checkpoint.
        max_model_len: positions that the engine uses, by which a rotary embedding of two lengths is chosen; None for all.

    Raises:
        ModelError: the architecture or one of its settings is not supported.
    """
    if config.model_type in NESTED:
        return _nested(config, max_model_len)
    family, architecture = _family(config)
    is_classifier = architecture.endswith(_CLASSIFIER)
    activation = _activation(family, config)
    _refuse_foreign_keys(config)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "num_key_value_heads", "max_position_embeddings", *(["num_labels"] if is_classifier else [])):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise _wrong(f"{name} must be a positive integer, got {value!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise _wrong(f"head_dim must be a positive even integer, got {head_dim!r}")
    # transformers reads `original_max_position_embeddings` beside the RoPE parameters only when a model is built.
    config.standardize_rope_params()
    ropes, limit = _rope_parameters(config), config.max_position_embeddings
    rotaries = {
        kind: make_rotary(rope, head_dim, limit, max_model_len or limit, partial=family.partial_rotary)
        for kind, rope in ropes.items()
    }
    limit = _max_model_len(family, config, ropes[FULL])  # the parameters have been checked
    attention = Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=None,
        qkv_bias=_decided(family.qkv_bias, config, "attention_bias"),
        o_bias=_decided(family.o_bias, config, "attention_bias"),
        qk_norm=family.qk_norm,
    )
    mlp = Mlp(config.intermediate_size, _decided(family.mlp_bias, config, "mlp_bias"), activation)
    kinds, window = _layer_kinds(family, config, limit)
    mixers = {FULL: replace(attention, rotary=rotaries[FULL])}
    mixers[WINDOWED] = replace(attention, rotary=rotaries[WINDOWED], window=window)
    spec = DecoderSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind in kinds),
        norm_eps=_factor(config, "rms_norm_eps"),
        tie_embeddings=bool(config.tie_word_embeddings),
        max_model_len=limit,
        num_labels=config.num_labels if is_classifier else None,
    )
    return family.deltas(config, spec)


def _nested(config: PretrainedConfig, max_model_len: int | None) -> DecoderSpec:
    """Return the shape of a multimodal model's language part."""
    prefix, _ = NESTED[config.model_type]
    architecture = prefix + _MULTIMODAL
    if (named := (config.architectures or [architecture])[0]) not in (architecture, prefix + _BARE):
        raise _wrong(f"architectures {named!r} of model_type {config.model_type!r} is not supported; only {architecture} is")
    _refuse_foreign_keys(config)
    try:
        spec = spec_from_config(language_part(config), max_model_len)
    except ModelError as error:
        raise ModelError(f"text_config: {error}") from None
    return replace(spec, architecture=architecture, is_nested=True, logit_cap=None)  # which these classes do not read


def _factor(config: PretrainedConfig, key: str) -> float:
    """Return a number of the configuration that must be positive."""
    value = getattr(config, key)
    if not is_positive(value):
        raise _wrong(f"{key} must be a positive finite number, got {value!r}")
    return float(value)


def _wrong(text: str) -> ModelError:
    return ModelError(f"configuration: {text}")


def _family(config: PretrainedConfig) -> tuple[Family, str]:
    """Return the family of `model_type`, and the class that `architectures` names.

    As in transformers, `model_type` decides the family. A checkpoint of the bare model, or without `architectures`, is a
    language model.
    """
    named = (config.architectures or [None])[0]
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise unsupported(f"model_type {config.model_type!r}")
    if named is None or named in [prefix + _BARE for prefix in family.prefixes]:
        return family, family.prefixes[0] + _LANGUAGE_MODEL
    if named in _classes(family):
        return family, named
    if any(named in (*_classes(other), *(prefix + _BARE for prefix in other.prefixes)) for other in FAMILIES.values()):
        raise _wrong(
            f"architectures {named!r} and model_type {config.model_type!r} name two families; correct the wrong "
            "one in config.json"
        )
    raise unsupported(f"architecture {named!r}")


def _classes(family: Family) -> list[str]:
    heads = (_LANGUAGE_MODEL, _CLASSIFIER) if family.classifies else (_LANGUAGE_MODEL,)
    return [prefix + head for head in heads for prefix in family.prefixes]


def unsupported(what: str) -> ModelError:
    """Return the error for a model of no supported family.

    Args:
        what: key and value of the configuration that name the model.
    """
    known = [f"{family.prefixes[0]}{_LANGUAGE_MODEL} ({kind})" for kind, family in FAMILIES.items()]
    known += [f"{prefix}{_MULTIMODAL} ({kind})" for kind, (prefix, _) in NESTED.items()]
    return ModelError(f"{what} is not supported; supported are {', '.join(known)}, and {_CLASSIFIER} classes of most")


def _refuse_foreign_keys(config: PretrainedConfig) -> None:
    """Raise if a key that no class reads, but transformers itself, asks for something that is not supported."""
    if getattr(config, "quantization", None):
        raise ModelError("quantized checkpoints of MLX (quantization) are not supported; use an unquantized one")
    if not getattr(config, "is_causal", True):
        raise _wrong(f"is_causal is {config.is_causal}: bidirectional attention is not supported")
    if getattr(config, "is_heterogeneous", False):
        raise _wrong("per_layer_config: layers of different shapes are not supported")
    if weights := getattr(config, "transformers_weights", None):
        raise _wrong(f"transformers_weights {weights!r} is not supported; rename the file to model.safetensors")


def _decided(by_family: bool | None, config: PretrainedConfig, key: str) -> bool:
    return bool(getattr(config, key, False)) if by_family is None else by_family


def _activation(family: Family, config: PretrainedConfig) -> Literal["silu", "gelu_tanh"]:
    """Return the MLP's activation."""
    name = str(getattr(config, family.activation_key))
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{family.activation_key} {name!r} is not supported by {family.name}; only {known} are")
    return _ACTIVATIONS[name]


def _rope_parameters(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the parameters of the rotary embedding of each kind of layer, which most families have in common."""
    parameters = config.rope_parameters
    if FULL in parameters:
        return {kind: parameters[kind] for kind in (FULL, WINDOWED)}
    return {FULL: parameters, WINDOWED: parameters}


def _layer_kinds(family: Family, config: PretrainedConfig, max_model_len: int) -> tuple[list[str], int | None]:
    """Return the kind of each layer, and the window of those with one. A window of all positions of the model is none."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if family.windows == "none" or (family.windows == "all" and window is None):
        return [FULL] * layers, None
    kinds = [WINDOWED] * layers if family.windows == "all" else list(config.layer_types)
    if unknown := sorted(set(kinds) - {FULL, WINDOWED}):
        raise ModelError(f"layer type {unknown[0]!r} is not supported by {family.name}")
    if len(kinds) != layers:
        raise _wrong(f"layer_types has {len(kinds)} entries for {layers} layers")
    if WINDOWED not in kinds:
        return kinds, None
    if not isinstance(window, int) or window < 1:
        raise _wrong(f"layers with sliding_attention need a sliding_window, got {window!r}")
    return kinds, None if window >= max_model_len else window


def _max_model_len(family: Family, config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    """Return the positions that the checkpoint supports. A scaling factor counts if it extends the configured length."""
    length = int(config.max_position_embeddings)
    if rope.get("rope_type") == "linear" and not family.limit_is_scaled:
        return int(length * rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or length
        return max(length, int(original * (rope.get("factor") or 1)))
    return length
