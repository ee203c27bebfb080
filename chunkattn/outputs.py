"""What users get back. Names are vLLM's where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability (natural log, of the model's raw distribution), its rank and text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample.

    Attributes:
        finish_reason: `"stop"` or `"length"`.
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its samples, in the user's order of chunks.

    Attributes:
        prompt: the parts joined without separators; None for token id prompts.
        prompt_token_ids: the logical sequence prefix + chunks + question.
        prompt_logprobs: per prompt token, None for the first token of a part.
        chunk_lens: tokens of every chunk; empty for plain prompts.
        num_cached_tokens: prompt tokens whose K/V came from the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    chunk_lens: tuple[int, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class ScoreUsage:
    """Tokens of a scoring request.

    Attributes:
        prompt_tokens: query and items, each once.
        computed_tokens: rows the model ran, the query again for every pack or item.
    """

    prompt_tokens: int
    computed_tokens: int


@dataclass(frozen=True)
class ScoreOutput:
    """Scores of every item.

    Attributes:
        scores: `scores[i][j]`, item `i`, label `j`, in the order of the request.
        logprobs: log-probabilities of the labels, full-vocabulary log-softmax in float32.
        algorithm: the algorithm that ran.
    """

    scores: list[list[float]]
    logprobs: list[list[float]]
    algorithm: str
    usage: ScoreUsage
