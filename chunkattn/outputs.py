"""Results of calls, under vLLM's names where vLLM has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token.

    Attributes:
        logprob: natural logarithm of the probability under the model's raw distribution.
        rank: rank of the token, 1 for the likeliest.
        decoded_token: text of the token.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CitationSource:
    """Document that a citation names.

    Attributes:
        id: id of the document; of one without an id, the hash in its marker, such as `#k3bq5x2a`.
        index: number of the document in the caller's order.
    """

    id: str
    index: int


@dataclass(frozen=True)
class Citation:
    """Span of an answer that cites documents: the statement before one marker, or before several in a row.

    The span begins behind the citation before, or where its last sentence or line begins. Markers behind no new statement cite
    that of the citation before.

    Attributes:
        start: first character of the span in the text of the answer, counted in Unicode code points.
        end: end of the span, exclusive.
        text: characters of the span.
        sources: documents that it cites, in the order of their markers.
    """

    start: int
    end: int
    text: str
    sources: tuple[CitationSource, ...]


@dataclass
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: number of the sample.
        text: generated text; with `citations`, without their markers unless the request keeps them.
        token_ids: generated token ids.
        cumulative_logprob: sum of the generated tokens' log-probabilities.
        logprobs: log-probabilities by token id, for each generated token; None if not requested.
        finish_reason: `"stop"`, `"length"`, or `"abort"` after `AsyncLLM.abort`; None while generation continues.
        stop_reason: stop string or stop token id that ended the text; None for an end-of-sequence token.
        citations: citations of the text, in its order; None if not requested.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    citations: list[Citation] | None = None


@dataclass(frozen=True)
class FocusOutput:
    """Choice among the documents of a prompt; see `chunkattn.focus.Focus`.

    Attributes:
        documents: numbers of the chosen documents in the caller's order of documents, the best first. Of equal documents, the
            first.
        scores: score of every document, in the caller's order; None for an empty document.
        mode: how the prompt shows the chosen documents, one of `chunkattn.focus.MODES`.
        score: name of the score.
        computed_tokens: tokens that the engine computed to score the documents, in addition to the prompt.
        shown: numbers of the chosen documents in the order in which the prompt shows them: `"reread"` repeats them in this
            order, `"only"` has them as its chunks, or as the only one where documents are joined.
    """

    documents: list[int]
    scores: list[float | None]
    mode: str
    score: str
    computed_tokens: int
    shown: list[int] = field(default_factory=list)


@dataclass
class RequestOutput:
    """Prompt and its samples. Chunks are in the caller's order.

    Attributes:
        request_id: id of the request.
        prompt: parts joined without separators; None for a prompt of token ids.
        prompt_token_ids: logical sequence prefix + chunks + question.
        outputs: samples of the prompt.
        prompt_logprobs: log-probabilities by token id, for each prompt token; None for the first token of a part.
        chunk_lens: tokens of each chunk; empty for a plain prompt.
        num_cached_tokens: prompt tokens whose K/V came from the cache or from a concurrent request.
        num_cached_chunk_tokens: cached tokens of each chunk.
        prefix_len: tokens of the prefix; 0 for a plain prompt.
        focus: choice among the documents; None for a prompt without `focus`. Prompt, token ids and chunks are then those of the
            prompt that shows the choice.
        joined: tokens of each document by its number, in the order in which the only chunk holds them; None for a prompt whose
            chunks are not joined. An empty document is not among them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    chunk_lens: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    num_cached_chunk_tokens: tuple[int, ...] = ()
    prefix_len: int = 0
    focus: FocusOutput | None = None
    joined: Mapping[int, int] | None = None


@dataclass(frozen=True)
class ScoreUsage:
    """Token counts of a scoring request.

    Attributes:
        prompt_tokens: tokens of query and items, each counted once.
        computed_tokens: rows that the model ran; the query counts again for every pack or item that computes it.
        cached_tokens: tokens that were not computed: of the query in the cache, or of items in the cache that come before the
            query; of items that repeat another item of the call, and of items that were scored before with the same query. The
            query counts too if no item needed it.
    """

    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class ScoreOutput:
    """Scores of all items of a query.

    Attributes:
        scores: `scores[i][j]` of item `i` and label `j`, in the request's order; a row is as long as its item's list of labels.
            For a sequence classifier, `j` is the class, and the score is the softmax over the classes, or the sigmoid of a
            single class.
        logprobs: log-probabilities of the labels, a float32 log-softmax over the vocabulary; None for a classifier.
        algorithm: name of the algorithm that ran; `"prefill_extend+serial"` where `item_first` finds only some items cached.
        usage: token counts.
        logits: `logits[i][j]`, a classifier's raw output for item `i` and class `j`; None for a language model.
        predicted_seconds: predicted time in seconds of each algorithm that could have run.
    """

    scores: list[list[float]]
    logprobs: list[list[float]] | None
    algorithm: str
    usage: ScoreUsage
    logits: list[list[float]] | None = None
    predicted_seconds: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RerankResult:
    """One document of a reranking, under Cohere's and Jina's names.

    Attributes:
        index: place of the document in the request.
        relevance_score: probability of the positive label, normalised over the two labels, or the sigmoid of a single logit;
            with an `activation_fn` in the model's files, that function of `logit`.
        document: text of the document, or its token ids if they were given.
        logit: log-odds of the relevance, whose sigmoid is `relevance_score`: the single logit, or the difference of the two
            labels' logits.
        truncated: whether the document was cut, by `max_tokens_per_doc` or `truncate_prompt_tokens`.
    """

    index: int
    relevance_score: float
    document: str | list[int]
    logit: float
    truncated: bool = False


@dataclass(frozen=True)
class RerankOutput:
    """Documents ranked by relevance.

    Attributes:
        results: documents, the best first; equal scores keep the request's order.
        template: name of the rerank template.
        algorithm: name of the algorithm that ran.
        usage: token counts of all documents, including documents that `top_n` leaves out.
    """

    results: list[RerankResult]
    template: str
    algorithm: str
    usage: ScoreUsage


@dataclass(frozen=True)
class CachedDocument:
    """One document of `LLM.precompute`.

    Attributes:
        tokens: number of the document's tokens.
        num_bytes: size in bytes of the document's K/V pages.
        was_cached: whether all of the document was in the cache before.
        done: whether the document has been computed.
        state_kept: whether the cache holds the state at the document's end, from which a question goes on without computing the
            document again; always False without recurrent layers.
    """

    tokens: int
    num_bytes: int
    was_cached: bool
    done: bool
    state_kept: bool = False


@dataclass(frozen=True)
class CacheReport:
    """Report of `LLM.precompute`.

    Attributes:
        prefix_tokens: number of the prefix's tokens.
        prefix_bytes: size in bytes of the prefix's K/V pages.
        documents: documents in the given order.
        pool_bytes: size of the whole KV pool in bytes.
        fits: number of leading documents that the pool can hold together with the prefix. With `keep_states`, their states and
            the prefix's fit beside the state of one running request, too.
        pin_ids: pin ids for `LLM.unpin`.
        state_bytes: size of one state in bytes; 0 without recurrent layers.
        state_slots: number of states that the engine holds, those of running requests among them.
    """

    prefix_tokens: int
    prefix_bytes: int
    documents: list[CachedDocument]
    pool_bytes: int
    fits: int
    pin_ids: tuple[str, ...] = ()
    state_bytes: int = 0
    state_slots: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the size in bytes of the prefix and all documents."""
        return self.prefix_bytes + sum(d.num_bytes for d in self.documents)
