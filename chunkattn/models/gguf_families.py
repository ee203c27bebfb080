"""The families in GGUF files: what each calls its settings, and how its tensors are stored.

Source: `conversion/*.py` and `src/models/*.cpp` of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunkattn.models.families import FULL, RECURRENT, WINDOWED
from chunkattn.models.gguf_file import GGUFFile

Settings = dict[str, Any]
"""Keys of a Hugging Face configuration."""

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LAYERS_OF_GEMMA3_27B = 62
"""Number of layers by which llama.cpp tells the one Gemma 3 whose scores have another scale."""
_LAYERS_TO_ONE_WITHOUT_ROTARY = 4
DRAFTS = "nextn_predict_layers"
"""Key with the number of last blocks that predict further tokens. llama.cpp computes the logits without them."""
_INTERVAL = 4
"""Distance of the layers with attention in a file of a hybrid model that names none."""
_SHARED = {"expert_shared_count": (0, "shared experts"), "expert_shared_feed_forward_length": (0, "shared experts")}
_WITHOUT = {
    "expert_group_count": (1, "groups of experts"),
    "expert_weights_scale": (1.0, "scaled factors of experts"),
    "expert_gating_func": (1, "routers without softmax"),
    "leading_dense_block_count": (0, "layers without experts"),
    "router_logit_softcapping": (0.0, "soft caps of routers"),
}
"""Keys about experts with the value that changes nothing, as 0 does, and the meaning of any other. `_SHARED` counts for models
without shared experts."""


@dataclass(frozen=True)
class GGUFFamily:
    """A value of `general.architecture`.

    Attributes:
        model_type: the family in transformers.
        name: the Hugging Face class of its language models.
        interleaves: whether llama.cpp rotates neighbouring rows of queries and keys, so that its converter interleaves the
            two halves of each head.
        windows: which layers have the window that a file names: none, so that a window is refused, all, or some.
        tiles: whether llama.cpp's converter moves the value heads of recurrent layers, see `GGUFOrder`.
        rotates_part: whether `rope.dimension_count` may be less than a head.
        reads: keys that change the forward pass, and that `settings` reads.
        rope_tensors: tensors that hold no parameters, but factors of the rotary embedding, and that `settings` reads.
        settings: returns the settings that are its own. It gets the file and the settings that all families have.
    """

    model_type: str
    name: str
    interleaves: bool = False
    tiles: bool = False
    windows: str = "none"
    rotates_part: bool = False
    reads: tuple[str, ...] = ()
    rope_tensors: tuple[str, ...] = ()
    settings: Callable[[GGUFFile, Settings], Settings] = lambda file, common: {}


def _llama(file: GGUFFile, common: Settings) -> Settings:
    """Call a file with a window Mistral's: Llama has none, and llama.cpp has no name of its own for Mistral."""
    if common["sliding_window"] is None:
        return {}
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def _mistral3(file: GGUFFile, common: Settings) -> Settings:
    """Tell Ministral 3, whose queries grow with the position, from Mistral 3.1."""
    beta, rope = _number(file, ".attention.temperature_scale", 0.0), common["rope_parameters"]
    if multiplier := _number(file, ".rope.scaling.yarn_log_multiplier", 0.0):
        rope = rope | {"mscale": 1.0, "mscale_all_dim": multiplier}
    if not beta:
        return {"rope_parameters": rope}
    if "original_max_position_embeddings" not in rope:
        raise file.fault(f"{file.full('.attention.temperature_scale')} is set, which needs RoPE scaling of type yarn")
    return {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": rope | {"llama_4_scaling_beta": beta},
    }


def _gemma3(file: GGUFFile, common: Settings) -> Settings:
    """Return the two rotary embeddings and the kinds of the layers: every sixth one has no window."""
    layers, local = common["num_hidden_layers"], _number(file, ".rope.freq_base_swa", 10000.0)
    is_27b = layers == _LAYERS_OF_GEMMA3_27B
    return {
        "query_pre_attn_scalar": common["hidden_size"] // common["num_attention_heads"] if is_27b else common["head_dim"],
        "final_logit_softcapping": _number(file, ".final_logit_softcapping", 0.0) or None,
        "layer_types": _layer_types(file, layers, 6) if common["sliding_window"] else [FULL] * layers,
        "rope_parameters": {
            FULL: common["rope_parameters"],
            WINDOWED: {"rope_type": "default", "rope_theta": local},
        },
    }


