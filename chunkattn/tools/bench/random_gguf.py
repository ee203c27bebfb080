"""GGUF files with random weights, in the mixtures of types that llama.cpp's quantiser writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize

from chunkattn.models.families import spec_from_config
from chunkattn.models.mixers import EXACT, RECURRENT, GatedDeltaNet
from chunkattn.models.stored_rows import stored_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNQUANTIZED = ("F32", "F16", "BF16")
_MIXTURES = {"Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K"}
"""Type of most tensors of a quantisation that mixes types by rule."""
QUANTS = (*_UNQUANTIZED, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", *_MIXTURES, "Q6_K")
"""Quantisations that `write_random` knows."""

_NEVER_QUANTIZED = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")
"""Ends of the names of routers, of gates of shared experts and of taps."""
_FUSED = {"Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}
"""Type of the tensor with queries, keys and values of a recurrent layer, by quantisation."""
_MOST_COLUMNS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Type of a matrix whose rows do not divide into blocks of 256."""
_DEVIATION = 0.02
"""Standard deviation of the weights, that of a Qwen3 or Llama before training: activations stay near 1."""
_SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Offsets in a block of its float16 scale and, where there is one, of its minimum. Every other byte may have any value."""
_MINIMA = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Ratio of the minimum to the scale that centres uniform codes on zero."""
_DECAYS = (-4.0, 1.0)
"""Range of `A_log` of random recurrent layers: some heads remember a hundred tokens."""
_HYBRIDS = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
"""`general.architecture` of families with recurrent layers, by `model_type`."""
_PIECE = 1 << 24
"""Unquantised weights that are made at a time."""


def tensor_type(quant: str, name: str, shape: tuple[int, ...], *, layers: int, tied: bool) -> str:
    """Return the type that llama.cpp's quantiser, without an importance matrix, gives a tensor of a model of this size.

    Args:
        quant: quantisation in `QUANTS`.
        name: GGUF name of the tensor.
        shape: shape of the tensor, `(out, in)` for a matrix and `(experts, out, in)` for stacked ones.
        layers: number of layers of the model.
        tied: whether the embedding is the head, too.

    Source: `llama_tensor_get_type` in `src/llama-quant.cpp` of https://github.com/ggml-org/llama.cpp
    """
    if len(shape) < 2:
        return "F32"
    if name.endswith(_NEVER_QUANTIZED):
        return "F32"
    if quant in _UNQUANTIZED:
        return quant
    chosen, columns = _MIXTURES.get(quant, quant), shape[-1]
    if name == ("token_embd.weight" if tied else "output.weight"):
        if columns % _block(chosen):
            chosen = "Q8_0"
        elif chosen != "Q8_0":
            chosen = "Q6_K"
    elif name.startswith("blk."):
        _, number, part, _ = name.split(".")
        chosen = _layer_type(quant, chosen, part.removesuffix("_exps"), int(number), layers)
    if columns % _block(chosen):
        chosen = _MOST_COLUMNS.get(chosen, "F16")
    return chosen if columns % _block(chosen) == 0 else "F16"


def _layer_type(quant: str, chosen: str, part: str, number: int, layers: int) -> str:
    """Return the type of a matrix of a layer, where `chosen` is the type of most tensors."""
    if part == "attn_qkv":
        return _FUSED.get(quant, chosen)
    eighth = layers // 8
    has_more = number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
    if quant in ("Q4_K_M", "Q5_K_M") and part in ("attn_v", "ffn_down") and has_more:
        return "Q6_K"
    if quant == "Q4_K_S" and (part, number < 4) == ("attn_v", True):
        return "Q5_K"
    if quant in ("Q4_K_S", "IQ4_NL") and part == "ffn_down" and number < eighth:
        return "Q5_K"
    return chosen


