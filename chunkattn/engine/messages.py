"""What goes into and comes out of `EngineCore`: plain values, nothing shared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunkattn.config import SamplingParams
from chunkattn.layout import ChunkLayout


@dataclass(frozen=True)
class GenerateRequest:
    """Continue a prompt.

    Attributes:
        layout: in the user's order of chunks.
        eos_token_ids: tokens that end the text unless `ignore_eos`.
    """

    request_id: str
    layout: ChunkLayout
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoreRequest:
    """Read label log-probabilities off a prompt.

    Attributes:
        rows: `[R]`, ascending token indices to read at.
        label_token_ids: whose log-probabilities to return.
    """

    request_id: str
    layout: ChunkLayout
    rows: np.ndarray
    label_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can hold; told once, at its start.

    Attributes:
        kv_tokens: slots of the KV pool.
        max_model_len: bound on the highest position id + 1.
    """

    kv_tokens: int
    max_model_len: int
    vocab_size: int
    sliding_window: int | None


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw-distribution log-probabilities at `N` rows.

    Attributes:
        target: float32 `[N]`, of the row's own target token.
        rank: int32 `[N]`, 1 for the likeliest.
        top_ids, top: int32 and float32 `[N, K]`, the likeliest tokens, descending.
    """

    target: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class TokenOutput:
    """One sample's next token.

    Attributes:
        logprobs: of this token, `N = 1`; None when not asked for.
        finish_reason: `"stop"`, `"length"` or None while it goes on.
        stop_reason: the stop token id that ended it, None for end of sequence.
    """

    request_id: str
    sample: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(frozen=True)
class PromptLogprobsOutput:
    """Prompt log-probabilities in the user's order of tokens.

    Attributes:
        logprobs: of every prompt token, `N = T`; rows where `known` is False are void.
        known: bool `[T]`, False for the first token of every part.
    """

    request_id: str
    logprobs: TokenLogprobs
    known: np.ndarray


@dataclass(frozen=True)
class ScoreResult:
    """Label log-probabilities float32 `[R, L]` of a `ScoreRequest`."""

    request_id: str
    logprobs: np.ndarray


@dataclass(frozen=True)
class RequestFailed:
    """The request was in a step that raised; its pages are free again."""

    request_id: str
    reason: str


EngineOutput = TokenOutput | PromptLogprobsOutput | ScoreResult | RequestFailed
