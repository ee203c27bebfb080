"""Every option of the engine and of a request, once, validated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np

from chunkattn.errors import ConfigError, RequestError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")

# A request's lists are checked against these before anything is done for each entry.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LABELS = 1024
MAX_SALT_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Names are vLLM's where vLLM has one.

    Attributes:
        model: a local Hugging Face folder, a hub id, or None for the bundled demo model.
        tokenizer: a folder or hub id, when not the model's own.
        revision: hub revision of the model.
        skip_tokenizer_init: load no tokenizer; prompts must then be token ids.
        dtype: of weights, activations and KV; `"auto"` is the checkpoint's own.
        kv_cache_dtype: of the KV pool: `"auto"` is `dtype`; `"fp8"` and `"fp8_e4m3"` are one byte a value, at scale 1.
        attention_backend: a registered backend's name, or `"auto"` to pick by platform.
        enable_chunk_aware: split text and id prompts at `chunk_separator`.
        chunk_separator: the text between prefix, chunks and question.
        special_tokens_in_documents: text of a special token in chunks, documents, user and tool messages and rerank texts
            becomes that token.
        special_tokens_in_prompts: text of a special token in prefixes, questions, plain prompts, other messages and
            scoring texts becomes that token.
        position_strategy: `"shared"` or `"offset"` position ids.
        multi_item_scoring_delimiter: token id that separates query and items in packed scoring sequences.
        max_model_len: bound on the highest position id + 1; None is the checkpoint's own.
        max_chunk_len: bound on the tokens of one chunk.
        max_chunks_per_prompt: highest number of chunks of one prompt, empty ones included.
        max_num_seqs: sequences running at once, each of a request's `n` counted.
        max_num_batched_tokens: token budget of one step.
        block_size: tokens per KV page.
        kv_cache_memory_bytes: size of the KV pool; None picks one by platform.
        enable_prefix_caching: keep the K/V of prefixes, chunks and questions for later requests.
        long_prefill_token_threshold: tokens of one sequence's prompt a step computes before others get their turn;
            what is left of the budget goes to the first again. None: half of the budget for the first in line, half
            for those with the fewest tokens to go.
        kv_store: folder that keeps the K/V of prefixes and chunks beyond this process; None keeps none.
        kv_store_max_bytes: size of that folder.
        warmup: compile every step variant at start. None leaves it to the caller: servers do, `LLM` does not.
        score_algorithm: how scoring requests that name none are computed; `"auto"` predicts which is cheapest.
        max_logprobs: highest `logprobs` or `prompt_logprobs` a request may ask for.
        max_items_per_request: highest number of items of one scoring request, over all of its queries, and of documents
            of one precompute call.
        max_tokens_per_call: highest number of tokens one call may have the engine compute: of generation the prompts and
            `max_tokens` of every sample; of scoring the query as often as the algorithm computes it, and the items.
        max_multi_item_seq_len: highest number of tokens in a step of the `packed_dense` baseline, whose memory grows with
            their square.
        seed: of requests that bring none.
        max_decode_gap_s: seconds a step may be expected to take while text is generated: steps with prompts or items in
            them are then cut to the largest token bucket that keeps to it, 128 tokens at least.
        max_queued_requests: calls an `AsyncLLM` takes at once; further ones are refused.
        engine_hang_timeout_s: seconds without a sign of life, or in one step that is not compiling, after which an
            `AsyncLLM` starts its engine process again. Longer than the longest step on your machine.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    enable_chunk_aware: bool = False
    chunk_separator: str = " # # "
    special_tokens_in_documents: bool = False
    special_tokens_in_prompts: bool = True
    position_strategy: str = "shared"
    multi_item_scoring_delimiter: int | None = None
    max_model_len: int | None = None
    max_chunk_len: int = 8192
    max_chunks_per_prompt: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int | None = None
    kv_store: str | None = None
    kv_store_max_bytes: int = 16 << 30
    warmup: bool | None = None
    score_algorithm: str = "auto"
    max_logprobs: int = 20
    max_items_per_request: int = 10_000
    max_tokens_per_call: int = 1 << 26
    max_multi_item_seq_len: int = 8192
    seed: int = 0
    max_decode_gap_s: float = 0.5
    max_queued_requests: int = 1024
    engine_hang_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.kv_store, os.PathLike):
            object.__setattr__(self, "kv_store", os.fspath(self.kv_store))
        if self.kv_store == "":
            raise ConfigError("kv_store must be a folder or None, got ''")
        for option in fields(self):
            kinds, value = _OPTION_TYPES[str(option.type)], getattr(self, option.name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ConfigError(f"{option.name} must be of type {option.type}, got {value!r}")
        for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")
        lowest = {"max_logprobs": 0, "seed": 0, "multi_item_scoring_delimiter": 0}
        for option in fields(self):
            value = getattr(self, option.name)
            if "int" in str(option.type) and value is not None and value < lowest.get(option.name, 1):
                raise ConfigError(f"{option.name} must be at least {lowest.get(option.name, 1)}, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}: "
                "a step could not advance every running sequence"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if not self.max_decode_gap_s > 0:  # NaN compares false
            raise ConfigError(f"max_decode_gap_s must be above 0, got {self.max_decode_gap_s}")
        if not 1 <= self.engine_hang_timeout_s < float("inf"):  # NaN compares false
            raise ConfigError(f"engine_hang_timeout_s must be a number of at least 1, got {self.engine_hang_timeout_s}")


_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (bool,),
    "bool | None": (bool, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
}


# Python's own types first: to ask an abstract class takes ten times as long, and every request asks thirty times.
_INTEGERS, _NUMBERS = (int, Integral), (float, int, Real)


def _whole(name: str, value: Any, low: int, high: int = 2**63 - 1) -> int:
    """`value` as an int.

    Raises:
        RequestError: no integer (bools are none) or out of range.
    """
    if not isinstance(value, _INTEGERS) or isinstance(value, bool) or not low <= int(value) <= high:
        bounds = f"at least {low}" if high == 2**63 - 1 else f"between {low} and {high}"
        raise RequestError(f"{name} must be an integer {bounds}, got {value!r}", param=name)
    return int(value)


def _real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a float.

    Raises:
        RequestError: no number, NaN, or out of range.
    """
    ok = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    if not (ok and low <= value <= high and not (open_low and value == low)):  # NaN compares false
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be a number in {bracket}{low}, {high}], got {value!r}", param=name)
    return float(value)


