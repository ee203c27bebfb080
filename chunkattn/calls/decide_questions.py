"""Questions of `LLM.decide` as prompts with labels, and the answers from the labels' log-probabilities."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.special import logsumexp, softmax

from chunkattn.calibration import LabelScale
from chunkattn.decisions import (
    Answer,
    Choice,
    ChoiceAnswer,
    Level,
    Option,
    Predicate,
    PredicateAnswer,
    Question,
    Rating,
    RatingAnswer,
)
from chunkattn.engine.limits import EngineLimits
from chunkattn.errors import RequestError, shown
from chunkattn.parsers.arguments import as_list, is_list
from chunkattn.parsers.states import StateTemplate

METHODS = "letters", "likelihood", "separate"
"""Methods of `LLM.decide`."""
MAX_OPTIONS = 255
"""Maximum number of options or levels of a question."""

LabelIds = tuple[int, ...]
"""Tokens of one label, whose probabilities are summed: one token for each spelling."""


class AnswerLabels:
    """Labels that a model can give as its answer, each with every spelling that is one token after the chat template.

    Args:
        template: the chat template.
    """

    def __init__(self, template: StateTemplate) -> None:
        self.template = template

    @cached_property
    def yes_no(self) -> list[LabelIds]:
        """Return the tokens of yes and of no; an entry is empty if no spelling is one token."""
        return self._spelled([[word, word.capitalize(), word.upper()] for word in ("yes", "no")])

    @cached_property
    def letters(self) -> list[tuple[str, LabelIds]]:
        """Return the letters that are one token, with their tokens."""
        return self._found(string.ascii_uppercase)

    @cached_property
    def digits(self) -> list[tuple[str, LabelIds]]:
        """Return the digits that are one token, with their tokens."""
        return self._found(string.digits)

    def _found(self, labels: str) -> list[tuple[str, LabelIds]]:
        spelled = self._spelled([[label] for label in labels])
        return [(label, ids) for label, ids in zip(labels, spelled, strict=True) if ids]

    def _spelled(self, labels: list[list[str]]) -> list[LabelIds]:
        """Return the tokens of each label's words, with and without a space before; not those that two labels share."""
        texts = [[space + word for word in words for space in ("", " ")] for words in labels]
        tokens = [dict.fromkeys(token for text in words if (token := self.template.label(text)) is not None) for words in texts]
        shared = Counter(token for ids in tokens for token in ids)  # such as the unknown token
        return [tuple(token for token in ids if shared[token] == 1) for ids in tokens]


@dataclass(frozen=True)
class AskedQuestion:
    """Question as prompts, called items, with the labels to read after each.

    Attributes:
        question: the question.
        items: pieces of each item, see `StateTemplate.item`.
        labels: tokens of each label. Every item has the same labels.
        order: place of each label or item in the caller's options or levels.
        texts: answer that follows each item, whose own tokens are read; empty if labels are read.
        kind: kind of the labels, one of `chunkattn.calibration.LABEL_KINDS`.
        names: name of each label, as in a calibration of labels; empty where labels differ between questions.
    """

    question: Question
    items: list[list[str]]
    labels: list[LabelIds]
    order: list[int]
    texts: Sequence[str] = ()
    kind: str = "predicate"
    names: Sequence[str] = ("yes", "no")

    @property
    def label_ids(self) -> tuple[int, ...]:
        """Return the tokens to read after each item."""
        return tuple(token for ids in self.labels for token in ids)

    @property
    def method(self) -> str:
        """Return the method by which a choice or rating is asked."""
        return "letters" if self.kind == "digits" else self.kind

    def answer(
        self, rows: Sequence[Sequence[float]], empty: Sequence[Sequence[float]] | None, scale: LabelScale | None = None
    ) -> Answer:
        """Return the answer.

        Args:
            rows: log-probabilities of `label_ids` after each item, or of the tokens of each item's text.
            empty: the same behind a content-free state, for calibration; None for none.
            scale: calibration of the labels, applied last; None for none.
        """
        logs = self._logs(rows)
        weighed = logs if empty is None else logs - self._logs(empty)
        # The options are items with one text each, the labels of one item, or items with the labels yes and no.
        scores = weighed.ravel() if self.texts or len(rows) == 1 else weighed[:, 0] - weighed[:, 1]
        if scale is not None:
            scores = scale.apply(scores, self.names)
        normalised = np.asarray(softmax(scores))
        mass = float(np.exp(logsumexp(logs, axis=0 if self.texts else 1)).min())
        return answered(self.question, normalised, self.order, mass, self.method)

    def _logs(self, rows: Sequence[Sequence[float]]) -> Float64[np.ndarray, "I L"]:
        """Return the log-probability of each label after each item, over all its spellings, or of each item's text."""
        if self.texts:
            return np.asarray([[np.sum(np.asarray(row, np.float64))] for row in rows])
        ends = np.cumsum([len(ids) for ids in self.labels])[:-1]
        return np.asarray([[logsumexp(part) for part in np.split(np.asarray(row, np.float64), ends)] for row in rows])


