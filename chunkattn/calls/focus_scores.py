"""Scores by which `focus` chooses documents: the likelihood of the question, and the relevance of a rerank template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import Job, JobsInTurn
from chunkattn.calls.likelihood import LikelihoodJob, likelihood_request, stage_tokens
from chunkattn.calls.rerank import rerank_call
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import RequestError, shown
from chunkattn.outputs import RerankOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import salt_key
from chunkattn.parsers.choice import behind_one, check_likelihood, read_from


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


def _tokens(own: Candidates) -> int:
    """Return the tokens of all requests of a prompt's candidates."""
    layout = own.prompt.layout
    return sum(layout.prefix_len + layout.chunk_lens[number] + layout.question_len + 1 for number in own.numbers)


def _request(frontend: Frontend, own: Candidates, number: int) -> GenerateRequest:
    """Return the request that reads the question behind one document."""
    alone = behind_one(own.prompt.layout, number, own.gap)
    return likelihood_request(
        frontend,
        alone,
        read_from(own.prompt, alone),
        salt_key=salt_key(own.cache_salt),
        priority=own.priority,
        weighing=own.weighing,
        private=own.private,
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
    for own in listed:
        prompt, lengths = own.prompt, own.prompt.layout.chunk_lens
        check_likelihood(prompt)
        frontend.limits.check_layout(prompt.layout, prompt.names)  # parts and positions of every request are the prompt's
        frontend.limits.check_tokens(_tokens(own), "the question and each document, which focus scores,", prompt.names.chunks)
        if own.numbers:
            number = max(own.numbers, key=lengths.__getitem__)
            names = prompt.names._replace(listed=(prompt.names.of(number),))
            frontend.limits.check(_request(frontend, own, number), names)
    made = (_request(frontend, own, number) for own in listed for number in own.numbers)
    ends = np.cumsum([0, *(len(own.numbers) for own in listed)]).tolist()

    def finish(logprobs: list[np.ndarray], computed: list[int]) -> list[Scored]:
        means = [float(np.mean(own, dtype=np.float64)) for own in logprobs]
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
    for own in listed:
        prompt = own.prompt
        if not isinstance(prompt.query, str) or not prompt.query.strip():
            text = "focus by relevance reads the question's text; send documents and a question as texts, or use likelihood"
            raise RequestError(text, param="focus")
        names = prompt.names._replace(prefix=prompt.names.question, listed=[prompt.names.of(n) for n in own.numbers])
        try:
            call = rerank_call(
                frontend,
                prompt.query,
                _sources(prompt, own.numbers),
                order="document_first",
                algorithm="serial" if own.private else None,  # it keeps no K/V
                cache_salt=own.cache_salt,
                priority=own.priority,
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
    found: dict[bytes, str | list[int]] = {}
    for number, digest in enumerate(digests):
        own = prompt.source(number)
        found[digest] = min(own, found.get(digest, own), key=lambda form: (not isinstance(form, str), form))
    return [found[digests[number]] for number in numbers]
