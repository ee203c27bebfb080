"""Tiny GGUF files, written with the gguf package, and transformers' own GGUF loading as the witness over them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, modeling_utils
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.dequant import dequantize as torch_dequantize

from tests.checkpoints import Oracle

SMOLLM2 = Path(__file__).parent.parent / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
"""SmolLM2-135M-Instruct; `make run-real` and `make test-slow` get it."""
VOCAB = 128
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}

CONFIGS = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-llama3": LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-linear": LlamaConfig(**_SHAPE, rope_parameters={"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}),
    "llama-yarn": LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen3moe": Qwen3MoeConfig(
        **_SHAPE, head_dim=64, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    ),
}
HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ3_S: (0,),
}
"""Types that the gguf package only reads: bytes of a block that hold float16 scales. All other bytes may be anything."""
_MINIMA = {Kind.Q2_K: 1.5, Kind.Q4_K: 7.5, Kind.Q5_K: 15.5}
"""Ratio of the second scale to the first that centres random values on zero."""


def random_blocks(rng, shape, kind):
    """Random valid blocks of a type, uint8 `[rows, bytes]`, whose values have a deviation of about 0.06."""
    elements, size = GGML_BLOCK[int(kind)]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, size), np.uint8)

    def scale(values):
        for offset, ratio in zip(HALVES[kind], (1.0, _MINIMA.get(kind, 0.0)), strict=False):
            blocks[:, offset : offset + 2] = (values * ratio).astype(np.float16)[:, None].view(np.uint8)

    scale(np.ones(len(blocks)))
    scale(rng.uniform(0.5, 1.5, len(blocks)) * 0.06 / float(torch_dequantize(torch.from_numpy(blocks), int(kind)).std()))
    return blocks.reshape(shape[0], -1)


def interleave(weight, heads):
    """The rows of a query or key projection as llama.cpp's converter writes them for `llama`."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _projections(model):
    """Names and values of a model's parameters, those of stacked experts as the converter names them."""
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if value.ndim < 3:
            yield name, value
            continue
        before, _, module = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if module == "gate_up_proj" else (module,)
        for part, rows in zip(parts, np.split(value, len(parts), axis=1), strict=True):
            yield f"{before}.{part}.weight", np.ascontiguousarray(rows)


class Written:
    """A random model in a GGUF file.

    Attributes:
        path: the file.
        config: its Hugging Face configuration.
    """

    def __init__(self, path, config, kind=Kind.F16, change=lambda writer: None, tensors=None, kinds=None, **options):
        """`change` gets the writer before the file is written; `tensors` are written beside the model's or instead.

        `kinds` are types of tensors other than `kind`, by the part of the name before `.weight` and behind the layer.
        """
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        self.path, self.config, self.kind = path, config, kind
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        architecture = config.model_type.replace("_moe", "moe")
        names = gguf.get_tensor_name_map(next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), 2)
        writer = gguf.GGUFWriter(path, architecture, **options)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(head_dim)
        if architecture == "qwen3moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if architecture in ("qwen3", "qwen3moe"):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        self._add_scaling(writer, head_dim)
        change(writer)
        written = {}
        for name, value in _projections(model):
            if value.ndim == 1:
                value = value + rng.normal(0, 0.1, value.shape).astype(np.float32)
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
            if architecture == "llama" and heads:
                value = interleave(value, heads)
            module, _, leaf = name.rpartition(".")
            written[f"{names.get_name(module)}.{leaf}"] = value
        if config.rope_parameters["rope_type"] == "llama3":
            written["rope_freqs.weight"] = llama3_factors(config, head_dim)
        for name, value in {**written, **(tensors or {})}.items():
            if value is None:
                continue
            of = (kinds or {}).get(name.removesuffix(".weight").split(".")[-1], kind)
            if value.ndim == 1 or name.endswith("ffn_gate_inp.weight"):  # llama.cpp quantises no router
                writer.add_tensor(name, value)
            elif of in HALVES:
                blocks = random_blocks(rng, (value.size // value.shape[-1], value.shape[-1]), of)
                writer.add_tensor(name, blocks.reshape(*value.shape[:-1], -1), raw_dtype=of)
            else:
                writer.add_tensor(name, gguf.quants.quantize(value, of), raw_dtype=of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add_scaling(self, writer, head_dim):
        rope = self.config.rope_parameters
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    def oracle(self):
        """transformers' own loading of the file, under our configuration where transformers reads none from the file."""
        return gguf_oracle(self.path, self.config)


def gguf_oracle(path, config=None, patch=None):
    """`Oracle` of a GGUF file: `from_pretrained(folder, gguf_file=...)` in float32."""
    found = modeling_utils.is_accelerate_available
    # transformers asks for accelerate, and uses nothing of it here.
    modeling_utils.is_accelerate_available = lambda *_, **__: True
    try:
        options = {} if config is None else {"config": config}
        oracle = object.__new__(Oracle)
        oracle.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", **options
        ).eval()
        return oracle
    finally:
        modeling_utils.is_accelerate_available = found


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
