"""Shapes and variations of the supported model families."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chunkattn.errors import ModelError
from chunkattn.rope.rotary import RotarySpec, make_rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLASSIFIER, _LANGUAGE_MODEL, _BARE = "ForSequenceClassification", "ForCausalLM", "Model"
_WINDOWED, _FULL = "sliding_attention", "full_attention"
EMBEDDING, HEAD, CLASSES = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
"""Names of the embedding, of a language model's head and of a classifier's, in Hugging Face checkpoints."""


@dataclass(frozen=True)
class Family:
    """Facts of one model family that its class in transformers decides, whatever a configuration holds.

    Attributes:
        name: name for readers.
        prefixes: first part of the names of its classes; checkpoints may name the class by any of them.
        qkv_bias: whether the query, key and value projections have biases; None if `attention_bias` decides.
        o_bias: whether the output projection has a bias; None if `attention_bias` decides.
        mlp_bias: whether the MLP's projections have biases; None if `mlp_bias` decides.
        qk_norm: whether queries and keys are normalised per head.
        windows: layers with a sliding window: none, all if `sliding_window` is set, or those of `layer_types`.
    """

    name: str
    prefixes: tuple[str, ...]
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    windows: Literal["none", "all", "layer_types"]


FAMILIES = {
    "llama": Family("Llama 2/3.x", ("Llama", "LLaMA"), None, None, None, False, "none"),
    "mistral": Family("Mistral", ("Mistral",), False, False, False, False, "all"),
    # transformers reads a Mistral configuration with `layer_types` as Ministral's.
    "ministral": Family("Ministral", ("Ministral", "Mistral"), False, False, False, False, "layer_types"),
    "qwen2": Family("Qwen2/2.5", ("Qwen2",), True, False, False, False, "layer_types"),
    "qwen3": Family("Qwen3", ("Qwen3",), None, None, False, True, "layer_types"),
}
"""Supported families by `model_type`.

