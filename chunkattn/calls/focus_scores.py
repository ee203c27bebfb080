"""`focus`: scores of documents, by the likelihood of the question or the relevance of a rerank template, and the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import Flow, Job, JobsInTurn
from chunkattn.calls.likelihood import LikelihoodJob, likelihood_request, stage_tokens
from chunkattn.calls.rerank import rerank_call
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import CapacityError, RequestError, shown
from chunkattn.outputs import RerankOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import salt_key
from chunkattn.parsers.choice import answered, behind_one, candidates_of, check_likelihood, longest, read_from
from chunkattn.parsers.joined import join


@dataclass(frozen=True)
class Candidates:
    """Documents of one prompt that a score judges.

    Attributes:
        prompt: the prompt, with its documents as chunks.
        numbers: numbers of the documents to judge: the first of each content, none empty.
        gap: positions left free between prefix and documents.
        cache_salt: salt of the cache.
        priority: rank in the queue; lower goes first.
        weighing: see `GenerateRequest`.
        private: whether the scores read nothing from the cache and leave nothing in it.
    """

    prompt: ParsedPrompt
    numbers: Sequence[int]
    gap: int = 0
    cache_salt: str | None = None
    priority: int = 0
    weighing: tuple[float, float] | None = None
    private: bool = False


class Scored(NamedTuple):
    """Scores of one prompt's documents.

    Attributes:
        values: score of each candidate; the highest is chosen first.
        computed: tokens that the engine computed for them.
    """

    values: list[float]
    computed: int


class ScoringJob(Job[list[Scored]], Protocol):
    """Job whose flow returns the scores of several prompts' candidates.

    Attributes:
        tokens: tokens of all its prompts, cached or not.
    """

    tokens: int


FocusScore = Callable[[Frontend, Sequence[Candidates]], ScoringJob]
"""Function that checks the candidates of several prompts, and returns the job that scores them.

It raises `RequestError` for a prompt that the score cannot judge. The scores depend on a prompt and its documents' contents
alone: neither on their order nor on other prompts.
"""
SCORES: dict[str, FocusScore] = {}
"""Scores by name."""


def register_focus_score(name: str) -> Callable[[FocusScore], FocusScore]:
    """Register a score of `Focus` under a name, as a decorator.

    Args:
        name: value of `Focus.score` that selects it.
    """

    def register(score: FocusScore) -> FocusScore:
        SCORES[name] = score
        return score

    return register


def get_score(name: str) -> FocusScore:
    """Return a score by name.

    Args:
        name: key in `SCORES`.

    Raises:
        RequestError: no score has this name.
    """
    if not isinstance(name, str) or name not in SCORES:
        raise RequestError(f"focus score must be one of {', '.join(SCORES)}, got {shown(name)}", param="focus")
    return SCORES[name]


def _tokens(candidates: Candidates) -> int:
    """Return the tokens of all requests of a prompt's candidates."""
    layout = candidates.prompt.layout
    return sum(layout.prefix_len + layout.chunk_lens[number] + layout.question_len + 1 for number in candidates.numbers)


def _request(frontend: Frontend, candidates: Candidates, number: int) -> GenerateRequest:
    """Return the request that reads the question behind one document."""
    alone = behind_one(candidates.prompt.layout, number, candidates.gap)
    return likelihood_request(
        frontend,
        alone,
        read_from(candidates.prompt, alone),
        salt_key=salt_key(candidates.cache_salt),
        priority=candidates.priority,
        weighing=candidates.weighing,
        private=candidates.private,
    )


@register_focus_score("likelihood")
def likelihood(frontend: Frontend, listed: Sequence[Candidates]) -> ScoringJob:
    """Return the job that scores documents by the mean log-probability of the question's tokens.

    A document's score is read from the prompt of prefix, this document and question. The first token of the question is not
    read: no token of its part predicts it. In a chat, the mean counts the tokens from the last user message on. Cached
    documents cost the tokens of the question each.

    Args:
        frontend: frontend of the engine.
        listed: candidates of each prompt.

    Raises:
        RequestError: a question has one token, or a token id is outside the vocabulary.
        CapacityError: a document with the question cannot fit, or all exceed `max_tokens_per_call`.
    """
    for candidates in listed:
        prompt, lengths = candidates.prompt, candidates.prompt.layout.chunk_lens
        check_likelihood(prompt)
        frontend.limits.check_layout(prompt.layout, prompt.names)  # parts and positions of every request are the prompt's
        frontend.limits.check_tokens(
            _tokens(candidates), "the question and each document, which focus scores,", prompt.names.chunks
        )
        if candidates.numbers:
            number = max(candidates.numbers, key=lengths.__getitem__)
            names = prompt.names._replace(listed=(prompt.names.of(number),))
            frontend.limits.check(_request(frontend, candidates, number), names)
    made = (_request(frontend, candidates, number) for candidates in listed for number in candidates.numbers)
    ends = np.cumsum([0, *(len(candidates.numbers) for candidates in listed)]).tolist()

    def finish(logprobs: list[np.ndarray], computed: list[int]) -> list[Scored]:
        means = [float(np.mean(row, dtype=np.float64)) for row in logprobs]
        return [Scored(means[a:b], sum(computed[a:b])) for a, b in pairwise(ends)]

    return LikelihoodJob(made, ends[-1], sum(map(_tokens, listed)), stage_tokens(frontend), finish)


