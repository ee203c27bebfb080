"""The configuration and the decoder's shape that a GGUF file describes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from chunkattn.errors import ModelError
from chunkattn.models.families import spec_from_config
from chunkattn.models.gguf_families import DRAFTS, GGUF_FAMILIES, GGUFFamily
from chunkattn.models.gguf_file import GGUFFile
from chunkattn.models.gguf_vocabulary import read_vocabulary
from chunkattn.models.mixers import Attention
from chunkattn.models.spec import DecoderSpec, LayerSpec
from chunkattn.rope.rotary import RotarySpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_REFUSED = {
    "expert_count": "mixture-of-experts models",
    "attention.scale": "attention scales other than 1 / sqrt(head_dim)",
    "attention.clamp_kqv": "clamped queries, keys and values",
    "attention.max_alibi_bias": "ALiBi biases",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "final_logit_softcapping": "soft caps of logits",
    "attn_logit_softcapping": "soft caps of attention",
    "attention.temperature_scale": "scores that grow with the position",
}
"""Keys, after the architecture's prefix, whose values other than zero change the forward pass in a way that few families have,
those that read them."""

_YARN = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_log_multiplier": 0.0,
}
"""Parameters of YaRN that must have llama.cpp's default if a file has them."""
_NOT_YARN = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 0.0}
"""Parameters that change the other scalings too, with the values that do not."""

ROPE_FACTORS = "rope_freqs.weight"
_QKVZ, _OLD_QKVZ = "linear_attn.in_proj_qkvz", ".ssm_in.weight"
"""Module of Qwen3-Next's folders that files have in two tensors, and the end of the name that old files give it."""
CLASSIFIER = "cls.output"
"""GGUF name of a reranker's head, one row for each class."""


