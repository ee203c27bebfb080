"""Questions that are asked again and again: items to score and prompts to continue, each with its first answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from chunkattn.tools.flips.replies import Score, Tally, Tokens, read_scores, read_tokens
from chunkattn.tools.load.workloads import GENERATIONS, LABELLED, SCORINGS, WORDS, Texts, generation_fields, scoring_fields

_LIKELIEST = 5
"""Likeliest tokens asked for at each token; OpenAI's completions allow no more."""


@dataclass(frozen=True, kw_only=True)
class FlipPlan:
    """Questions and conditions.

    Attributes:
        model: name of the served model, by default the first that the server lists.
        scoring: form in which items are sent: rerank (/v1/rerank), score (/v1/score of this project and SGLang), pairs
            (/v1/score of vLLM), generative_scoring (vLLM); none asks for no scores.
        generation: form in which documents are sent: chunks (this project's completions), prompt (one text), chat; none asks
            for no texts.
        label_ids: token ids of the labels, for the forms in `LABELLED`.
        queries: number of queries.
        items: number of compared items behind each query.
        prompts: number of prompts to continue.
        documents: number of documents of a prompt.
        query_tokens: tokens of a query.
        item_tokens: mean tokens of a compared item. Other items have between 1 and three times as many.
        prefix_tokens: tokens of the prefix of all prompts.
        document_tokens: tokens of a document.
        question_tokens: tokens of a question.
        output_tokens: tokens to generate.
        ignore_eos: generate all tokens, by a field of vLLM and this project that other servers may refuse.
        company: numbers of other items that are scored in the same request.
        rounds: number of times that each condition is asked.
        load: other requests under way at once in the condition under load.
        seed: seed of the texts. By default random: a server has the texts of a seed it has seen cached.
        timeout_s: longest wait for an answer in seconds.
        salted: whether every scoring request in company, in other orders and under load has a `cache_salt` of its own, which
            makes a server compute scores that it keeps.
    """

    model: str | None = None
    scoring: str | None = "rerank"
    generation: str | None = "chunks"
    label_ids: tuple[int, ...] = ()
    queries: int = 4
    items: int = 8
    prompts: int = 4
    documents: int = 4
    query_tokens: int = 200
    item_tokens: int = 20
    prefix_tokens: int = 32
    document_tokens: int = 60
    question_tokens: int = 24
    output_tokens: int = 8
    ignore_eos: bool = True
    company: tuple[int, ...]
    rounds: int = 2
    load: int = 8
    seed: int | None = None
    timeout_s: float = 300.0
    salted: bool = False


Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]
Round = Callable[[Tally], Awaitable[None]]
Request = Sequence[tuple[int | None, str]]
"""Items of one request, each with its place among the compared items; None for other items."""
Arrangement = Callable[[Sequence[str]], Iterator[Request]]
"""Function from the items of a query to the requests that ask for them."""