@register_focus_score("relevance")
def relevance(frontend: Frontend, listed: Sequence[Candidates]) -> ScoringJob:
    """Return the job that scores documents by the log-odds of "yes" under the engine's rerank template.

    The query is the text of the question, of a chat its last user message. Documents come first in the prompt, so they stay in
    the cache as `LLM.rerank(order="document_first")` keeps them: behind another prefix than as chunks.

    Args:
        frontend: frontend of the engine.
        listed: candidates of each prompt.

    Raises:
        RequestError: a question is no text, or as `LLM.rerank`.
    """
    calls, tokens = [], 0
    for candidates in listed:
        prompt = candidates.prompt
        if not isinstance(prompt.query, str) or not prompt.query.strip():
            text = "focus by relevance reads the question's text; send documents and a question as texts, or use likelihood"
            raise RequestError(text, param="focus")
        names = prompt.names._replace(prefix=prompt.names.question, listed=[prompt.names.of(n) for n in candidates.numbers])
        try:
            call = rerank_call(
                frontend,
                prompt.query,
                _sources(prompt, candidates.numbers),
                order="document_first",
                algorithm="serial" if candidates.private else None,  # it keeps no K/V
                cache_salt=candidates.cache_salt,
                priority=candidates.priority,
                names=names,
            )
        except RequestError as error:
            param = error.param if error.param in (names.prefix, names.chunks) else "focus"
            raise type(error)(f"focus by relevance: {error}", param=param) from None
        calls.append(call)
        tokens += call.tokens
    return JobsInTurn(calls, lambda outputs: [_logits(output) for output in outputs], tokens)


def _logits(output: RerankOutput) -> Scored:
    by_place = sorted(output.results, key=lambda result: result.index)
    return Scored([result.logit for result in by_place], output.usage.computed_tokens)


def _sources(prompt: ParsedPrompt, numbers: Sequence[int]) -> list[str | list[int]]:
    """Return documents as the caller gave them. Of several forms of one content, the choice ignores the caller's order."""
    digests = prompt.layout.chunk_digests
    forms: dict[bytes, str | list[int]] = {}
    for number, digest in enumerate(digests):
        form = prompt.source(number)
        forms[digest] = min(form, forms.get(digest, form), key=lambda form: (not isinstance(form, str), form))
    return [forms[digests[number]] for number in numbers]


def choose_documents(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    salts: Sequence[str | None],
    priorities: Sequence[int],
    weighing: tuple[float, float] | None,
    private: Sequence[bool],
) -> tuple[int, Flow[list[ParsedPrompt]]]:
    """Check the prompts that choose documents, and return the tokens that are scored, cached or not, with the flow.

    The flow returns the prompts, each with the layout that shows its choice, and the choice.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts. Those without a focus stay as they are.
        salts: salt of each prompt.
        priorities: rank of each prompt.
        weighing: see `GenerateRequest`.
        private: whether each prompt bypasses the cache.

    Raises:
        RequestError: a score cannot judge a prompt, or the engine's positions are not `shared`.
        CapacityError: a document with the question cannot fit.
    """
    by_score: dict[str, dict[int, Candidates]] = {}
    for place, prompt in enumerate(prompts):
        if prompt.focus is None:
            continue
        if (strategy := frontend.config.position_strategy) != "shared":
            text = f"focus needs position_strategy 'shared', this engine has {strategy!r}: its documents fit one place only"
            raise RequestError(text, param="focus")
        listed, numbers = by_score.setdefault(prompt.focus.score, {}), candidates_of(prompt.layout)
        how = salts[place], priorities[place], weighing, private[place]
        listed[place] = Candidates(prompt, numbers, frontend.gap, *how)
    jobs = [(listed, get_score(name)(frontend, list(listed.values()))) for name, listed in by_score.items()]

    def flow() -> Flow[list[ParsedPrompt]]:
        shown = list(prompts)
        for listed, job in jobs:
            scores = yield from job.flow()
            for (place, candidates), scored in zip(listed.items(), scores, strict=True):
                shown[place] = answered(candidates.prompt, candidates.numbers, scored.values, scored.computed, frontend.gap)
        return shown

    return sum(job.tokens for _, job in jobs), flow()


def check_longest(limits: EngineLimits, request: GenerateRequest, prompt: ParsedPrompt, gap: int) -> GenerateRequest:
    """Check a request against every limit and return it, with the longest layout that the prompt's focus can compose.

    Args:
        limits: limits of the engine.
        request: request with the prompt's own layout.
        prompt: parsed prompt with a focus.
        gap: positions left free between prefix and documents.

    Raises:
        RequestError: as `EngineLimits.check`.
        CapacityError: the prompt can never fit, or fits without the documents that focus reads again.
    """
    focus = prompt.focus
    assert focus is not None
    if focus.mode != "only":
        whole = join(prompt, "shared", gap) if prompt.joins else prompt
        limits.check(replace(request, layout=whole.layout), whole.names)
    shown = longest(prompt, gap)
    composed = replace(request, layout=shown.layout)
    try:
        limits.check(composed, shown.names)
    except CapacityError as error:
        if focus.mode == "only":
            raise
        count = min(focus.top_n, len(candidates_of(prompt.layout)))
        documents = f"{count} {prompt.names.chunk}{'s' * (count > 1)}"
        text = f"focus reads up to {documents} again: {error}; choose fewer or take the mode 'only'"
        raise CapacityError(text, param="focus") from None
    return composed
