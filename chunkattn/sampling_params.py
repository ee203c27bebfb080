"""`SamplingParams`: parameters of a generated text, with their validation, and limits on the lists of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Any

import numpy as np

from chunkattn.errors import RequestError
from chunkattn.structured_outputs import PARAM, StructuredOutputsParams

# Limits on the lists of a request, checked before any work per entry.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LABELS = 1024
MAX_SALT_CHARS = 256

_LOWEST_SEED = -(2**63)

# Python's own types come first: a check against an abstract class takes ten times as long, and a request makes thirty.
_INTEGERS, _NUMBERS = (int, Integral), (float, int, Real)


def _whole(name: str, value: Any, low: int) -> int:
    """Return `value` as an int.

    Raises:
        RequestError: `value` is not an integer (bools are refused), is below `low`, or has more than 64 bits.
    """
    if not isinstance(value, _INTEGERS) or isinstance(value, bool) or not low <= int(value) < 2**63:
        limits = f"at least {low}" if low > _LOWEST_SEED else "of 64 bits"
        raise RequestError(f"{name} must be an integer {limits}, got {value!r}", param=name)
    return int(value)


_LOWEST = {"n": 1, "top_k": -1, "min_tokens": 0}
_LOWEST_OR_NONE = {"max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0, "seed": _LOWEST_SEED}
"""Lowest values of the integers among sampling parameters, and of those that may be None."""
_BOUNDS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 1e6, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 1e6, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
"""Bounds of the other numbers, and whether the lower one is excluded."""


def _real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """Return `value` as a float.

    Raises:
        RequestError: `value` is not a number (bools are refused), is NaN, or is out of range.
    """
    ok = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    if not (ok and low <= value <= high and not (open_low and value == low)):  # NaN compares false
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be a number in {bracket}{low}, {high}], got {value!r}", param=name)
    return float(value)


def _check_size(name: str, value: Sized, most: int) -> None:
    """Check the number of entries of a request's list or map.

    Args:
        name: name of the parameter.
        value: the list or map.
        most: maximum number of entries.

    Raises:
        RequestError: `value` has more than `most` entries.
    """
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries, at most {most} are allowed", param=name)


def _listed(name: str, value: Any, most: int) -> list[Any]:
    """Return `value` as a list. None gives an empty list, as in vLLM.

    Args:
        name: name of the parameter.
        value: sequence, set, array or None.
        most: maximum number of entries.

    Raises:
        RequestError: `value` is not a sequence, or has more than `most` entries.
    """
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray, Set)):
        raise RequestError(f"{name} must be a list, got {type(value).__name__}", param=name)
    _check_size(name, value, most)
    return list(value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of a generated text, with vLLM's names, defaults and meanings. None stands for an empty list or map.

    Attributes:
        n: number of independent samples of one prompt.
        temperature: sampling temperature; 0 is greedy. Values between 0 and 0.01 are raised to 0.01.
        top_p: probability mass; sampling keeps the smallest set of tokens that reaches it.
        top_k: number of likeliest tokens that sampling keeps; 0 or -1 keeps all.
        min_p: share of the likeliest token's probability below which sampling drops a token.
        seed: seed that makes samples reproducible under any load, any integer of 64 bits; None or -1 derives one from the
            engine's seed and the number of earlier requests.
        repetition_penalty: divisor of positive logits, and factor of negative logits, for tokens in prompt or output.
        presence_penalty: value subtracted once from the logits of tokens in the output.
        frequency_penalty: value subtracted per occurrence in the output.
        logit_bias: values added to the logits of token ids, at most 1024 entries.
        max_tokens: number of tokens to generate at most; None generates as many as fit.
        min_tokens: number of tokens before which no end-of-sequence or stop token is sampled.
        stop: strings that end the text, at most 64 of at most 1024 characters each. The text excludes them unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end the text, at most 1024.
        include_stop_str_in_output: whether the text includes the stop string that ended it.
        ignore_eos: whether to continue past the end-of-sequence token.
        logprobs: number of likeliest tokens with log-probabilities at each step; 0 for the chosen token's alone.
        prompt_logprobs: number of likeliest tokens with log-probabilities for every prompt token.
        skip_special_tokens: whether to leave special tokens out of the text.
        skip_reading_prefix_cache: whether to bypass the cache, for reading and for writing.
        structured_outputs: shape of the text; None leaves it free.
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
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: _whole(name, getattr(self, name), low) for name, low in _LOWEST.items()}
        checked |= {name: _real(name, getattr(self, name), *bounds) for name, bounds in _BOUNDS.items()}
        for name, low in _LOWEST_OR_NONE.items():
            if getattr(self, name) is not None:
                checked[name] = _whole(name, getattr(self, name), low)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}", param=name)
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            kind = type(self.structured_outputs).__name__
            raise RequestError(f"{PARAM} must be StructuredOutputsParams, got {kind}", param=PARAM)
        if checked.get("seed") == -1:
            checked["seed"] = None
        stop = [self.stop] if isinstance(self.stop, str) else _listed("stop", self.stop, MAX_STOP_STRINGS)
        for place, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must be non-empty strings, got {self.stop!r}", param="stop")
            if len(text) > MAX_STOP_CHARS:
                reason = f"stop string {place} has {len(text)} characters, at most {MAX_STOP_CHARS} are allowed"
                raise RequestError(reason, param="stop")
        checked["stop"] = tuple(stop)
        ids = _listed("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        checked["stop_token_ids"] = tuple(_whole("stop_token_ids", token, 0) for token in ids)
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}", param="logit_bias")
        _check_size("logit_bias", bias, MAX_LOGIT_BIAS)
        checked["logit_bias"] = {
            _whole("logit_bias", t, 0): _real("logit_bias", value, -100.0, 100.0) for t, value in bias.items()
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", param="min_tokens")

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always chosen."""
        return self.temperature == 0.0