Source: `configuration_*.py` and `modeling_*.py` of each family in https://github.com/huggingface/transformers
"""


@dataclass(frozen=True, eq=False)
class DecoderSpec:
    """Shape and variations of one decoder; sizes are in elements.

    Attributes:
        architecture: name of the Hugging Face class.
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: number of layers.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        head_dim: size of a head.
        norm_eps: epsilon of the RMS norms.
        qkv_bias: whether the query, key and value projections have biases.
        o_bias: whether the output projection has a bias.
        mlp_bias: whether the MLP's projections have biases.
        qk_norm: whether queries and keys are normalised per head.
        tie_embeddings: whether the language model's head is the embedding.
        windows: sliding window of each layer in tokens; None for full attention.
        rotary: frequencies of the rotary embedding.
        max_model_len: number of positions that the checkpoint supports.
        num_labels: number of classes of a sequence classifier; None for a language model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    rotary: RotarySpec
    max_model_len: int
    num_labels: int | None

    @property
    def sliding_window(self) -> int | None:
        """Return the checkpoint's sliding window in tokens, or None if no layer has a sliding window."""
        return next((w for w in self.windows if w is not None), None)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its name in checkpoints, `[out, in]` for a matrix."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linear = {
            "self_attn.q_proj": (q_size, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv_size, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, q_size, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            **({f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"} if self.qk_norm else {}),
            **{f"{name}.weight": (rows, columns) for name, (rows, columns, _) in linear.items()},
            **{f"{name}.bias": (rows,) for name, (rows, _, has_bias) in linear.items() if has_bias},
        }
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if self.num_labels is not None:
            shapes[CLASSES] = (self.num_labels, hidden)
        elif not self.tie_embeddings:
            shapes[HEAD] = (self.vocab_size, hidden)
        return shapes


def spec_from_config(config: PretrainedConfig) -> DecoderSpec:
    """Return the decoder's shape from a Hugging Face configuration.

    Args:
        config: configuration of the checkpoint.

    Raises:
        ModelError: the architecture or one of its settings is not supported.
    """
    family, architecture = _family(config)
    is_classifier = architecture.endswith(_CLASSIFIER)
    _refuse_foreign_forward_passes(config, architecture)
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
    epsilon = config.rms_norm_eps
    if not isinstance(epsilon, (int, float)) or not 0 <= epsilon < math.inf:
        raise _wrong(f"rms_norm_eps must be a finite number that is not negative, got {epsilon!r}")
    # transformers reads `original_max_position_embeddings` beside the RoPE parameters only when a model is built.
    config.standardize_rope_params()
    rotary = make_rotary(config.rope_parameters, head_dim, config.max_position_embeddings)
    max_model_len = _max_model_len(config)  # the parameters have been checked
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=epsilon,
        qkv_bias=_decided(family.qkv_bias, config, "attention_bias"),
        o_bias=_decided(family.o_bias, config, "attention_bias"),
        mlp_bias=_decided(family.mlp_bias, config, "mlp_bias"),
        qk_norm=family.qk_norm,
        tie_embeddings=bool(config.tie_word_embeddings),
        windows=_windows(family, config, max_model_len),
        rotary=rotary,
        max_model_len=max_model_len,
        num_labels=config.num_labels if is_classifier else None,
    )


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
    return [prefix + head for head in (_LANGUAGE_MODEL, _CLASSIFIER) for prefix in family.prefixes]


def unsupported(what: str) -> ModelError:
    """Return the error for a model of no supported family.

    Args:
        what: key and value of the configuration that name the model.
    """
    known = ", ".join(f"{family.prefixes[0]}{_LANGUAGE_MODEL} ({kind})" for kind, family in FAMILIES.items())
    return ModelError(f"{what} is not supported; supported are {known} and the {_CLASSIFIER} class of each")


def _refuse_foreign_forward_passes(config: PretrainedConfig, architecture: str) -> None:
    """Raise if a key that every class of transformers obeys asks for something that the decoder does not compute."""
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {config.hidden_act!r} is not supported by {architecture}; only 'silu' is")
    for key in ("quantization_config", "quantization"):  # the second is MLX's
        if getattr(config, key, None):
            raise ModelError(f"quantized checkpoints ({key}) are not supported; use an unquantized one")
    if not getattr(config, "is_causal", True):
        raise _wrong(f"is_causal is {config.is_causal}: bidirectional attention is not supported")
    if getattr(config, "is_heterogeneous", False):
        raise _wrong("per_layer_config: layers of different shapes are not supported")
    if weights := getattr(config, "transformers_weights", None):
        raise _wrong(f"transformers_weights {weights!r} is not supported; rename the file to model.safetensors")


def _decided(by_family: bool | None, config: PretrainedConfig, key: str) -> bool:
    return bool(getattr(config, key, False)) if by_family is None else by_family


def _windows(family: Family, config: PretrainedConfig, max_model_len: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. A window of all positions of the model is none."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if family.windows == "none" or (family.windows == "all" and window is None):
        return (None,) * layers
    types = [_WINDOWED] * layers if family.windows == "all" else config.layer_types
    if unknown := sorted(set(types) - {_FULL, _WINDOWED}):
        raise ModelError(f"layer type {unknown[0]!r} is not supported by {family.name}")
    if len(types) != layers:
        raise _wrong(f"layer_types has {len(types)} entries for {layers} layers")
    if _WINDOWED not in types:
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise _wrong(f"layers with sliding_attention need a sliding_window, got {window!r}")
    if window >= max_model_len:
        return (None,) * layers
    return tuple(window if kind == _WINDOWED else None for kind in types)


def _max_model_len(config: PretrainedConfig) -> int:
    """Return the positions that the checkpoint supports. A scaling factor counts if it extends the configured length."""
    rope = config.rope_parameters
    length = int(config.max_position_embeddings)
    if rope.get("rope_type") == "linear":
        return int(length * rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or length
        return max(length, int(original * (rope.get("factor") or 1)))
    return length
