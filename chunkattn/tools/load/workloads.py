"""Requests of a workload: random texts of known token counts, as bodies for the routes of several servers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chunkattn.errors import ConfigError

WORDS = (
    "apple river stone cloud garden window paper silver winter summer doctor teacher market bridge forest island "
    "letter music number orange picture road school table village water yellow book city door engine farm "
    "glass house iron key lake moon night ocean people queen rain ship tree voice wind year"
)
GENERATIONS = {"chunks": "/v1/completions", "prompt": "/v1/completions", "chat": "/v1/chat/completions"}
SCORINGS = {
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "pairs": "/v1/score",
    "generative_scoring": "/generative_scoring",
}
LABELLED = ("score", "generative_scoring")
"""Forms of `SCORINGS` that take labels."""
LABELS = ("yes", "no")
_TEMPLATE = "Document: {document}\n\n"
"""The engine's default template of documents, for servers that take one prompt."""
_REPEATS = 8


@dataclass(frozen=True)
class Workload:
    """Kind and size of the requests.

    Attributes:
        name: name on the command line, such as `rag-8x100` or `rerank-10x300`.
        is_rerank: whether the requests ask for scores.
        count: number of documents, or of items.
        tokens: tokens of a document, or of the query.
    """

    name: str
    is_rerank: bool
    count: int
    tokens: int

    @classmethod
    def parse(cls, name: str) -> Workload:
        """Return the workload of a name.

        Raises:
            ConfigError: the name is not of the form `rag-DOCUMENTSxTOKENS` or `rerank-ITEMSxTOKENS`, or a count is 0.
        """
        match = re.fullmatch(r"(rag|rerank)-([1-9]\d{0,5})x([1-9]\d{0,6})", name)
        if match is None:
            raise ConfigError(
                f"unknown workload {name!r}; give rag-DOCUMENTSxTOKENS or rerank-ITEMSxTOKENS, "
                "such as rag-8x100 or rerank-10x300 (10 items behind a query of 300 tokens)"
            )
        return cls(name, match[1] == "rerank", int(match[2]), int(match[3]))


@dataclass(frozen=True)
class WireForm:
    """Sizes and wire format that all requests of a command share.

    Attributes:
        model: name of the served model.
        generation: form in which documents are sent: chunks (this project's completions), prompt (one text), chat.
        scoring: form in which items are sent: rerank (/v1/rerank), score (/v1/score of this project and SGLang), pairs
            (/v1/score of vLLM), generative_scoring (vLLM).
        prefix_tokens: tokens of the prefix of all prompts with documents.
        question_tokens: tokens of a question; each is new.
        output_tokens: tokens to generate.
        item_tokens: tokens of an item.
        document_pool: number of documents to draw from; 0 makes new documents for every request.
        ignore_eos: generate all tokens, by a field of vLLM and this project that other servers may refuse.
        label_ids: token ids of the labels; empty where the route takes none.
    """

    model: str
    generation: str = "chunks"
    scoring: str = "rerank"
    prefix_tokens: int = 32
    question_tokens: int = 24
    output_tokens: int = 32
    item_tokens: int = 20
    document_pool: int = 64
    ignore_eos: bool = True
    label_ids: tuple[int, ...] = ()

    def path(self, workload: Workload) -> str:
        """Return the route of a workload."""
        return SCORINGS[self.scoring] if workload.is_rerank else GENERATIONS[self.generation]


