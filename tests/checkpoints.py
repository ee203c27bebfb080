"""Tiny random checkpoints of every family, and transformers as the witness over them."""

import copy
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from chunkattn import ChunkLayout

VOCAB = 128

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def _llama(rope: dict | None = None, **changes) -> LlamaConfig:
    return LlamaConfig(
        **{**_SHAPE, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **(rope or {})}, **changes}
    )


_GEMMA3 = Gemma3TextConfig(
    **_SHAPE,
    head_dim=32,
    sliding_window=9,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    query_pre_attn_scalar=20,
    final_logit_softcapping=3.0,
    tie_word_embeddings=True,
)
_FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 1.7}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 8,
    "patch_size": 2,
}
"""Vision part of multimodal checkpoints, which is not read."""

ROPE_OF_MINISTRAL3 = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}

_DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
}
_MROPE = {"rope_parameters": _DELTA_NET["rope_parameters"] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}}
_DELTA_EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_PATCHES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
"""Vision part of Qwen3.5, which is not read."""
_QWEN3_5_MOE = Qwen3_5MoeTextConfig(
    **{name: value for name, value in _SHAPE.items() if name != "intermediate_size"}, **_DELTA_NET | _MROPE, **_DELTA_EXPERTS
)

CHECKPOINTS: dict[str, PretrainedConfig] = {
    "llama": _llama(tie_word_embeddings=False),
    "llama-bias": _llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-linear": _llama({"rope_type": "linear", "factor": 4.0}),
    "llama-dynamic": _llama({"rope_type": "dynamic", "factor": 4.0}),
    "llama-llama3": _llama(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "llama-yarn": _llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "mistral": MistralConfig(**_SHAPE, head_dim=32, sliding_window=None),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=11),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen2-moe": Qwen2MoeConfig(
        **_SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **_SHAPE,
        head_dim=32,
        num_experts=7,  # no row of the tests has two experts at the edge whose logits are closer than 1e-4
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-raw": Qwen3MoeConfig(
        **_SHAPE, head_dim=32, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40, decoder_sparse_step=2
    ),
    "gemma": GemmaConfig(**_SHAPE, head_dim=32, tie_word_embeddings=True),
    "gemma3-window": _GEMMA3,
    "gemma3-nested-window": Gemma3Config(
        text_config={**_GEMMA3.to_dict(), "final_logit_softcapping": None}, vision_config=_VISION, mm_tokens_per_image=4
    ),
    "mistral3-nested": Mistral3Config(
        text_config=MistralConfig(**_SHAPE, head_dim=32, sliding_window=None).to_dict(),
        vision_config={"model_type": "pixtral", **_VISION},
        tie_word_embeddings=False,
    ),
    "ministral3": Ministral3Config(**_SHAPE, head_dim=32, rope_parameters=ROPE_OF_MINISTRAL3),
    "granite": GraniteConfig(**_SHAPE, **_FACTORS),
    "granite4": GraniteMoeHybridConfig(
        **_SHAPE,
        **_FACTORS,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=["full_attention"] * 3,
        position_embedding_type="rope",
    ),
    "olmo2": Olmo2Config(**_SHAPE),
    "phi3": Phi3Config(**_SHAPE, rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75}),
    "seed_oss": SeedOssConfig(**_SHAPE, head_dim=32, attention_out_bias=True, mlp_bias=True),
    "smollm3": SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "qwen3_5": Qwen3_5TextConfig(**_SHAPE, **_DELTA_NET | _MROPE),
    "qwen3_5-nested": Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**_SHAPE, **_DELTA_NET | _MROPE, tie_word_embeddings=True).to_dict(),
        vision_config=_PATCHES,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe-nested": Qwen3_5MoeConfig(text_config=_QWEN3_5_MOE.to_dict(), vision_config=_PATCHES),
    "qwen3_next": Qwen3NextConfig(**_SHAPE, **_DELTA_NET, **_DELTA_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-64": Qwen3Config(**{**_SHAPE, "num_hidden_layers": 2}, head_dim=64, tie_word_embeddings=True),
}
HYBRID = [name for name in CHECKPOINTS if name.startswith(("qwen3_5", "qwen3_next"))]
"""Checkpoints with recurrent layers."""
WINDOWED = [name for name in CHECKPOINTS if "window" in name]
NESTED = [name for name in CHECKPOINTS if "nested" in name and name not in (*WINDOWED, *HYBRID)]
CHUNKABLE = [name for name in CHECKPOINTS if name not in (*WINDOWED, *NESTED, *HYBRID, "qwen3-64")]
DIVISIBLE = [name for name in CHECKPOINTS if name != "olmo2" and "nested" not in name and name not in HYBRID]
"""Checkpoints whose text configuration is at the top and whose heads several devices can share."""