def answered(question: Question, shares: Float64[np.ndarray, " N"], order: Sequence[int], mass: float, method: str) -> Answer:
    """Return the answer to a question.

    Args:
        question: the question.
        shares: probabilities whose sum is 1; of a predicate, those of yes and no.
        order: place of each probability in the caller's options or levels.
        mass: label mass.
        method: method by which the question was asked.
    """
    if isinstance(question, Predicate):
        return PredicateAnswer(question.name, float(shares[0]), mass)
    probabilities = [0.0] * len(shares)
    for place, value in zip(order, shares.tolist(), strict=True):
        probabilities[place] = value
    if isinstance(question, Rating):
        levels = [level_of(level).label for level in question.levels]
        score = float(np.arange(len(shares)) @ np.asarray(probabilities))
        named = dict(zip(levels, probabilities, strict=True))
        return RatingAnswer(question.name, score, confidence(shares), named, mass, method)
    options = [option_of(option).value for option in question.options]
    best = options[order[int(shares.argmax())]]
    chances = dict(zip(options, probabilities, strict=True))
    return ChoiceAnswer(question.name, best, confidence(shares), chances, mass, method)


def confidence(probabilities: Float64[np.ndarray, " N"]) -> float:
    """Return 1 - H / ln(N), where H is the entropy of `N` probabilities in nats.

    Args:
        probabilities: at least 2 probabilities whose sum is 1.
    """
    positive = probabilities[probabilities > 0]
    return float(np.clip(1 + (positive @ np.log(positive)) / np.log(len(probabilities)), 0.0, 1.0))


def ask(question: Any, method: str, labels: AnswerLabels, part: str) -> AskedQuestion:
    """Check a question and return its prompts.

    Args:
        question: argument of the caller.
        method: one of `METHODS`.
        labels: labels of the engine's tokenizer behind its chat template.
        part: name of the question, for error messages.

    Raises:
        RequestError: the question is malformed, or its labels are not one token each.
    """
    check_question(question, part)
    if isinstance(question, Predicate):
        return _ask_predicate(question, labels, part)
    shown = _shown(question, part)
    # A fixed order of the options makes the prompt independent of the caller's order. Levels have an order of their own.
    order = list(range(len(shown)))
    if isinstance(question, Choice):
        order.sort(key=lambda number: _rank(shown[number], option_of(question.options[number])))
    shown = [shown[number] for number in order]
    if method == "likelihood":
        return _ask_texts(question, shown, order)
    if method == "separate":
        return _ask_separately(question, shown, order, labels, part)
    return _ask_letters(question, shown, order, labels)


def listed_questions(limits: EngineLimits, questions: Any) -> tuple[list[Any], list[str]]:
    """Return the questions of a call, which may be malformed, and the name of each for error messages.

    Args:
        limits: limits of the engine.
        questions: argument of the caller.

    Raises:
        RequestError: there are none, or more than `max_items_per_request`.
    """
    listed = as_list(questions, "questions")
    if not listed:
        raise RequestError("questions are empty", param="questions")
    limits.check_count(len(listed), "questions", "questions")
    return listed, [f"question {number}" for number in range(len(listed))]


@contextmanager
def of_state(number: int) -> Iterator[None]:
    """Name the state in the errors of a `with` statement.

    Args:
        number: place of the state in a list.
    """
    try:
        yield
    except RequestError as error:
        message = error.message if error.part == "state" else f": {error}"
        raise type(error)(message, param=error.param, part=f"state {number}") from None


def check_question(question: Any, part: str) -> None:
    """Check a question, whatever method asks it.

    Args:
        question: argument of the caller.
        part: name of the question, for error messages.

    Raises:
        RequestError: the question is malformed.
    """
    if not isinstance(question, (Predicate, Choice, Rating)):
        raise _error(f" must be a Predicate, a Choice or a Rating, got {type(question).__name__}", part)
    _check_text(question.text, "text", part)
    if question.name is not None:
        _check_text(question.name, "name", part)
    if not isinstance(question, Predicate):
        _shown(question, part)
        return
    for word in ("yes", "no"):
        if (description := getattr(question, word)) is not None:
            _check_text(description, word, part)


def check_names(questions: Sequence[Question]) -> None:
    """Check that no two questions of a call have one name.

    Args:
        questions: checked questions.

    Raises:
        RequestError: a name is there twice.
    """
    seen = set[str]()
    for number, question in enumerate(questions):
        if question.name is not None and question.name in seen:
            raise _error(f": the name {question.name!r} is used before", f"question {number}")
        if question.name is not None:
            seen.add(question.name)


