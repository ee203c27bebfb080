"""Shapes and variations of the supported model families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chunkattn.errors import ModelError
from chunkattn.rope.rotary import RotarySpec, make_rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLASSIFIER = "ForSequenceClassification"

FAMILIES = {
    family + head: name
    for head in ("ForCausalLM", _CLASSIFIER)
    for family, name in {"Llama": "Llama 2/3.x", "Mistral": "Mistral", "Qwen2": "Qwen2/2.5", "Qwen3": "Qwen3"}.items()
}
"""Supported Hugging Face architectures, with the name of the family of each."""


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


def spec_from_config(config: PretrainedConfig) -> DecoderSpec:
    """Return the decoder's shape from a Hugging Face configuration.

    Args:
        config: configuration of the checkpoint.

    Raises:
        ModelError: the architecture or one of its settings is not supported.
    """
    architecture = (config.architectures or ["none"])[0]
    if architecture not in FAMILIES:
        supported = ", ".join(f"{a} ({f})" for a, f in FAMILIES.items())
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {supported}")
    family, is_classifier = architecture.partition("For")[0], architecture.endswith(_CLASSIFIER)
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act {config.hidden_act!r} is not supported by {architecture}; only 'silu' is")
    if getattr(config, "quantization_config", None):
        raise ModelError("quantized checkpoints (quantization_config) are not supported; use an unquantized one")
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        *(["num_labels"] if is_classifier else []),
    ):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"configuration: {name} must be a positive integer, got {value!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ModelError(f"configuration: head_dim must be a positive even integer, got {head_dim!r}")
    attention_bias = bool(getattr(config, "attention_bias", False))
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"layer type {unknown[0]!r} is not supported by {architecture}")
    if "sliding_attention" in types and (not isinstance(window, int) or window < 1):
        raise ModelError(f"configuration: layers with sliding_attention need a sliding_window, got {window!r}")
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        qkv_bias=family == "Qwen2" or attention_bias,
        o_bias=family != "Qwen2" and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "Qwen3",
        tie_embeddings=bool(config.tie_word_embeddings),
        windows=tuple(window if t == "sliding_attention" else None for t in types),
        rotary=make_rotary(config.rope_parameters, head_dim, config.max_position_embeddings),
        max_model_len=_max_model_len(config),
        num_labels=config.num_labels if is_classifier else None,
    )


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