def check_size(name: str, value: Sized, most: int) -> None:
    """Check the number of entries of a request's list or map.

    Raises:
        RequestError: more than `most`.
    """
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries, at most {most} are allowed", param=name)


def _listed(name: str, value: Any, most: int) -> list[Any]:
    """A sequence of at most `most` entries as a list; None is empty, as in vLLM.

    Raises:
        RequestError: no sequence, or a longer one.
    """
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray, Set)):
        raise RequestError(f"{name} must be a list, got {type(value).__name__}", param=name)
    check_size(name, value, most)
    return list(value)


def make_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """Return an engine's configuration from options by name.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    known = {f.name for f in fields(EngineConfig)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"unknown option {unknown[0]!r}; options are {', '.join(sorted(known))}")
    return EngineConfig(model=model, **options)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names, defaults and meanings are vLLM's; None is accepted for an empty list or map.

    Attributes:
        n: independent samples of one prompt.
        temperature: 0 is greedy; anything between that and 0.01 is 0.01.
        top_p: keep the smallest set of tokens whose probability reaches it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this times the likeliest one.
        seed: makes samples reproducible whatever else runs; None derives one from the engine's seed and the
            number of requests before this one.
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: subtracted once from tokens seen in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to the logits of the given token ids, at most 1024.
        max_tokens: most tokens to generate; None is as many as fit.
        min_tokens: no end-of-sequence or stop token before this many.
        stop: strings that end the text, at most 64 of at most 1024 characters; not part of it unless
            `include_stop_str_in_output`.
        stop_token_ids: tokens that end the text, at most 1024.
        ignore_eos: keep going past the end-of-sequence token.
        logprobs: log-probabilities of this many likeliest tokens at each step; 0 is the chosen one's alone.
        prompt_logprobs: the same for every prompt token.
        skip_special_tokens: leave special tokens out of the text.
        skip_reading_prefix_cache: read nothing from the cache, and leave nothing in it.
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
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "n": _whole("n", self.n, 1),
            "temperature": _real("temperature", self.temperature, 0.0, 1e6),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "top_k": _whole("top_k", self.top_k, -1),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0),
        }
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}", param=name)
        for name, low in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0), ("seed", 0)):
            if getattr(self, name) is not None:
                checked[name] = _whole(name, getattr(self, name), low)
        stop = [self.stop] if isinstance(self.stop, str) else _listed("stop", self.stop, MAX_STOP_STRINGS)
        for place, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must be non-empty strings, got {self.stop!r}", param="stop")
            if len(text) > MAX_STOP_CHARS:
                reason = f"stop string {place} has {len(text)} characters, at most {MAX_STOP_CHARS} are allowed"
                raise RequestError(reason, param="stop")
        listed = _listed("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        ids = [_whole("stop_token_ids", t, 0) for t in listed]
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}", param="logit_bias")
        check_size("logit_bias", bias, MAX_LOGIT_BIAS)
        checked["logit_bias"] = {
            _whole("logit_bias", t, 0): _real("logit_bias", value, -100.0, 100.0) for t, value in bias.items()
        }
        for name, value in (checked | {"stop": tuple(stop), "stop_token_ids": tuple(ids)}).items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0