def option_of(option: str | bool | Option) -> Option:
    """Return an option of a `Choice` as an `Option`."""
    return option if isinstance(option, Option) else Option(option)


def level_of(level: str | Level) -> Level:
    """Return a level of a `Rating` as a `Level`."""
    return level if isinstance(level, Level) else Level(level)


def _ask_predicate(question: Predicate, labels: AnswerLabels, part: str) -> AskedQuestion:
    pieces = ["Is this true? ", question.text]
    for word in ("yes", "no"):
        if (description := getattr(question, word)) is not None:
            pieces += [f"\n{word}: ", _line(description)]
    return AskedQuestion(question, [[*pieces, "\nAnswer yes or no only."]], _yes_no(labels, part), [0, 1])


def _ask_texts(question: Choice | Rating, shown: list[Option], order: list[int]) -> AskedQuestion:
    pieces = ["", question.text, "\nAnswer with a few words only."]
    texts = [str(option.value) for option in shown]
    return AskedQuestion(question, [pieces] * len(texts), [], order, texts, "likelihood", ())


def _ask_letters(question: Choice | Rating, shown: list[Option], order: list[int], labels: AnswerLabels) -> AskedQuestion:
    noun = "level" if isinstance(question, Rating) else "option"
    kind, labelled = "letter", labels.letters
    if isinstance(question, Rating) and [label for label, _ in labels.digits[: len(shown)]] == [*map(str, range(len(shown)))]:
        kind, labelled = "number", labels.digits
    if len(shown) > len(labelled):
        return _ask_texts(question, shown, order)
    pieces = ["", question.text]
    for option, (label, _) in zip(shown, labelled):
        pieces += [f"\n{label}. ", *_described(option)]
    pieces.append(f"\nAnswer with the {kind} of one {noun} only.")
    taken = labelled[: len(shown)]
    kinds = {"letter": "letters", "number": "digits"}
    return AskedQuestion(question, [pieces], [ids for _, ids in taken], order, (), kinds[kind], [label for label, _ in taken])


def _ask_separately(
    question: Choice | Rating, shown: list[Option], order: list[int], labels: AnswerLabels, part: str
) -> AskedQuestion:
    end = "\nIs the proposed answer right? Answer yes or no only."
    items = [["", question.text, "\nProposed answer: ", *_described(option), end] for option in shown]
    return AskedQuestion(question, items, _yes_no(labels, part), order, (), "separate", ())


def _described(option: Option) -> list[str]:
    """Return the pieces of an option: its text, and its description if there is one."""
    return [str(option.value)] if option.description is None else [str(option.value), ": ", option.description]


def _yes_no(labels: AnswerLabels, part: str) -> list[LabelIds]:
    if not all(labels.yes_no):
        raise _error(": neither spelling of yes and no is one token behind this chat template", part)
    return labels.yes_no


def _shown(question: Choice | Rating, part: str) -> list[Option]:
    """Return the options or levels of a question as the model reads them, each in one line.

    Raises:
        RequestError: there are too few or too many, one is malformed, or two are equal.
    """
    is_choice = isinstance(question, Choice)
    entries, noun = (question.options, "option") if isinstance(question, Choice) else (question.levels, "level")
    if not is_list(entries) or not 2 <= len(entries) <= MAX_OPTIONS:
        got = f"{len(entries)}" if is_list(entries) else type(entries).__name__
        raise _error(f" must have a list of 2 to {MAX_OPTIONS} {noun}s, got {got}", part)
    shown, seen = [], set[tuple[bool, str | bool]]()
    for number, entry in enumerate(entries):
        value: Any
        if isinstance(entry, Option if is_choice else Level):
            value, description = (entry.value if isinstance(entry, Option) else entry.label), entry.description
        else:
            value, description = entry, None
        if not (is_choice and isinstance(value, bool)):
            _check_text(value, f"{noun} {number}", part)
        if description is not None:
            _check_text(description, f"the description of {noun} {number}", part)
        if (key := (isinstance(value, bool), value)) in seen:
            raise _error(f" has the {noun} {value!r} twice", part)
        seen.add(key)
        text = str(value).lower() if isinstance(value, bool) else _line(value)
        shown.append(Option(text, None if description is None else _line(description)))
    return shown


def _rank(shown: Option, option: Option) -> tuple[str, str, bool, str, str]:
    """Return the sort key of an option, different for any two options."""
    text, description = str(shown.value), shown.description or ""
    return text, description, isinstance(option.value, bool), str(option.value), option.description or ""


def _line(text: str) -> str:
    """Return a text in one line, so that it cannot look like two options."""
    return " ".join(text.split())


def _check_text(value: Any, name: str, part: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise _error(f": {name} must be a string that is not empty, got {shown(value)}", part)


def _error(message: str, part: str) -> RequestError:
    return RequestError(message, param="questions", part=part)
