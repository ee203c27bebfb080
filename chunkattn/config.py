"""Every option of the engine and of a request, once, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkattn.errors import ConfigError, RequestError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Names are vLLM's where vLLM has one.

    Attributes:
        model: a local Hugging Face folder, a hub id, or None for the bundled demo model.
        tokenizer: a folder or hub id, when not the model's own.
        revision: hub revision of the model.
        skip_tokenizer_init: load no tokenizer; prompts must then be token ids.
        dtype: of weights, activations and KV; `"auto"` is the checkpoint's own.
        attention_backend: a registered backend's name, or `"auto"` to pick by platform.
        enable_chunk_aware: split text and id prompts at `chunk_separator`.
        chunk_separator: the text between prefix, chunks and question.
        position_strategy: `"shared"` or `"offset"` position ids.
        multi_item_scoring_delimiter: token id that separates query and items in packed scoring sequences.
        max_model_len: bound on the highest position id + 1; None is the checkpoint's own.
        max_chunk_len: bound on the tokens of one chunk.
        max_num_seqs: sequences running at once, each of a request's `n` counted.
        max_num_batched_tokens: token budget of one step.
        block_size: tokens per KV page.
        kv_cache_memory_bytes: size of the KV pool; None picks one by platform.
        max_logprobs: highest `logprobs` or `prompt_logprobs` a request may ask for.
        max_items_per_request: highest number of items of one scoring request.
        seed: of requests that bring none.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    attention_backend: str = "auto"
    enable_chunk_aware: bool = False
    chunk_separator: str = " # # "
    position_strategy: str = "shared"
    multi_item_scoring_delimiter: int | None = None
    max_model_len: int | None = None
    max_chunk_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    max_logprobs: int = 20
    max_items_per_request: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        if not self.chunk_separator:
            raise ConfigError("chunk_separator must not be empty")
        for name in ("max_chunk_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_items_per_request"):
            _whole(name, getattr(self, name), 1, error=ConfigError)
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, error=ConfigError)
        _whole("max_logprobs", self.max_logprobs, 0, error=ConfigError)
        _whole("seed", self.seed, 0, error=ConfigError)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if self.multi_item_scoring_delimiter is not None:
            _whole("multi_item_scoring_delimiter", self.multi_item_scoring_delimiter, 0, error=ConfigError)


def _whole(
    name: str, value: Any, low: int, high: int | None = None, error: type[ConfigError] | type[RequestError] = RequestError
) -> None:
    """Refuse what is no integer (bools included) or out of range."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not ok:
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise error(f"{name} must be an integer {bounds}, got {value!r}", **_param(error, name))


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is no finite number or out of range."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (ok and low <= value <= high and not (open_low and value == low)):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be a number in {bracket}{low}, {high}], got {value!r}", param=name)


def _param(error: type, name: str) -> dict[str, str]:
    return {"param": name} if issubclass(error, RequestError) else {}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's.

    Attributes:
        n: independent samples of one prompt.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this times the likeliest one.
        seed: makes samples reproducible whatever else runs; None is the engine's.
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: subtracted once from tokens seen in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to the logits of the given token ids.
        max_tokens: most tokens to generate; None is as many as fit.
        min_tokens: no end-of-sequence or stop token before this many.
        stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text.
        ignore_eos: keep going past the end-of-sequence token.
        logprobs: log-probabilities of this many likeliest tokens at each step; 0 is the chosen one's alone.
        prompt_logprobs: the same for every prompt token.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _whole("n", self.n, 1)
        _real("temperature", self.temperature, 0.0, 1e6)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be non-empty strings, got {self.stop!r}", param="stop")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _whole("logit_bias token", token, 0)
            _real("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0
