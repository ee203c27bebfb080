"""Messages to and from `EngineCore`: plain values that share no state with the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from chunkattn.errors import CapacityError, EngineError, NonFiniteError
from chunkattn.layout import ChunkLayout
from chunkattn.request_record import RequestStats
from chunkattn.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """Request to continue a prompt.

    Attributes:
        request_id: id, unique among the engine's requests.
        layout: layout of the prompt, chunks in the user's order.
        sampling: sampling parameters.
        eos_token_ids: tokens that end the text unless `ignore_eos` is set.
        salt_key: digest of the caller's `cache_salt`; only requests of equal digest share blocks.
        priority: rank in the queue; lower goes first.
        weighing: chunk temperature and scale of the question (see `chunkattn.calibration`); None takes the engine's.
        logprobs_from: token index in the question from which the log-probabilities of prompt tokens are read. Earlier parts may
            then come from the cache, and ranks are read only if `sampling.prompt_logprobs` is above 0. None reads them all, and
            every prompt token is computed.
        prompt_only: whether the prompt is only read: no token is sampled, and none needs a position below `max_model_len`.
            `sampling.max_tokens` is 1.
        most_tokens: limit on generated tokens where `sampling.max_tokens` is None, or as many as fit where that is less; None
            for no other limit.
    """

    request_id: str
    layout: ChunkLayout
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    salt_key: str | None = None
    priority: int = 0
    weighing: tuple[float, float] | None = None
    logprobs_from: int | None = None
    prompt_only: bool = False
    most_tokens: int | None = None
    shares: ClassVar[bool] = True
    state_len: ClassVar[int] = 0
    is_pack: ClassVar[bool] = False

    @property
    def distinct(self) -> bool:
        """Return whether every prompt token must be computed, even in repeated chunks, for its log-probability."""
        return self.sampling.prompt_logprobs is not None and self.logprobs_from is None


@dataclass(frozen=True)
class ScoreRequest:
    """Request for the label log-probabilities of a prompt, or the class logits of a sequence classifier.

    Attributes:
        request_id: id, unique among the engine's requests.
        layout: layout of the prompt, items as chunks.
        rows: `[R]`, ascending token indices to read scores from. An index may occur several times, with other labels.
        label_token_ids: lists of the tokens whose log-probabilities are returned; empty for a classifier.
        row_labels: `[R]`, place in `label_token_ids` of the list that is read at each row; None reads the only list at each.
        share_prefix: whether to read the prefix from the cache and keep it there; then `rows` follow the prefix.
        state_len: tokens at the start of the question that other requests share. The chunks are documents then, and the cache
            holds prefix, documents and these tokens as it does for generation; `rows` follow them. 0 for a pack of items.
        algorithm: algorithm that made this layout, one of `chunkattn.calls.algorithms.ALGORITHMS`.
        salt_key: see `GenerateRequest`.
        priority: see `GenerateRequest`.
        backend: attention backend that computes the whole prompt in one step without the cache, one of
            `EngineLimits.backends`; None for the engine's backend.
        raw: whether to return the labels' logits instead of their log-probabilities.
        hidden: whether to return the hidden states of the rows, which a head of the caller reads. There are no labels then.
        series: name that requests share whose tokens must not meet in a step. They run in their order; None for no such name.
    """

    request_id: str
    layout: ChunkLayout
    rows: np.ndarray
    label_token_ids: tuple[tuple[int, ...], ...]
    row_labels: np.ndarray | None = None
    share_prefix: bool = False
    state_len: int = 0
    algorithm: str = "packed_segment"
    salt_key: str | None = None
    priority: int = 0
    backend: str | None = None
    raw: bool = False
    hidden: bool = False
    series: str | None = None
    distinct: ClassVar[bool] = False

    @property
    def shares(self) -> bool:
        """Return whether the prompt reads the cache and stays in it."""
        return self.share_prefix

    @property
    def is_pack(self) -> bool:
        """Return whether the chunks are items, which no other request shares."""
        return not self.state_len

    def labels_of(self, number: int) -> tuple[int, ...]:
        """Return the label token ids that are read at one row.

        Args:
            number: place of the row in `rows`.
        """
        return self.label_token_ids[0 if self.row_labels is None else self.row_labels[number]]


@dataclass(frozen=True)
class PrecomputeRequest:
    """Request to fill the cache with a prefix and its chunks.

    Attributes:
        request_id: id, unique among the engine's requests.
        layout: layout of prefix and chunks. A question is the beginning that other requests share, see
            `ScoreRequest.state_len`.
        salt_key: see `GenerateRequest`.
        pin: whether to keep all blocks in the cache until `EngineCore.unpin`.
        persist: whether to write the parts to the KV store as well, if the engine has one.
        priority: see `GenerateRequest`.
        keep_states: whether to keep the states at the ends of the chunks as well, from which a question behind one chunk goes
            on, or in a lookup, whether a chunk without its state counts as missing; only models with recurrent layers have
            states.
    """

    request_id: str
    layout: ChunkLayout
    salt_key: str | None = None
    pin: bool = False
    persist: bool = True
    priority: int = 0
    keep_states: bool = False
    shares: ClassVar[bool] = True
    state_len: ClassVar[int] = 0
    is_pack: ClassVar[bool] = False
    distinct: ClassVar[bool] = False


Message = GenerateRequest | ScoreRequest | PrecomputeRequest


@dataclass(frozen=True)
class StepRates:
    """Cost model of a step: it takes `step + rows * row + area * area` seconds.

    Attributes:
        step: seconds per step, regardless of its size.
        row: seconds per row, padding included.
        area: seconds per row and slot of a visited tile.
    """

    step: float
    row: float
    area: float


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the raw distribution at `N` rows: NumPy arrays, or JAX's while they are computed.

    Attributes:
        target: float32 `[N]` log-probabilities of each row's target token.
        rank: int32 `[N]` ranks of the target tokens, 1 for the likeliest.
        top_ids: int32 `[N, K]` likeliest tokens, descending.
        top: float32 `[N, K]` log-probabilities of `top_ids`.
    """

    target: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class CachedTokens:
    """Number of prompt tokens, by part, whose K/V came from the cache or from a concurrent request.

    Attributes:
        prefix: tokens of the prefix.
        chunks: tokens of every chunk, in the user's order.
        question: tokens of the question.
        states: whether the cache holds the state at the end of every chunk, in the user's order, in the answer to a precompute
            request of a model with recurrent layers; empty otherwise.
    """

    prefix: int
    chunks: tuple[int, ...]
    question: int
    states: tuple[bool, ...] = ()

    @property
    def total(self) -> int:
        """Return the tokens of the whole prompt."""
        return self.prefix + sum(self.chunks) + self.question


