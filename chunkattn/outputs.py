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
        finish_reason: `"stop"`, `"length"`, or `"abort"` after `AsyncLLM.abort`; None while it goes on.
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
        num_cached_tokens: prompt tokens whose K/V came from the cache, or from a request running beside this one.
        num_cached_chunk_tokens: of those, the tokens of every chunk.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    chunk_lens: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    num_cached_chunk_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScoreUsage:
    """Tokens of a scoring request.

    Attributes:
        prompt_tokens: query and items, each once.
        computed_tokens: rows the model ran, the query again for every pack or item.
        cached_tokens: of the query, found in the cache.
    """

    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class ScoreOutput:
    """Scores of every item.

    Attributes:
        scores: `scores[i][j]`, item `i`, label `j`, in the order of the request. Of a sequence classifier `j` is the class:
            the softmax over the classes, or the sigmoid where there is one class.
        logprobs: log-probabilities of the labels, full-vocabulary log-softmax in float32; None of a classifier.
        logits: `logits[i][j]`, a classifier's raw output for item `i` and class `j`; None of a language model.
        algorithm: the algorithm that ran.
        predicted_seconds: what each algorithm that could have run was expected to take.
    """

    scores: list[list[float]]
    logprobs: list[list[float]] | None
    algorithm: str
    usage: ScoreUsage
    logits: list[list[float]] | None = None
    predicted_seconds: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RerankResult:
    """One document of a reranking. Names are Cohere's and Jina's.

    Attributes:
        index: its place among the documents of the request.
        relevance_score: probability of the positive label, the two labels taken together.
        truncated: whether it was cut to `max_tokens_per_doc`.
    """

    index: int
    relevance_score: float
    document: str
    truncated: bool = False


@dataclass(frozen=True)
class RerankOutput:
    """Documents by their relevance.

    Attributes:
        results: the best first, equal ones as they came.
        template: name of the template that asked for it.
        algorithm: the algorithm that ran.
        usage: of all documents, also those that `top_n` leaves out.
    """

    results: list[RerankResult]
    template: str
    algorithm: str
    usage: ScoreUsage


@dataclass(frozen=True)
class CachedDocument:
    """One document of `LLM.precompute`.

    Attributes:
        num_bytes: of its K/V pages.
        was_cached: whether all of it was in the cache before.
        done: whether it has been computed.
    """

    tokens: int
    num_bytes: int
    was_cached: bool
    done: bool


@dataclass(frozen=True)
class CacheReport:
    """What `LLM.precompute` has put into the cache.

    Attributes:
        prefix_tokens, prefix_bytes: of the prefix.
        documents: in the order given.
        pool_bytes: of the whole KV pool.
        fits: how many of the documents, from the first on, the pool holds together with the prefix.
        pin_ids: for `LLM.unpin`.
    """

    prefix_tokens: int
    prefix_bytes: int
    documents: list[CachedDocument]
    pool_bytes: int
    fits: int
    pin_ids: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of the prefix and all documents."""
        return self.prefix_bytes + sum(d.num_bytes for d in self.documents)