class Scoring:
    """Items behind queries, whose scores are compared.

    Args:
        ask: sends a question.
        plan: questions and conditions.
        texts: maker of texts.
    """

    name, option = "scores", "--scoring"

    def __init__(self, ask: Ask, plan: FlipPlan, texts: Texts) -> None:
        assert plan.scoring is not None
        self._ask, self._plan, self._texts, self._form = ask, plan, texts, plan.scoring
        self._rng = random.Random(f"{plan.seed} scores")
        queries = [texts.draw(self._rng, plan.query_tokens) for _ in range(plan.queries)]
        self._asked = [(query, [self._target() for _ in range(plan.items)], list[Score]()) for query in queries]

    async def first(self) -> None:
        """Ask every item for the first time, alone in its request."""
        for query, items, first in self._asked:
            first += [(await self._scores(query, [item]))[0] for item in items]

    def conditions(self) -> list[tuple[str, Round]]:
        """Return the conditions without load."""
        again = partial(self._compare, arrange=self._alone)
        companies = [(f"{count} other item{'s'[: count != 1]}", self._company(count)) for count in self._plan.company]
        return [("again", again), *companies, ("other orders", partial(self._compare, arrange=self._reordered, anew=True))]

    async def loaded(self, tally: Tally) -> None:
        """Ask every item alone and all items with new others, since a server may keep the score of an equal request."""
        await self._compare(tally, self._alone, anew=True)
        await self._company(self._plan.items + 3)(tally)

    def other(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Return a request of new items, half of the time behind a query that is compared."""
        query = rng.choice([rng.choice(self._asked)[0], self._texts.draw(rng, self._plan.query_tokens)])
        return self._request(query, [self._stranger(rng) for _ in range(rng.randint(1, 16))])

    async def _compare(self, tally: Tally, arrange: Arrangement, *, anew: bool = False) -> None:
        """Ask the items of every query again, and compare their scores with the first ones.

        Args:
            tally: comparison to add to.
            arrange: yields the requests for a query's items.
            anew: whether the server is to compute scores that it keeps.
        """
        for query, items, first in self._asked:
            scored: dict[int | None, Score] = {}
            for request in arrange(items):
                scores = await self._scores(query, [text for _, text in request], anew=anew)
                scored |= zip((place for place, _ in request), scores, strict=True)
            now = [scored[place] for place in range(len(items))]
            tally.add_scores(first, now, is_labelled=self._form in LABELLED)

    def _alone(self, items: Sequence[str]) -> Iterator[Request]:
        yield from ([entry] for entry in enumerate(items))

    def _reordered(self, items: Sequence[str]) -> Iterator[Request]:
        yield [(place, items[place]) for place in _other_order(self._rng, len(items))]

    def _company(self, count: int) -> Round:
        """Return the condition in which every item has `count` others; half of them at most are compared too."""
        size = max(1, (count + 1) // 2)

        def arrange(items: Sequence[str]) -> Iterator[Request]:
            order = self._rng.sample(range(len(items)), len(items))
            for at in range(0, len(order), size):
                request: list[tuple[int | None, str]] = [(place, items[place]) for place in order[at : at + size]]
                request += [(None, self._stranger(self._rng)) for _ in range(count + 1 - len(request))]
                self._rng.shuffle(request)
                yield request

        return partial(self._compare, arrange=arrange, anew=True)

    async def _scores(self, query: str, items: Sequence[str], *, anew: bool = False) -> list[Score]:
        path, body = self._request(query, items)
        if anew and self._plan.salted:
            body["cache_salt"] = f"flips {self._rng.getrandbits(64):x}"
        return read_scores(await self._ask(path, body), len(items))

    def _request(self, query: str, items: Sequence[str]) -> tuple[str, dict[str, Any]]:
        fields = scoring_fields(self._form, query, items, self._plan.label_ids)
        return SCORINGS[self._form], {"model": self._plan.model} | fields

    def _target(self) -> str:
        mean = self._plan.item_tokens
        return self._item(self._rng, max(1, mean // 2), mean + mean // 2)

    def _stranger(self, rng: random.Random) -> str:
        return self._item(rng, 1, 3 * self._plan.item_tokens)

    def _item(self, rng: random.Random, least: int, most: int) -> str:
        return self._texts.draw(rng, rng.randint(least, most)) or rng.choice(WORDS.split())


class Generation:
    """Prompts whose greedy answers are compared.

    Args:
        ask: sends a question.
        plan: questions and conditions.
        texts: maker of texts.
    """

    name, option = "texts", "--generation"

    def __init__(self, ask: Ask, plan: FlipPlan, texts: Texts) -> None:
        assert plan.generation is not None
        self._ask, self._plan, self._texts, self._form = ask, plan, texts, plan.generation
        self._rng = random.Random(f"{plan.seed} texts")
        self._prefix = texts.draw(self._rng, plan.prefix_tokens)
        self._prompts = [(self._documents(self._rng), self._question(self._rng)) for _ in range(plan.prompts)]
        self._first: list[Tokens] = []

    async def first(self) -> None:
        """Ask every prompt for the first time."""
        for documents, question in self._prompts:
            self._first.append(await self._tokens(documents, question))

    def conditions(self) -> list[tuple[str, Round]]:
        """Return the conditions without load. The order of documents is free where they are chunks."""
        orders = (
            [("other orders", partial(self._again, reorder=True))]
            if self._form == "chunks" and self._plan.documents > 1
            else []
        )
        return [("again", self._again), ("all at once", self._together), *orders]

    async def loaded(self, tally: Tally) -> None:
        """Ask every prompt again, one after the other."""
        await self._again(tally)

    def other(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Return a new prompt, half of the time with documents of a compared prompt."""
        documents = rng.choice([rng.choice(self._prompts)[0], self._documents(rng)])
        documents = rng.sample(documents, rng.randint(1, len(documents)))
        return self._request(documents, self._question(rng), rng.randint(1, 2 * self._plan.output_tokens))

    async def _again(self, tally: Tally, *, reorder: bool = False) -> None:
        for first, (documents, question) in zip(self._first, self._prompts, strict=True):
            order = _other_order(self._rng, len(documents)) if reorder else range(len(documents))
            tally.add_tokens(first, await self._tokens([documents[place] for place in order], question))

    async def _together(self, tally: Tally) -> None:
        answers = await asyncio.gather(*(self._tokens(*prompt) for prompt in self._prompts), return_exceptions=True)
        for first, answer in zip(self._first, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            tally.add_tokens(first, answer)

    async def _tokens(self, documents: Sequence[str], question: str) -> Tokens:
        return read_tokens(await self._ask(*self._request(documents, question, self._plan.output_tokens)))

    def _request(self, documents: Sequence[str], question: str, output_tokens: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self._plan.model, "max_tokens": output_tokens, "temperature": 0}
        body |= {"logprobs": True, "top_logprobs": _LIKELIEST} if self._form == "chat" else {"logprobs": _LIKELIEST}
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        return GENERATIONS[self._form], body | generation_fields(self._form, self._prefix, documents, question)

    def _documents(self, rng: random.Random) -> list[str]:
        return [self._texts.draw(rng, self._plan.document_tokens) for _ in range(self._plan.documents)]

    def _question(self, rng: random.Random) -> str:
        return self._texts.draw(rng, self._plan.question_tokens)


Kind = Scoring | Generation
"""One kind of questions."""


def _other_order(rng: random.Random, count: int) -> list[int]:
    """Return a random order of `count` things that is not their own."""
    order = rng.sample(range(count), count)
    return order[::-1] if order == sorted(order) else order