@dataclass(frozen=True)
class TokenOutput:
    """Next tokens of one sample.

    Attributes:
        request_id: id of the request.
        sample: number of the sample in the request.
        token_ids: new tokens, in order; none from a request that only reads its prompt.
        logprobs: log-probabilities of the `N` new tokens; None if not requested.
        finish_reason: `"stop"` or `"length"`; None while the sample continues.
        stop_reason: stop token id that ended the sample; None for an end-of-sequence token.
        cached: cached prompt tokens; sent with the first output of every sample.
        stats: sent with the first output of every sample, and again after a compilation or a preemption.
        is_complete: whether the grammar of the text ended the sample: the last token is then a part of the text.
    """

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached: CachedTokens | None = None
    stats: RequestStats | None = None
    is_complete: bool = False


@dataclass(frozen=True)
class PromptLogprobsOutput:
    """Log-probabilities of a prompt, tokens in the user's order.

    Attributes:
        request_id: id of the request.
        logprobs: log-probabilities of every prompt token, `N = T`; ignore rows where `known` is False.
        known: bool `[T]`, False for the first token of every part.
    """

    request_id: str
    logprobs: TokenLogprobs
    known: np.ndarray


@dataclass(frozen=True)
class ScoreResult:
    """Result of a `ScoreRequest`.

    Attributes:
        request_id: id of the request.
        logprobs: float32 `[R, L]` log-probabilities of the labels, or their logits; class logits of a classifier; or hidden
            states. `L` is the length of the longest list of labels; shorter rows end in -inf.
        rates: cost model of the engine's steps, as known now.
        computed: tokens that this request computed.
        stats: waits and cache hits of the request.
    """

    request_id: str
    logprobs: np.ndarray
    rates: StepRates
    computed: int
    stats: RequestStats | None = None


@dataclass(frozen=True)
class PrecomputeResult:
    """Result of a `PrecomputeRequest`.

    Attributes:
        request_id: id of the request.
        cached: tokens that this request did not compute.
        stats: waits and cache hits of the request.
    """

    request_id: str
    cached: CachedTokens
    stats: RequestStats | None = None


@dataclass(frozen=True)
class RequestFailed:
    """Failure of a request: it has ended without a result and holds no pages.

    Attributes:
        request_id: id of the request.
        reason: explanation for the caller.
        param: argument that the caller can change to avoid the failure, or None.
        finite: False if the request failed because a value of it is NaN or infinite.
        fits: False if the request failed because pages that others keep leave too few for it.
        stats: waits and cache hits of the request; None if it was not accepted.
    """

    request_id: str
    reason: str
    param: str | None = None
    finite: bool = True
    fits: bool = True
    stats: RequestStats | None = None

    def error(self) -> CapacityError | EngineError:
        """Return the exception for the caller."""
        if self.param or not self.fits:
            return CapacityError(self.reason, param=self.param)
        if not self.finite:
            return NonFiniteError(f"request {self.request_id} failed: {self.reason}")
        return EngineError(f"request {self.request_id} failed in a step: {self.reason}")


EngineOutput = TokenOutput | PromptLogprobsOutput | ScoreResult | PrecomputeResult | RequestFailed