class Texts:
    """Random texts of plain words.

    Args:
        costs: tokens of each word after a space.
    """

    def __init__(self, costs: dict[str, int]) -> None:
        self._words = sorted(costs.items(), key=lambda entry: entry[1])

    @classmethod
    async def measured(cls, tokens: Callable[[str], Awaitable[list[int]]]) -> Texts:
        """Measure the tokens of every word.

        Args:
            tokens: returns the token ids of a text.
        """
        costs = {}
        for word in WORDS.split():
            one, many = await tokens(word), await tokens(" ".join([word] * (1 + _REPEATS)))
            costs[word] = max(1, round((len(many) - len(one)) / _REPEATS))
        return cls(costs)

    def draw(self, rng: random.Random, tokens: int) -> str:
        """Return a text of at most `tokens` tokens, and less by the shortest word at most."""
        words, left = [], tokens
        known = self._words
        while known and left:
            word, cost = rng.choice(known)
            if cost > left:
                known = [entry for entry in known if entry[1] <= left]
            else:
                words.append(word)
                left -= cost
        return " ".join(words)


class Source:
    """Bodies of one workload, without end.

    Args:
        workload: kind and size of the requests.
        form: wire format.
        texts: maker of texts.
        seed: seed of the texts.
    """

    def __init__(self, workload: Workload, form: WireForm, texts: Texts, seed: int | None) -> None:
        self._workload, self._form, self._texts = workload, form, texts
        self._rng = random.Random(f"{seed} {workload.name}")
        self._prefix = texts.draw(self._rng, form.prefix_tokens)
        size = 0 if workload.is_rerank else form.document_pool
        self._pool = [texts.draw(self._rng, workload.tokens) for _ in range(size)]

    def warm_up(self) -> Iterator[bytes]:
        """Yield requests that contain every document of the pool once, and at least two requests."""
        count = self._workload.count
        pooled = [self._pool[at : at + count] for at in range(0, len(self._pool), count)]
        for documents in pooled:
            missing = count - len(documents)
            yield self._generation([*documents, *self._pool[:missing]])
        for _ in range(2 - len(pooled)):
            yield next(self)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Return the body of a new request."""
        if self._workload.is_rerank:
            return self._scoring()
        count = self._workload.count
        if self._pool:
            return self._generation(self._rng.sample(self._pool, count))
        return self._generation([self._texts.draw(self._rng, self._workload.tokens) for _ in range(count)])

    def _generation(self, documents: list[str]) -> bytes:
        form, question = self._form, self._texts.draw(self._rng, self._form.question_tokens)
        body: dict[str, Any] = {
            "model": form.model,
            "max_tokens": form.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if form.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | generation_fields(form.generation, self._prefix, documents, question)).encode()

    def _scoring(self) -> bytes:
        form, workload = self._form, self._workload
        query = self._texts.draw(self._rng, workload.tokens)
        items = [self._texts.draw(self._rng, form.item_tokens) for _ in range(workload.count)]
        return json.dumps({"model": form.model} | scoring_fields(form.scoring, query, items, form.label_ids)).encode()


def generation_fields(generation: str, prefix: str, documents: Sequence[str], question: str) -> dict[str, Any]:
    """Return the fields of a body that hold the prompt.

    Args:
        generation: key of `GENERATIONS`.
        prefix: text before the documents.
        documents: texts of the documents.
        question: text after the documents.
    """
    if generation == "chunks":
        return {"chunks": {"prefix": prefix, "documents": list(documents), "question": question}}
    joined = "".join(_TEMPLATE.format(document=document) for document in documents) + question
    if generation == "prompt":
        return {"prompt": f"{prefix}\n\n{joined}"}
    return {"messages": [{"role": "system", "content": prefix}, {"role": "user", "content": joined}]}


def scoring_fields(scoring: str, query: str, items: Sequence[str], label_ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a body that hold query, items and labels.

    Args:
        scoring: key of `SCORINGS`.
        query: text of the query.
        items: texts of the items.
        label_ids: token ids of the labels, for the forms in `LABELLED`.
    """
    if scoring == "rerank":
        return {"query": query, "documents": list(items)}
    if scoring == "pairs":
        return {"text_1": query, "text_2": list(items)}
    # The space keeps the last word of the query and the first word of an item apart.
    fields: dict[str, Any] = {"query": query, "items": [f" {item}" for item in items]}
    return fields | {"label_token_ids": list(label_ids), "apply_softmax": True}
