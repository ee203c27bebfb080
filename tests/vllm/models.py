"""Tiny random models of the supported families, with heads that vLLM's CPU kernels take."""

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCAB = 256

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
CONFIGS = {
    "llama": LlamaConfig(**_SHAPE, head_dim=64),
    "llama3-rope": LlamaConfig(**_SHAPE, head_dim=64, rope_parameters=_LLAMA3),
    "llama-yarn": LlamaConfig(
        **_SHAPE,
        head_dim=64,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "mistral": MistralConfig(**_SHAPE, head_dim=32, sliding_window=None),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=64),
    "mistral-window": MistralConfig(**_SHAPE, head_dim=32, sliding_window=64),
    "qwen2-window": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=64, max_window_layers=1),
    "llama-dynamic": LlamaConfig(
        **_SHAPE, head_dim=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
}