def auto_class(config: PretrainedConfig) -> type:
    """The class of transformers that makes a configuration's language model or multimodal model."""
    return AutoModelForImageTextToText if "text_config" in config.sub_configs else AutoModelForCausalLM


def make_checkpoint(config: PretrainedConfig, folder: Path, max_shard_size: str = "100KB", auto: type | None = None) -> Path:
    """Save a random model, sharded, with no parameter at a trivial value."""
    torch.manual_seed(0)
    model = (auto or auto_class(config)).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, 1)  # some heads remember a hundred tokens
            elif name.endswith("dt_bias"):
                parameter.normal_()
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def force_factors(model, used: str):
    """Return a copy of a model with longrope that has its `long` or its `short` factors for every length."""
    made = copy.deepcopy(model)
    rope = made.config.rope_parameters
    made.config.rope_parameters = rope | dict.fromkeys(("long_factor", "short_factor"), rope[f"{used}_factor"])
    made.model.rotary_emb = type(made.model.rotary_emb)(made.config)
    return made


class Oracle:
    """transformers in float32 with eager attention."""

    def __init__(self, folder: Path) -> None:
        auto = auto_class(AutoConfig.from_pretrained(folder))
        self.model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def logits(self, ids, positions=None, visible=None) -> np.ndarray:
        """float32 `[T, vocab]`: plain when no mask is given."""
        ids = torch.as_tensor(np.asarray(ids))[None]
        if visible is None:
            return self.model(ids).logits[0].numpy()
        mask = self.masks(visible, np.asarray(positions))
        return self.model(ids, attention_mask=mask, position_ids=torch.as_tensor(np.asarray(positions))[None]).logits[0].numpy()

    def masks(self, visible, positions):
        """The mask of every type of layers. Under a window a token sees those that lie less than `window` positions before."""
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        near = np.subtract.outer(positions, positions) < (window or np.inf)
        full, windowed = (
            torch.where(torch.as_tensor(seen), 0.0, torch.finfo(torch.float32).min)[None, None]
            for seen in (visible, visible & near)
        )
        if getattr(config, "layer_types", None) is None:  # such a model takes one mask for all its layers
            return windowed
        return {"full_attention": full, "sliding_attention": windowed}

    def chunked(self, layout: ChunkLayout, generated=()) -> np.ndarray:
        """Logits of a layout followed by generated tokens, under a mask built from the definition, pair by pair."""
        ids = [*layout.token_ids.tolist(), *generated]
        part = [c for c, n in parts_of(layout) for _ in range(n)] + ["question"] * len(generated)
        visible = np.array(
            [
                [k <= i and (part[k] == "prefix" or part[i] == part[k] or part[i] == "question") for k in range(len(ids))]
                for i in range(len(ids))
            ]
        )
        positions = [*layout.positions.tolist(), *range(layout.next_position, layout.next_position + len(generated))]
        return self.logits(ids, positions, visible)


def parts_of(layout: ChunkLayout):
    return [("prefix", layout.prefix_len), *enumerate(layout.chunk_lens), ("question", layout.question_len)]


def random_parts(rng: np.random.Generator, most_chunks: int = 20, longest: int = 12):
    """Prefix, chunks and question as id lists: unequal, empty and one-token chunks, sometimes no prefix."""
    lens = [
        int(rng.choice([0, 1, rng.integers(1, longest + 1)], p=[0.15, 0.2, 0.65]))
        for _ in range(rng.integers(0, most_chunks + 1))
    ]
    sizes = [int(rng.integers(0, longest)), *lens, int(rng.integers(1, longest))]
    prefix, *chunks, question = (rng.integers(0, VOCAB, n).tolist() for n in sizes)
    return prefix, chunks, question
