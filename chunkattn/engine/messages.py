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
        cache_salt: shares the cache with requests of the same salt alone.
        priority: the lower, the earlier.
    """

    request_id: str
    layout: ChunkLayout
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """Read label log-probabilities off a prompt, or the class logits of a sequence classifier.

    Attributes:
        rows: `[R]`, ascending token indices to read at.
        label_token_ids: whose log-probabilities to return; empty for a classifier.
        share_prefix: read the prefix from the cache and leave it there; its last token is not read at then.
        algorithm: whose layout this is, one of `chunkattn.scoring.ALGORITHMS`; `"packed_dense"` is one pass under a
            dense mask, which reads no cache.
        cache_salt: see `GenerateRequest`.
        priority: the lower, the earlier.
    """

    request_id: str
    layout: ChunkLayout
    rows: np.ndarray
    label_token_ids: tuple[int, ...]
    share_prefix: bool = False
    algorithm: str = "packed_segment"
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class PrecomputeRequest:
    """Fill the cache with a prefix and its chunks.

    Attributes:
        layout: without a question.
        cache_salt: see `GenerateRequest`.
        pin: keep everything in the cache until `EngineCore.unpin`.
        persist: write it to the KV store as well, where there is one.
        priority: the lower, the earlier.
    """

    request_id: str
    layout: ChunkLayout
    cache_salt: str | None = None
    pin: bool = False
    persist: bool = True
    priority: int = 0


Message = GenerateRequest | ScoreRequest | PrecomputeRequest


@dataclass(frozen=True)
class StepRates:
    """Seconds of a step: `step + rows * row + area * area`.

    Attributes:
        step: of any step.
        row: of a row, padding included.
        area: of a row and a slot in a visited tile.
    """

    step: float
    row: float
    area: float


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can hold; told once, at its start.

    Attributes:
        num_pages: pages of the KV pool, of `block_size` tokens each.
        page_bytes: bytes of one page over all layers.
        max_model_len: bound on the highest position id + 1.
        max_logprobs: most log-probabilities per token.
        sliding_window: of the checkpoint, None when it has none.
        rates: of its steps, as far as they are known at its start.
        longest_table: entries of a page table its backend can take.
        num_labels: classes of a sequence classifier, None for a language model.
        dense_refusal: why nothing can be scored by `packed_dense`, None where it can.
    """

    num_pages: int
    block_size: int
    page_bytes: int
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    sliding_window: int | None
    rates: StepRates
    longest_table: int = 1 << 31
    num_labels: int | None = None
    dense_refusal: str | None = None

    @property
    def kv_tokens(self) -> int:
        """Slots of the KV pool."""
        return self.num_pages * self.block_size

    @property
    def max_table_pages(self) -> int:
        """Entries of the longest page table; more than pages, for a repeated chunk names its pages again."""
        return min(max(1 << (self.num_pages - 1).bit_length(), 32), self.longest_table)


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
class CachedTokens:
    """Prompt tokens whose K/V this request did not have to compute.

    Attributes:
        prefix, question: of these parts.
        chunks: of every chunk, in the user's order.
    """

    prefix: int
    chunks: tuple[int, ...]
    question: int

    @property
    def total(self) -> int:
        """Of the whole prompt."""
        return self.prefix + sum(self.chunks) + self.question


@dataclass(frozen=True)
class TokenOutput:
    """The next tokens of one sample.

    Attributes:
        logprobs: of these tokens, `N` of them; None when not asked for.
        finish_reason: `"stop"`, `"length"` or None while it goes on.
        stop_reason: the stop token id that ended it, None for end of sequence.
        cached: with the first token of every sample.
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached: CachedTokens | None = None


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
    """A `ScoreRequest` is done.

    Attributes:
        logprobs: float32 `[R, L]`, of its labels; a classifier's raw class logits.
        rates: of the engine's steps, as they are known now.
    """

    request_id: str
    logprobs: np.ndarray
    rates: StepRates


@dataclass(frozen=True)
class PrecomputeResult:
    """A `PrecomputeRequest` is done.

    Attributes:
        cached: what was in the cache already.
    """

    request_id: str
    cached: CachedTokens


@dataclass(frozen=True)
class RequestFailed:
    """The request has ended without a result; its pages are free again.

    Attributes:
        reason: what happened, for the caller.
        param: the offending argument, when it is the caller's to change.
    """

    request_id: str
    reason: str
    param: str | None = None


EngineOutput = TokenOutput | PromptLogprobsOutput | ScoreResult | PrecomputeResult | RequestFailed