def _granite(file: GGUFFile, common: Settings) -> Settings:
    """Return the four factors; one that is missing, or 0, is none."""
    if not file.get(".rope.scaling.finetuned", bool, True):
        raise file.fault("granite.rope.scaling.finetuned is false: Granite without rotary embedding is not supported in GGUF")
    return {
        "embedding_multiplier": _number(file, ".embedding_scale", 0.0) or 1.0,
        "attention_multiplier": _number(file, ".attention.scale", 0.0) or common["head_dim"] ** -0.5,
        "residual_multiplier": _number(file, ".residual_scale", 0.0) or 1.0,
        "logits_scaling": float(file.need(".logit_scale", (int, float))),
    }


def _olmo2(file: GGUFFile, common: Settings) -> Settings:
    """Refuse windows, even of all positions, with a scaling or a base of their own: llama.cpp scales full layers only."""
    key, rope = ".attention.sliding_window", common["rope_parameters"]
    has_own = _number(file, ".rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]
    if file.get(key, (int, list), 0) and (has_own or rope["rope_type"] != "default"):
        raise file.fault(f"{file.full(key)} beside RoPE scaling or rope.freq_base_swa is not supported in GGUF")
    return {}


def _phi3(file: GGUFFile, common: Settings) -> Settings:
    """Return the share of each head that is rotated, and the factors of longrope, which are tensors."""
    rope, rotated = common["rope_parameters"], file.get(".rope.dimension_count", int, common["head_dim"])
    rope = rope | {"partial_rotary_factor": rotated / common["head_dim"]}
    if file.tensors.keys() & {_LONG, _SHORT}:
        original = file.need(".rope.scaling.original_context_length", int)
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(file, _LONG, rotated),
            "short_factor": _factors(file, _SHORT, rotated),
            "original_max_position_embeddings": original,
            "attention_factor": _number(file, ".rope.scaling.attn_factor", 1.0),
        }
        return {"rope_parameters": rope, "original_max_position_embeddings": original}
    return {"rope_parameters": rope}


def _smollm3(file: GGUFFile, common: Settings) -> Settings:
    """Return the layers with rotary embedding: three of four, which the file does not say."""
    layers = range(1, common["num_hidden_layers"] + 1)
    return {"no_rope_layers": [int(layer % _LAYERS_TO_ONE_WITHOUT_ROTARY != 0) for layer in layers]}


def _qwen3moe(file: GGUFFile, common: Settings) -> Settings:
    """Return the settings of experts without shared ones."""
    return _experts(file, _SHARED | _WITHOUT)


def _experts(file: GGUFFile, refused: dict[str, tuple[float, str]]) -> Settings:
    """Return the settings of experts. llama.cpp divides the factors of a row's experts by their sum."""
    for key, (plain, meaning) in refused.items():
        if file.get(f".{key}", (int, float), plain) not in (plain, 0):
            raise file.fault(f"{file.full(f'.{key}')} is set: {meaning} are not supported in GGUF")
    if not file.get(".expert_weights_norm", bool, True):
        raise file.fault(f"{file.full('.expert_weights_norm')} is false, which llama.cpp ignores; convert the model anew")
    return {
        "num_experts": file.need(".expert_count", int),
        "num_experts_per_tok": file.need(".expert_used_count", int),
        "moe_intermediate_size": file.need(".expert_feed_forward_length", int),
        "norm_topk_prob": True,
    }


def _hybrid(file: GGUFFile, common: Settings) -> Settings:
    """Return the kind of each layer, the sizes of the recurrent ones, and the share of each head that is rotated."""
    sizes = {key: file.need(f".ssm.{key}", int) for key in ("conv_kernel", "state_size", "group_count", "time_step_rank")}
    heads, width = sizes["time_step_rank"], file.need(".ssm.inner_size", int)
    if heads < 1 or width % heads:
        raise file.fault(f"{file.full('.ssm.inner_size')} {width} is no multiple of ssm.time_step_rank {heads}")
    rotated = file.get(".rope.dimension_count", int, common["head_dim"])
    return {
        "layer_types": _recurrent_layers(file, common["num_hidden_layers"]),
        "linear_num_key_heads": sizes["group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": sizes["state_size"],
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": sizes["conv_kernel"],
        "rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": rotated / common["head_dim"]},
    }