def config_from_gguf(file: GGUFFile) -> PretrainedConfig:
    """Return the Hugging Face configuration that a file's metadata describe.

    Args:
        file: opened GGUF file.

    Raises:
        ModelError: the architecture, or a setting, is not supported, or a key is missing.
    """
    from transformers import AutoConfig

    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise ModelError(f"{file.path} holds no model but general.type {kind!r}; pass the model's own file")
    architecture = file.need("general.architecture", str)
    if architecture not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise file.fault(f"GGUF architecture {architecture!r} is not supported; supported are {known}")
    family = GGUF_FAMILIES[architecture]
    for key, meaning in _REFUSED.items():
        if key not in family.reads and file.get(f".{key}", (int, float, list), 0):
            raise file.fault(f"{architecture}.{key} is set: {meaning} are not supported")
    if not file.get(".attention.causal", bool, True):
        raise file.fault("attention.causal is false: models with bidirectional attention are not supported")

    def integer(key: str, default: int | None = None) -> int:
        name = f".{key}"
        value = file.need(name, (int, list)) if default is None else file.get(name, (int, list), default)
        per_layer = file.array(name, int) or [] if isinstance(value, list) else [value]
        if len(set(per_layer)) != 1:
            raise file.fault(f"{file.full(name)} differs between layers, which is not supported")
        return int(per_layer[0])

    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in file.tensors:
            raise file.damaged(f"tensor {name!r} is missing")
    if len(file.shape("token_embd.weight")) != 2:
        raise file.damaged("tensor 'token_embd.weight' is no matrix")
    indices = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(indices) != (blocks := integer("block_count")):
        raise file.damaged(f"the file has {len(indices)} layers of tensors, block_count says {blocks}")
    layers = blocks - (integer(DRAFTS, 0) if DRAFTS in family.reads else 0)
    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    if heads < 1:
        raise file.fault(f"{architecture}.attention.head_count must be positive, got {heads}")
    head_dim, context = integer("attention.key_length", hidden // heads), integer("context_length")
    for key in ("attention.value_length", *([] if family.rotates_part else ["rope.dimension_count"])):
        if (size := integer(key, head_dim)) != head_dim:
            raise file.fault(f"{architecture}.{key} {size} other than the head size {head_dim} is not supported")
    window = integer("attention.sliding_window", 0)
    if window >= context and family.windows != "some":  # whose windowed layers have a rotary embedding of their own
        window = 0
    if window > 0:
        _refuse_window(file, family, window)
    theta = float(file.get(".rope.freq_base", (int, float), 10000.0))
    classes = _class_names(file)
    settings = {
        "model_type": family.model_type,
        "architectures": ["Qwen3ForSequenceClassification" if classes else family.name],
        **({"id2label": dict(enumerate(classes))} if classes else {}),
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": integer("feed_forward_length", file.get(".expert_feed_forward_length", int)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": float(file.need(".attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": {"rope_theta": theta, **_scaling(file, family)},
        "pad_token_id": None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(read_vocabulary(file).end_ids) or None,
        "dtype": _dtype(file),
        **({} if family.windows == "none" else {"sliding_window": max(window, 0) or None}),
    }
    settings |= family.settings(file, settings)
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers' configurations validate themselves, with errors of many classes
        raise file.fault(f"the metadata describe no valid {architecture} model: {error}") from error


def spec_from_gguf(file: GGUFFile, config: PretrainedConfig, max_model_len: int | None = None) -> DecoderSpec:
    """Return the decoder's shape. Biases and the factors of Llama 3's RoPE show in the tensors only, not in the metadata.

    Args:
        file: opened GGUF file.
        config: `config_from_gguf` of the file.
        max_model_len: see `spec_from_config`.

    Raises:
        ModelError: a setting is not supported.
    """
    try:
        spec = spec_from_config(config, max_model_len)
    except ModelError as error:
        raise file.fault(f"{error}") from None
    spec = _with_split_projections(file, spec)
    qkv_bias, o_bias = "blk.0.attn_q.bias" in file.tensors, "blk.0.attn_output.bias" in file.tensors
    mlp_bias = "blk.0.ffn_down.bias" in file.tensors
    found = {mixer.rotary for mixer in spec.attention.values()}
    rotaries = {rotary: rotary and _with_factors(file, rotary) for rotary in found}

    def from_tensors(layer: LayerSpec) -> LayerSpec:
        mlp = layer.feed_forward
        layer = replace(layer, feed_forward=mlp and replace(mlp, bias=mlp_bias))
        if not isinstance(layer.mixer, Attention):
            return layer
        return layer.with_attention(rotary=rotaries[layer.mixer.rotary], qkv_bias=qkv_bias, o_bias=o_bias)

    return spec.map(from_tensors)


def _with_split_projections(file: GGUFFile, spec: DecoderSpec) -> DecoderSpec:
    """Return Qwen3-Next's shape with two tensors in place of `in_proj_qkvz`, which only old files have.

    Source: `llama_model_qwen3next` of https://github.com/ggml-org/llama.cpp
    """
    fused = dict(spec.fused)
    if _QKVZ not in fused or any(name.endswith(_OLD_QKVZ) for name in file.tensors):
        return spec
    *qkv, _ = fused.pop(_QKVZ)
    turns = tuple((module, count) for module, count in spec.interleaved if module in fused)
    return replace(spec, fused=((_QKVZ.removesuffix("z"), tuple(qkv)), *fused.items()), interleaved=turns)


def _refuse_window(file: GGUFFile, family: GGUFFamily, window: int) -> None:
    """Raise if the family has no windows, or if the file says of which layers and the family has one for all."""
    key, pattern = file.full(".attention.sliding_window"), file.full(".attention.sliding_window_pattern")
    if family.windows == "none":
        raise file.fault(f"{key} {window} is not supported; use the model's safetensors checkpoint")
    if family.windows == "all" and pattern in file.metadata.values:
        raise file.fault(f"{pattern} is not supported; use the model's safetensors checkpoint")


def _class_names(file: GGUFFile) -> list[str]:
    """Return the names of a reranker's classes; empty for a language model.

    llama.cpp reads the classes at the last token, normalises them by a softmax, and reports the first one.

    Raises:
        ModelError: the file is an embedding model, or a reranker in another form.
    """
    from gguf import PoolingType

    key, names_key = file.full(".pooling_type"), file.full(".classifier.output_labels")
    pooling, names = file.get(key, int, 0), file.get(names_key, list, [])
    has_head, ranks = f"{CLASSIFIER}.weight" in file.tensors, pooling == PoolingType.RANK
    if pooling and not ranks:
        known = {kind.value: kind.name.lower() for kind in PoolingType}
        raise file.fault(
            f"{key} is {pooling} ({known.get(pooling, 'unknown')}): embedding models are not supported, only "
            f"language models and rerankers with the head {CLASSIFIER}"
        )
    if not (has_head or ranks or names):
        return []
    if not (has_head and ranks and key.startswith("qwen3.")) or f"{CLASSIFIER}.bias" in file.tensors:
        raise file.fault(
            f"of rerankers, only qwen3 files with the tensor {CLASSIFIER}.weight, no bias, and {key} "
            f"{PoolingType.RANK.value} (rank) are supported; convert the model anew with a recent llama.cpp, or use its "
            "safetensors checkpoint"
        )
    rows = file.shape(f"{CLASSIFIER}.weight")[0]
    if names and len(names) != rows:
        raise file.fault(f"{names_key} names {len(names)} classes, the tensor {CLASSIFIER}.weight has {rows} rows")
    return list(map(str, names)) or [f"LABEL_{row}" for row in range(rows)]


def _with_factors(file: GGUFFile, rotary: RotarySpec) -> RotarySpec:
    """Return the rotary embedding with its frequencies divided by the file's factors, if the file has any."""
    if ROPE_FACTORS not in file.tensors:
        return rotary
    fits = file.shape(ROPE_FACTORS) == (len(rotary.inv_freq),)
    factors = file.read(ROPE_FACTORS, np.dtype(np.float32)) if fits else np.zeros(1, np.float32)
    if not (factors > 0).all():
        raise file.fault(f"tensor {ROPE_FACTORS!r} must hold {len(rotary.inv_freq)} positive factors")
    return RotarySpec.of(np.asarray(rotary.inv_freq, np.float32) / factors, rotary.attention_factor)


def _scaling(file: GGUFFile, family: GGUFFamily) -> dict[str, Any]:
    """Return the `rope_parameters` of a file's RoPE scaling, `default` for one that the family reads.

    As in llama.cpp, a file without a type has linear scaling, a missing factor or a factor of 0 is 1, `scale_linear` is the
    former name of the factor, and the type "none" ignores the factor.

    Source: `llama_model_base::load_hparams` and `llama_context` of https://github.com/ggml-org/llama.cpp
    """
    kind, tensors = file.get(".rope.scaling.type", str, "linear"), sorted(file.tensors.keys() & family.rope_tensors)
    legacy = float(file.get(".rope.scale_linear", (int, float), 1.0))
    factor = float(file.get(".rope.scaling.factor", (int, float), legacy)) or 1.0
    known = ("none", "linear", "yarn", *(["longrope"] if family.rope_tensors else []))
    if kind not in known:
        raise file.fault(f"RoPE scaling {kind!r} is not supported in GGUF; supported are {', '.join(known)}")
    if kind == "longrope" and not tensors:
        raise file.damaged(f"RoPE scaling 'longrope' needs the tensors {' and '.join(family.rope_tensors)}, which are missing")
    if tensors and kind == "yarn":
        raise file.fault(f"RoPE scaling yarn beside the tensor {tensors[0]!r} is not supported in GGUF")
    if tensors and kind != "none" and factor != 1.0:  # llama.cpp applies both
        key = file.full(".rope.scaling.factor")
        key = key if key in file.metadata.values else file.full(".rope.scale_linear")
        raise file.fault(f"{key} {factor} beside the tensor {tensors[0]!r} is not supported in GGUF")
    for key, default in (_YARN if kind == "yarn" else _NOT_YARN).items():
        if f"rope.scaling.{key}" in family.reads or (tensors and key == "attn_factor"):  # longrope's own factor
            continue
        if file.get(f".rope.scaling.{key}", (int, float), default) != default:
            raise file.fault(f"RoPE scaling {kind} with {key} other than {default} is not supported in GGUF")
    if tensors or kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = file.need(".rope.scaling.original_context_length", int)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _dtype(file: GGUFFile) -> str:
    """Return the dtype of the embedding if it is not quantised, else bfloat16."""
    return {"F32": "float32", "F16": "float16"}.get(file.tensors["token_embd.weight"].tensor_type.name, "bfloat16")