def _block(kind: str) -> int:
    """Return the number of weights of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def random_rows(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return random rows of a type, uint8 `[rows, bytes]`, whose values have mean 0 and a deviation of about 0.02.

    Args:
        kind: name of the type, one of those that `tensor_type` returns.
        shape: rows and columns of the matrix. The columns are a multiple of the type's block.
        rng: generator of the weights.
    """
    rows, columns = shape
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    if kind not in _UNQUANTIZED:
        return _blocks(kind, rows * columns // block, _DEVIATION / _deviation(kind), rng).reshape(rows, -1)
    out = np.empty((rows, columns * size), np.uint8)
    step = max(_PIECE // columns, 1)
    for piece in (out[first : first + step] for first in range(0, rows, step)):
        uniform = rng.random((len(piece), columns), np.float32) - np.float32(0.5)
        piece[:] = quantize(uniform * np.float32(_DEVIATION * math.sqrt(12)), number).view(np.uint8)
    return out


def _deviation(kind: str) -> float:
    """Return the standard deviation of the values of random blocks whose scale is 1."""
    return float(dequantize(_blocks(kind, 256, 1.0, np.random.default_rng(0)), GGMLQuantizationType[kind]).std())


def _blocks(kind: str, count: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    """Return random blocks, uint8 `[count, bytes]`.

    Codes without a minimum reach further below zero than above, so half of their scales are negative.
    """
    blocks = rng.integers(0, 256, (count, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8)
    signs = np.ones((count, 1)) if kind in _MINIMA else 1.0 - 2.0 * rng.integers(0, 2, (count, 1))
    for offset, factor in zip(_SCALES[kind], (1.0, _MINIMA.get(kind, 0.0)), strict=False):
        blocks[:, offset : offset + 2] = (signs * scale * factor).astype(np.float16).view(np.uint8)
    return blocks


def write_random(config: PretrainedConfig, quant: str, path: Path) -> None:
    """Write a GGUF file with random weights and a vocabulary of made-up words.

    Args:
        config: configuration of a language model: an architecture that GGUF files may have, with the default RoPE and without
            biases.
        quant: quantisation in `QUANTS`.
        path: file to write.

    Raises:
        ModelError: the configuration is not supported.
    """
    spec, kind = spec_from_config(config), str(config.model_type)
    architecture = _HYBRIDS.get(kind, kind.replace("_moe", "moe"))
    writer = GGUFWriter(path, architecture)
    writer.add_file_type(LlamaFileType["ALL_F32" if quant == "F32" else f"MOSTLY_{quant}"])
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    num_heads, num_kv_heads, head_dim = spec.heads
    writer.add_feed_forward_length(getattr(config, "intermediate_size", config.hidden_size))
    if experts := spec.layers[0].experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.used)
        writer.add_expert_feed_forward_length(experts.size)
        if experts.shared is not None:
            writer.add_expert_shared_feed_forward_length(experts.shared.size)
    if (mixer := spec.recurrent) is not None:
        _add_recurrence(writer, mixer, [isinstance(layer.mixer, GatedDeltaNet) for layer in spec.layers])
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_words(writer, spec.vocab_size)
    places = get_tensor_name_map(next(k for k, name in MODEL_ARCH_NAMES.items() if name == architecture), spec.num_layers)
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    stored, shapes = stored_rows(spec), spec.parameters()
    for parameter, shape in {stored[name].name: (stored[name].stored, *rest) for name, (_, *rest) in shapes.items()}.items():
        module, _, leaf = parameter.rpartition(".")
        if parameter.endswith(EXACT):
            name = f"{places.get_name(f'{module}.dt_proj')}.bias" if leaf == "dt_bias" else f"{places.get_name(parameter)}"
        else:
            name = f"{places.get_name(module)}.{leaf}"
        kind = tensor_type(quant, name, shape, layers=spec.num_layers, tied=spec.tie_embeddings)
        block, size = GGML_QUANT_SIZES[number := GGMLQuantizationType[kind]]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), math.prod(shape) // block * size, number)
        tensors.append((parameter, kind, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng()
    for parameter, kind, shape in tensors:  # one tensor is in memory at a time
        if parameter.endswith(f"{RECURRENT}A_log"):
            writer.write_tensor_data(-np.exp(rng.uniform(*_DECAYS, shape)).astype(np.float32))
            continue
        rows = (math.prod(shape[:-1]), shape[-1])
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else random_rows(kind, rows, rng))
    writer.close()


def _add_recurrence(writer: GGUFWriter, mixer: GatedDeltaNet, recurrent: list[bool]) -> None:
    """Add the sizes of recurrent layers, and which layers are."""
    writer.add_ssm_conv_kernel(mixer.taps)
    writer.add_ssm_state_size(mixer.key_dim)
    writer.add_ssm_group_count(mixer.key_heads)
    writer.add_ssm_time_step_rank(mixer.value_heads)
    writer.add_ssm_inner_size(mixer.value_dim * mixer.value_heads)
    writer.add_full_attention_interval(recurrent.index(False) + 1)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_words(writer: GGUFWriter, size: int) -> None:
    """Add a SentencePiece vocabulary of distinct words.

    Every token is whole characters. llama.cpp holds back the text of a token that ends within a character, so a stream of such
    tokens would come in bursts.
    """
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, size))])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * (size - len(kinds))])
    writer.add_eos_token_id(2)