def _hybrid_experts(file: GGUFFile, common: Settings) -> Settings:
    """Return the settings of recurrent layers, and of experts beside a shared one in every layer."""
    shared = {"shared_expert_intermediate_size": file.need(".expert_shared_feed_forward_length", int)}
    return _hybrid(file, common) | _experts(file, _WITHOUT) | shared | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _recurrent_layers(file: GGUFFile, layers: int) -> list[str]:
    """Return the kind of each layer: by a list of the recurrent ones, which may count drafts too, or by a period.

    Args:
        file: opened GGUF file.
        layers: number of layers without drafts.
    """
    key, period = ".attention.recurrent_layers", file.get(".full_attention_interval", int, _INTERVAL)
    if period < 1:
        raise file.fault(f"{file.full('.full_attention_interval')} must be positive, got {period}")
    recurrent = file.array(key, bool)
    if recurrent is None:
        recurrent = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(recurrent) < layers:
        raise file.fault(f"{file.full(key)} has {len(recurrent)} entries for {layers} layers")
    return [RECURRENT if is_recurrent else FULL for is_recurrent in recurrent[:layers]]


GGUF_FAMILIES = {
    "llama": GGUFFamily("llama", "LlamaForCausalLM", interleaves=True, windows="all", settings=_llama),
    "mistral3": GGUFFamily(
        "mistral",
        "MistralForCausalLM",
        interleaves=True,
        windows="all",
        reads=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
        settings=_mistral3,
    ),
    "qwen2": GGUFFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFFamily("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GGUFFamily("qwen3_moe", "Qwen3MoeForCausalLM", reads=("expert_count",), settings=_qwen3moe),
    "qwen35": GGUFFamily(
        "qwen3_5_text", "Qwen3_5ForCausalLM", tiles=True, rotates_part=True, reads=(DRAFTS,), settings=_hybrid
    ),
    "qwen35moe": GGUFFamily(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        tiles=True,
        rotates_part=True,
        reads=(DRAFTS, "expert_count"),
        settings=_hybrid_experts,
    ),
    "qwen3next": GGUFFamily(
        "qwen3_next", "Qwen3NextForCausalLM", rotates_part=True, reads=(DRAFTS, "expert_count"), settings=_hybrid_experts
    ),
    "gemma": GGUFFamily("gemma", "GemmaForCausalLM"),
    "gemma3": GGUFFamily(
        "gemma3_text", "Gemma3ForCausalLM", windows="some", reads=("final_logit_softcapping",), settings=_gemma3
    ),
    "granite": GGUFFamily(
        "granite",
        "GraniteForCausalLM",
        interleaves=True,
        reads=("attention.scale", "logit_scale", "residual_scale", "embedding_scale"),
        settings=_granite,
    ),
    "olmo2": GGUFFamily("olmo2", "Olmo2ForCausalLM", settings=_olmo2),
    "phi3": GGUFFamily(
        "phi3", "Phi3ForCausalLM", windows="all", rotates_part=True, rope_tensors=(_LONG, _SHORT), settings=_phi3
    ),
    "seed_oss": GGUFFamily("seed_oss", "SeedOssForCausalLM"),
    "smollm3": GGUFFamily("smollm3", "SmolLM3ForCausalLM", interleaves=True, settings=_smollm3),
}
"""Supported values of `general.architecture`. Files of Mistral and SmolLM2 say `llama`, those of Granite 4's dense models
`granite`."""


def _number(file: GGUFFile, key: str, default: float) -> float:
    return float(file.get(key, (int, float), default))


def _layer_types(file: GGUFFile, layers: int, default: int) -> list[str]:
    """Return the kind of each layer: by a period, whose last layer is full (0 for none), or by a list of the windowed layers.

    Args:
        file: opened GGUF file.
        layers: number of layers.
        default: period of a file that names none.
    """
    key = ".attention.sliding_window_pattern"
    pattern = file.get(key, (int, list), default)
    windowed = pattern if isinstance(pattern, list) else [not pattern or (layer + 1) % pattern != 0 for layer in range(layers)]
    if len(windowed) != layers:
        raise file.fault(f"{file.full(key)} has {len(windowed)} entries for {layers} layers")
    return [WINDOWED if is_windowed else FULL for is_windowed in windowed]


def _factors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    """Return the divisors of the frequencies, one for each pair of rotated elements."""
    if name not in file.tensors:
        raise file.damaged(f"tensor {name!r} is missing")
    if file.shape(name) != (rotated // 2,):
        raise file.fault(f"tensor {name!r} has shape {list(file.shape(name))}, the metadata say {[rotated // 2]}")
    return [float(factor) for factor in file.read(name, np.dtype(np.float32))]
