"""Decisions on the engine under test: the ask, its prompts written out, and the check of its answers.

The prompts are written here a second time, as one text each, from the guide's description. `decide_call` makes the requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from chunkattn import Choice, ChunkLayout, Option, Predicate, Rating, make_layout
from chunkattn.calls.decide import decide_call
from chunkattn.calls.frontend import Frontend
from chunkattn.decisions import Answer, PredicateAnswer, Question
from tests.fuzz.prompts import Ids, joined
from tests.fuzz.rig import LETTERS, POSITIONS, WORDS, read, words

FREE = "N/A"
"""State behind which the priors of a calibrated call are read."""


@dataclass(frozen=True)
class Decide:
    """Ask typed questions about a state, perhaps behind documents.

    Attributes:
        system: tokens of the system message; empty for none. A chat with this message has the same prefix.
        joined: whether the documents are one chunk.
    """

    system: Ids
    documents: tuple[Ids, ...]
    state: Ids
    questions: tuple[Question, ...]
    method: str = "letters"
    calibrate: bool = False
    salt: str | None = None
    priority: int = 0
    joined: bool = False

    def job(self, frontend: Frontend) -> Any:
        """Make the call; every other document is a text if its tokens are words."""
        documents = [
            words(own) if number % 2 and max(own, default=0) < WORDS else list(own) for number, own in enumerate(self.documents)
        ]
        return decide_call(
            frontend,
            words(self.state),
            self.questions,
            documents=documents,
            system=words(self.system) or None,
            method=self.method,
            calibrate=self.calibrate,
            chunk_mode="joined" if self.joined else "isolated",
            cache_salt=self.salt,
            priority=self.priority,
        )

    def apart(self, positions: str) -> Iterator[Decide]:
        """Yield an ask for each question alone, with options and documents in another order where order has no effect."""
        documents = self.documents[::-1] if POSITIONS[positions][0] == "shared" else self.documents
        for own in self.questions:
            turned = replace(own, options=own.options[::-1]) if isinstance(own, Choice) else own
            yield replace(self, questions=(turned,), documents=documents)


class Item(NamedTuple):
    """One prompt of a question: tokens behind the state, and the labels after them, or the answer whose tokens are read."""

    question: Ids
    labels: Ids
    answer: Ids


def items_of(question: Question, method: str) -> list[Item]:
    """Return the prompts of a question in the order of the sorted options or of the levels."""
    yes_no = read("yes no")
    if isinstance(question, Predicate):
        cases = "".join(f"\n{word}: {text}" for word, text in (("yes", question.yes), ("no", question.no)) if text is not None)
        return [Item(read(f"Is this true? {question.text}{cases}\nAnswer yes or no only."), yes_no, ())]
    shown = [
        (entry if isinstance(entry, str) else getattr(entry, "value", None) or entry.label, getattr(entry, "description", None))
        for entry in (question.options if isinstance(question, Choice) else question.levels)
    ]
    if isinstance(question, Choice):
        shown.sort(key=lambda own: (own[0], own[1] or ""))
    listed = [text if description is None else f"{text}: {description}" for text, description in shown]
    if method == "separate":
        right = "\nIs the proposed answer right? Answer yes or no only."
        return [Item(read(f"{question.text}\nProposed answer: {own}{right}"), yes_no, ()) for own in listed]
    if method == "letters" and len(shown) <= len(LETTERS):
        lines = "".join(f"\n{letter}. {own}" for letter, own in zip(LETTERS, listed, strict=False))
        noun = "option" if isinstance(question, Choice) else "level"
        text = f"{question.text}{lines}\nAnswer with the letter of one {noun} only."
        return [Item(read(text), read(" ".join(LETTERS[: len(shown)])), ())]
    return [Item(read(f"{question.text}\nAnswer with a few words only."), (), read(own)) for own, _ in shown]


def prompts(ask: Decide, positions: str) -> list[list[tuple[ChunkLayout, Item]]]:
    """Return the layout of every item, without the last token of its answer: behind the state, and then of the priors."""
    items = [item for question in ask.questions for item in items_of(question, ask.method)]
    states = [(joined(ask.documents) if ask.joined else ask.documents, (*ask.state, *read("Question:")))]
    if ask.calibrate:
        states.append(((), read(f"{FREE} Question:")))
    found = []
    for documents, state in states:  # the priors are read without documents
        ends = [(*state, *item.question, *item.answer[:-1]) for item in items]
        if documents:
            laid_out = [make_layout(ask.system, documents, end, *POSITIONS[positions]) for end in ends]
        else:
            laid_out = [make_layout([], [], ask.system + end) for end in ends]
        found.append([*zip(laid_out, items, strict=True)])
    return found


def rows_of(job: Any) -> list[list[np.ndarray]]:
    """Return the log-probabilities of every item that a call has read, behind the state and behind the state of the priors."""
    return [[np.asarray(row) for row in call.result().logprobs] for call in job._calls]


def expected_answers(ask: Decide, rows: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Return the label mass and the probabilities of each question, sorted options in their order, from its items' rows."""
    places = iter(range(len(rows[0])))
    found = []
    for question in ask.questions:
        items = items_of(question, ask.method)
        own = [next(places) for _ in items]
        texts = bool(items[0].answer)
        logs, *empty = [[part[n].sum(keepdims=True) if texts else part[n] for n in own] for part in rows]
        masses = np.exp(np.stack(logs))
        mass = masses.sum() if texts else masses.sum(axis=1).min()
        weighed = np.stack(logs) - (np.stack(empty[0]) if empty else 0.0)
        odds = np.exp(weighed.ravel() if texts or len(items) == 1 else weighed[:, 0] - weighed[:, 1])
        found.append(np.array([mass, *odds / odds.sum()]))
    return found


def numbers_of(question: Question, answer: Answer) -> np.ndarray:
    """Return the label mass and the probabilities of an answer, options sorted."""
    if isinstance(answer, PredicateAnswer):
        shares = [answer.probability, 1 - answer.probability]
    elif isinstance(question, Rating):
        shares = list(answer.probabilities.values())
    else:
        assert isinstance(question, Choice)
        order = sorted((own.value, own.description or "") if isinstance(own, Option) else (own, "") for own in question.options)
        shares = [answer.probabilities[value] for value, _ in order]
    return np.array([answer.label_mass, *shares])
