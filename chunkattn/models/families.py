"""The supported model families, and the decoder's shape from a Hugging Face configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from chunkattn.errors import ModelError
from chunkattn.models import family_deltas as own
from chunkattn.models.family_deltas import FULL, RECURRENT, WINDOWED, delta_net, factor, wrong
from chunkattn.models.mixers import Attention, GatedDeltaNet
from chunkattn.models.spec import DecoderSpec, LayerSpec, Mlp
from chunkattn.rope.rotary import make_rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLASSIFIER, _LANGUAGE_MODEL, _BARE = "ForSequenceClassification", "ForCausalLM", "Model"
_MULTIMODAL = "ForConditionalGeneration"
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of the MLP by their names in transformers."""


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
        is_hybrid: whether the layers of type `linear_attention` in `layer_types` are recurrent, and attention has a gate.
        width_key: key of the MLP's width.
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
    is_hybrid: bool = False
    width_key: str = "intermediate_size"
    deltas: Callable[[PretrainedConfig, DecoderSpec], DecoderSpec] = lambda config, spec: spec


_HYBRID: dict[str, Any] = {"is_hybrid": True, "partial_rotary": True}
FAMILIES = {
    "llama": Family("Llama 2/3.x", ("Llama", "LLaMA"), None, None, None, None, "none"),
    "mistral": Family("Mistral", ("Mistral",), False, False, False, None, "all"),
    # transformers reads a Mistral configuration with `layer_types` as Ministral's.
    "ministral": Family("Ministral", ("Ministral", "Mistral"), False, False, False, None, "layer_types"),
    "ministral3": Family("Ministral 3", ("Ministral3",), False, False, False, None, "all", deltas=own.ministral3),
    "qwen2": Family("Qwen2/2.5", ("Qwen2",), True, False, False, None, "layer_types"),
    "qwen3": Family("Qwen3", ("Qwen3",), None, None, False, "head", "layer_types"),
    "qwen2_moe": Family("Qwen2 MoE", ("Qwen2Moe",), None, False, False, None, "layer_types", deltas=own.qwen2_moe),
    "qwen3_moe": Family("Qwen3 MoE", ("Qwen3Moe",), None, None, False, "head", "all", deltas=own.experts),
    "gemma": Family("Gemma", ("Gemma",), None, None, False, None, "none", deltas=own.gemma),
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
        deltas=own.gemma3,
    ),
    "qwen3_5_text": Family(
        "Qwen3.5", ("Qwen3_5", "Qwen3_5Text"), None, None, False, "head", "none", **_HYBRID, deltas=own.qwen3_5
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5 MoE",
        ("Qwen3_5Moe", "Qwen3_5MoeText"),
        None,
        None,
        False,
        "head",
        "none",
        classifies=False,
        width_key="moe_intermediate_size",
        **_HYBRID,
        deltas=own.qwen3_5_moe,
    ),
    "qwen3_next": Family("Qwen3-Next", ("Qwen3Next",), None, None, False, "head", "none", **_HYBRID, deltas=own.qwen3_next),
    "granite": Family("Granite 3", ("Granite",), None, None, None, None, "none", classifies=False, deltas=own.granite),
    "granitemoehybrid": Family(
        "Granite 4", ("GraniteMoeHybrid",), None, None, False, None, "none", classifies=False, deltas=own.granite_hybrid
    ),
    "olmo2": Family("OLMo 2", ("Olmo2",), None, None, False, "whole", "none", deltas=own.olmo2),
    "phi3": Family("Phi-3/4-mini", ("Phi3",), False, False, False, None, "all", partial_rotary=True, deltas=own.phi3),
    "seed_oss": Family("Seed-OSS", ("SeedOss",), None, None, None, None, "none", deltas=own.seed_oss),
    "smollm3": Family("SmolLM3", ("SmolLM3",), None, None, None, None, "layer_types", deltas=own.smollm3),
}
"""Supported families by `model_type`.

Source: `configuration_*.py` and `modeling_*.py` of each family in https://github.com/huggingface/transformers
"""
NESTED = {
    "gemma3": ("Gemma3", ("gemma3_text",)),
    "mistral3": ("Mistral3", ("mistral", "ministral3")),
    "qwen3_5": ("Qwen3_5", ("qwen3_5_text",)),
    "qwen3_5_moe": ("Qwen3_5Moe", ("qwen3_5_moe_text",)),
}
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
        raise wrong(f"text_config: model_type {part.model_type!r} of a {config.model_type} model must be {' or '.join(kinds)}")
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
    sizes = ("vocab_size", "hidden_size", family.width_key, "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "num_key_value_heads", "max_position_embeddings", *(["num_labels"] if is_classifier else [])):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise wrong(f"{name} must be a positive integer, got {value!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise wrong(f"head_dim must be a positive even integer, got {head_dim!r}")
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
        output_gate=family.is_hybrid,
    )
    mlp = Mlp(getattr(config, family.width_key), _decided(family.mlp_bias, config, "mlp_bias"), activation)
    kinds, window = _layer_kinds(family, config, limit)
    mixers: dict[str, Attention | GatedDeltaNet] = {FULL: replace(attention, rotary=rotaries[FULL])}
    mixers[WINDOWED] = replace(attention, rotary=rotaries[WINDOWED], window=window)
    if family.is_hybrid:
        mixers[RECURRENT] = delta_net(config)
    spec = DecoderSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind in kinds),
        norm_eps=factor(config, "rms_norm_eps"),
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
        raise wrong(f"architectures {named!r} of model_type {config.model_type!r} is not supported; only {architecture} is")
    _refuse_foreign_keys(config)
    try:
        spec = spec_from_config(language_part(config), max_model_len)
    except ModelError as error:
        raise ModelError(f"text_config: {error}") from None
    return replace(spec, architecture=architecture, is_nested=True, logit_cap=None)  # which these classes do not read


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
        raise wrong(
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
        raise wrong(f"is_causal is {config.is_causal}: bidirectional attention is not supported")
    if getattr(config, "is_heterogeneous", False):
        raise wrong("per_layer_config: layers of different shapes are not supported")
    if weights := getattr(config, "transformers_weights", None):
        raise wrong(f"transformers_weights {weights!r} is not supported; rename the file to model.safetensors")


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
    if family.is_hybrid:
        return _listed_kinds(family, config, {FULL, RECURRENT}), None
    if family.windows == "none" or (family.windows == "all" and window is None):
        return [FULL] * layers, None
    kinds = [WINDOWED] * layers if family.windows == "all" else _listed_kinds(family, config, {FULL, WINDOWED})
    if WINDOWED not in kinds:
        return kinds, None
    if not isinstance(window, int) or window < 1:
        raise wrong(f"layers with sliding_attention need a sliding_window, got {window!r}")
    return kinds, None if window >= max_model_len else window


def _listed_kinds(family: Family, config: PretrainedConfig, known: set[str]) -> list[str]:
    """Return `layer_types`, each of some known ones."""
    kinds, layers = list(config.layer_types), config.num_hidden_layers
    if unknown := sorted(set(kinds) - known):
        raise ModelError(f"layer type {unknown[0]!r} is not supported by {family.name}")
    if len(kinds) != layers:
        raise wrong(f"layer_types has {len(kinds)} entries for {layers} layers")
    return kinds


def _max_model_len(family: Family, config: PretrainedConfig, rope: Mapping[str, Any]) -> int:
    """Return the positions that the checkpoint supports. A scaling factor counts if it extends the configured length."""
    length = int(config.max_position_embeddings)
    if rope.get("rope_type") == "linear" and not family.limit_is_scaled:
        return int(length * rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or length
        return max(length, int(original * (rope.get("factor") or 1)))
    return length
