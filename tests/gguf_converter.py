"""The rules of llama.cpp's converter: metadata of a model, and tensors with its changes of rows and norms."""

import math

import gguf
import numpy as np

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "granitemoehybrid": "granite",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
"""`general.architecture` by `model_type`, where they differ. Files of Mistral say `llama` or `mistral3`."""
HYBRID = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures with recurrent layers, of which the converter leaves Qwen3-Next's value heads in place."""
_INTERLEAVED = ("llama", "mistral3", "granite", "smollm3")


def architecture_of(config):
    return ARCHITECTURES.get(config.model_type, config.model_type)


def head_dim_of(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_metadata(writer, config, architecture):
    head_dim, rope = head_dim_of(config), config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(getattr(config, "shared_intermediate_size", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture != "gemma":
        writer.add_rope_freq_base(full["rope_theta"])
    if architecture not in ("gemma", "gemma3", "olmo2", "seed_oss"):
        writer.add_rope_dimension_count(int(full.get("partial_rotary_factor", 1.0) * head_dim))
    if architecture in ("qwen3moe", "qwen35moe", "qwen3next"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in HYBRID:
        _write_recurrence(writer, config, architecture)
    if architecture in ("qwen3", "qwen3moe", "gemma", "gemma3", "mistral3", "seed_oss", *HYBRID):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _write_scaling(writer, full, architecture, config.max_position_embeddings)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "llama" and getattr(config, "sliding_window", None):  # as others write it
        writer.add_sliding_window(config.sliding_window)


def _write_recurrence(writer, config, architecture):
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if architecture == "qwen3next":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        return
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    if architecture == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_scaling(writer, rope, architecture, context):
    kind = rope["rope_type"]
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(original := rope.get("original_max_position_embeddings", context))
        if kind == "longrope" and (scale := context / original):
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def stored_modules(names, module, config):
    """Names of the tensors that the converter makes of a module, in the order of their rows, see `shares`."""
    if module.endswith("experts.gate_up_proj"):
        return [names.get_name(module.replace("gate_up", part)) for part in ("gate", "up")]
    if module.endswith("in_proj_qkvz"):
        return [names.get_name(module.replace("qkvz", part)) for part in ("qkv", "z")]
    if module.endswith("shared_mlp.input_linear"):
        block = f"blk.{module.split('.')[2]}"
        return [f"{block}.ffn_gate", f"{block}.ffn_up"]
    return [names.get_name(module.replace("shared_mlp.output_linear", "mlp.down_proj"))]


def stored_name(names, parameter):
    """Name of the tensor that the converter makes of a parameter without module; None for others."""
    module, _, leaf = parameter.rpartition(".")
    if leaf == "dt_bias":
        return f"{names.get_name(f'{module}.dt_proj')}.bias"
    return names.get_name(parameter) if leaf == "A_log" else None


def shares(module, config, count):
    """Rows of each tensor that the converter makes of a module, by shares of all rows."""
    if module.endswith("in_proj_qkvz"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return [2 * keys + values, values]
    return [1] * count


def stored_values(name, values):
    """The numbers of a vector that the converter writes in place of a parameter's."""
    return -np.exp(values) if name.endswith("A_log") else values


def stored_rows(module, rows, config, architecture):
    """The rows of a matrix or bias in the converter's order; numbers or blocks."""
    part = module.rpartition(".")[2]
    if part == "in_proj_qkvz":
        turns = np.split(rows, config.linear_num_key_heads)
        per_key = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        ends = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, per_key])
        return np.concatenate([part for parts in zip(*(np.split(turn, ends) for turn in turns), strict=True) for part in parts])
    if architecture in ("qwen35", "qwen35moe"):
        if part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            return tile(rows, config)
        if part in ("in_proj_qkv", "conv1d"):
            keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            return np.concatenate([rows[:keys], tile(rows[keys:], config)])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.rpartition(".")[2])
    return interleave(rows, heads) if architecture in _INTERLEAVED and heads else rows


def stored_columns(module, columns, config, architecture):
    """The columns of a matrix of numbers in the converter's order."""
    moves = architecture in ("qwen35", "qwen35moe") and module.endswith("linear_attn.out_proj")
    return tile(columns.T, config).T if moves else columns


def tile(rows, config):
    """Value heads, which lie side by side for one key head, with one value head of every key head in turn instead."""
    groups = [
        np.split(group, config.linear_num_value_heads // config.linear_num_key_heads)
        for group in np.split(rows, config.linear_num_key_heads)
    ]
    return np.concatenate([head for heads in zip(*groups, strict=True) for head in heads])


def interleave(weight, heads):
    """The rows of a query or key projection as llama.cpp's converter writes them for `llama`."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def norm_shift(architecture):
    """The number that the converter adds to the weights of norms."""
    return 1.0 if architecture in ("gemma", "gemma3", *HYBRID) else 0.0


def rope_tensors(config):
    """Factors of the rotary embedding, by the names of their tensors."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": llama3_factors(config, head_dim_of(config))}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
    return {}


def llama3_factors(config, head_dim):
    """Divisor of each frequency, float32 `[head_dim / 2]`, as llama.cpp's converter computes it from Llama 3's parameters."""
    rope, factors = config.rope_parameters, []
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    for place in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (place / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            turns = rope["original_max_position_embeddings"] / wavelength
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
