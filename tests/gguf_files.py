"""Tiny GGUF files, written with the gguf package, and transformers' own GGUF loading as the witness over them."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    modeling_utils,
)
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.dequant import dequantize as torch_dequantize

from tests import gguf_converter as converter
from tests.checkpoints import ROPE_OF_MINISTRAL3, Oracle

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
_FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.7}
_LONGROPE = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "long_factor": np.linspace(1, 4, 24).tolist(),
    "short_factor": np.linspace(1, 1.5, 24).tolist(),
}
FAMILIES = {
    "mistral-window": MistralConfig(**_SHAPE, head_dim=64, sliding_window=21),
    "mistral3": MistralConfig(**_SHAPE, head_dim=32, sliding_window=None),
    "ministral3": Ministral3Config(**_SHAPE, head_dim=32, rope_parameters=ROPE_OF_MINISTRAL3),
    "gemma": GemmaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **{**_SHAPE, "num_hidden_layers": 7}, head_dim=32, sliding_window=21, query_pre_attn_scalar=32, tie_word_embeddings=True
    ),
    "gemma3-linear": Gemma3TextConfig(
        **{**_SHAPE, "num_hidden_layers": 7},
        head_dim=32,
        sliding_window=21,
        query_pre_attn_scalar=32,
        final_logit_softcapping=0.5,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "granite": GraniteConfig(**_SHAPE, **_FACTORS, tie_word_embeddings=True),
    "granite4": GraniteMoeHybridConfig(
        **_SHAPE,
        **_FACTORS,
        num_local_experts=0,
        shared_intermediate_size=288,
        layer_types=["full_attention"] * 2,
        position_embedding_type="rope",
    ),
    "olmo2": Olmo2Config(**_SHAPE),
    "phi3": Phi3Config(**_SHAPE, pad_token_id=None, sliding_window=None),
    "phi3-window": Phi3Config(**_SHAPE, pad_token_id=None, sliding_window=21),
    "phi3-longrope": Phi3Config(**_SHAPE, pad_token_id=None, rope_parameters=_LONGROPE, original_max_position_embeddings=64),
    "seed_oss": SeedOssConfig(**_SHAPE, head_dim=32, pad_token_id=None),
    "smollm3": SmolLM3Config(**{**_SHAPE, "num_hidden_layers": 5}, tie_word_embeddings=True, pad_token_id=None),
}
"""Families beside those of `CONFIGS`, whose files transformers does not read."""
_DELTA_NET = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    "pad_token_id": None,
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
_NO_MLP = {name: value for name, value in _SHAPE.items() if name != "intermediate_size"}
HYBRIDS = {
    "qwen35": Qwen3_5TextConfig(**_SHAPE, **_DELTA_NET, tie_word_embeddings=True),
    "qwen35moe": Qwen3_5MoeTextConfig(**_NO_MLP, **_DELTA_NET, **_DELTA_EXPERTS),
    "qwen3next": Qwen3NextConfig(**_SHAPE, **_DELTA_NET, **_DELTA_EXPERTS, norm_topk_prob=True),
}
"""Families with recurrent layers."""
ALL = CONFIGS | FAMILIES | HYBRIDS
ARCHITECTURES = {"mistral-window": "llama", "mistral3": "mistral3"}
"""`general.architecture` of files that could have several."""
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
_NEVER_QUANTISED = ("ffn_gate_inp", "ssm_conv1d")
"""Parts of the names of matrices that llama.cpp keeps in F32: routers and taps."""
_MINIMA = {Kind.Q2_K: 1.5, Kind.Q4_K: 7.5, Kind.Q5_K: 15.5}
"""Ratio of the second scale to the first that centres random values on zero."""


def write(path, name, kind=Kind.F16, **options):
    """A random model of a family or variant, by its name."""
    return Written(path, ALL[name], kind, architecture=ARCHITECTURES.get(name), **options)


def random_blocks(rng, shape, kind):
    """Random valid blocks of a type, uint8 `[rows, bytes]`, whose values deviate by 0.06, as those of other types do."""
    elements, size = GGML_BLOCK[int(kind)]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, size), np.uint8)

    def scale(values):
        for offset, ratio in zip(HALVES[kind], (1.0, _MINIMA.get(kind, 0.0)), strict=False):
            blocks[:, offset : offset + 2] = (values * ratio).astype(np.float16)[:, None].view(np.uint8)

    scale(np.ones(len(blocks)))
    factors = rng.uniform(0.5, 1.5, len(blocks)) / (13 / 12) ** 0.5  # which leave the deviation as it is
    scale(factors * 0.06 / float(torch_dequantize(torch.from_numpy(blocks), int(kind)).std()))
    return blocks.reshape(shape[0], -1)


class Written:
    """A random model in a GGUF file.

    Attributes:
        path: the file.
        config: its Hugging Face configuration.
        model: the model with the values of the file, which no code of ours has read.
    """

    def __init__(
        self, path, config, kind=Kind.F16, change=lambda writer: None, tensors=None, kinds=None, architecture=None, **options
    ):
        """`change` gets the writer before the file is written; `tensors` are written beside the model's or instead.

        `kinds` are types of tensors other than `kind`, by the part of the name before `.weight` and behind the layer.
        """
        torch.manual_seed(0)
        self._rng = np.random.default_rng(0)
        self.path, self.config, self.kind, self._kinds = path, config, kind, kinds or {}
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        self.architecture = architecture = architecture or converter.architecture_of(config)
        self._spread_memory()
        key = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
        writer = gguf.GGUFWriter(path, architecture, **options)
        converter.write_metadata(writer, config, architecture)
        change(writer)
        written, self._places = {}, {}
        for name, parameter in self.model.named_parameters():
            module, _, leaf = name.rpartition(".")
            if (place := converter.stored_name(names, name)) is not None:
                values, _ = self._stored(place, parameter)
                rows = converter.stored_rows(name, values, config, architecture)
                written[place] = converter.stored_values(name, rows), None
                continue
            parameter = parameter.squeeze(1) if "conv1d" in name else parameter
            stored = converter.stored_modules(names, name if parameter.ndim > 2 else module, config)
            self._places[name] = [f"{place}.{'weight' if parameter.ndim > 2 else leaf}" for place in stored]
            if parameter.ndim > 2:  # of all experts, which have a tensor for each part
                for place, part in zip(stored, parameter.detach().chunk(len(stored), dim=1), strict=True):
                    written[f"{place}.weight"] = self._stored(f"{place}.weight", part)
                continue
            arrange = lambda matrix, module=module: converter.stored_columns(module, matrix, config, architecture)  # noqa: E731
            rows, of = self._stored(f"{stored[0]}.{leaf}", parameter, arrange)
            rows = converter.stored_rows(module, rows, config, architecture)
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                rows = rows + np.float32(converter.norm_shift(architecture))
            ends = np.cumsum(converter.shares(module, config, len(stored)))
            for place, part in zip(stored, np.split(rows, ends[:-1] * len(rows) // ends[-1]), strict=True):
                written[f"{place}.{leaf}"] = part, of
        written |= {name: (value, None) for name, value in converter.rope_tensors(config).items()}
        for name, value in (tensors or {}).items():
            written[name] = (value, None) if value is None or value.ndim == 1 else self._encoded(name, value)
        for name, (rows, of) in written.items():
            if rows is not None:
                writer.add_tensor(name, rows, raw_dtype=of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @torch.no_grad()
    def _spread_memory(self):
        """Let some recurrent heads remember a hundred tokens."""
        for name, parameter in self.model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, 1)
            elif name.endswith("dt_bias"):
                parameter.normal_()

    @torch.no_grad()
    def _stored(self, name, parameter, arrange=lambda matrix: matrix):
        """Numbers or blocks of a parameter and their type; the parameter becomes what they hold.

        `arrange` moves the columns of a matrix, which blocks then hold together.
        """
        value = parameter.numpy()
        if value.ndim == 1:
            value += self._rng.normal(0, 0.1, value.shape).astype(np.float32)
            return value.copy(), None
        rows, of = self._encoded(name, np.ascontiguousarray(arrange(value)))
        places = arrange(np.arange(value.shape[-1])[None])[0] if value.ndim == 2 else slice(None)
        value[..., places] = gguf.quants.dequantize(rows, of).reshape(value.shape)
        return rows, of

    def _encoded(self, name, value):
        of = self._kinds.get(name.removesuffix(".weight").split(".")[-1], self.kind)
        if any(part in name for part in _NEVER_QUANTISED):
            of = Kind.F32
        if of not in HALVES:
            return gguf.quants.quantize(value, of), of
        blocks = random_blocks(self._rng, (value.size // value.shape[-1], value.shape[-1]), of)
        return blocks.reshape(*value.shape[:-1], -1), of

    @torch.no_grad()
    def reread(self):
        """Let the matrices of the model have the values that the file has now. Its rows must be stored in order."""
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(self.path).tensors}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1:
                parts = [gguf.quants.dequantize(of.data, of.tensor_type) for of in map(stored.get, self._places[name])]
                parameter.copy_(torch.from_numpy(np.concatenate(parts, axis=-2)))

    def oracle(self):
        """transformers: its own loading of the file where it reads the architecture, else the model that was written."""
        if self.is_read_by_transformers:
            return gguf_oracle(self.path, self.config)
        oracle = object.__new__(Oracle)
        oracle.model = self.model
        return oracle

    @property
    def is_read_by_transformers(self):
        """Return whether transformers loads the file itself."""
        return self.architecture in ("llama", "qwen2", "qwen3") and self.config.model_type == self.architecture


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
