"""Request body of `/v1/systemone`, in TypeSafe's schema."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from chunkattn.calls.decide_questions import MAX_OPTIONS
from chunkattn.decisions import (
    Answer,
    Choice,
    ChoiceAnswer,
    DecisionOutput,
    Level,
    Option,
    Predicate,
    PredicateAnswer,
    Question,
    Rating,
    RatingAnswer,
)
from chunkattn.errors import RequestError
from chunkattn.parsers.states import OneState
from chunkattn.schema.base import Entry, FastList
from chunkattn.schema.decide import DecideBody, Kinds, compact, usage_of

Content = str | dict[str, Any] | list[Any]
"""Text, or JSON that the model reads as compact text."""

_CERTAIN = 1.0
"""Probability of the only option of a question, which the model is not asked."""


class NoulCriteria(Entry):
    """Descriptions of the cases in which a statement is true and false."""

    true: Content | None = None
    false: Content | None = None


class SystemOneNoul(Entry):
    """Statement about the state."""

    type: Literal["noul"]
    instructions: Content | None = None
    criteria: NoulCriteria | None = None
    num_values: ClassVar[int] = 1

    @model_validator(mode="after")
    def _check(self) -> SystemOneNoul:
        criteria = self.criteria or NoulCriteria()
        if self.instructions is None and criteria.true is None and criteria.false is None:
            raise ValueError("a noul needs instructions or criteria")
        return self

    def question(self) -> Question:
        """Return the question of `LLM.decide`."""
        criteria = self.criteria or NoulCriteria()
        text = _text(self.instructions, "The case is the one that yes describes, or not the one that no describes.")
        return Predicate(text, _described(criteria.true), _described(criteria.false))

    def answer(self, answer: Answer | None) -> dict[str, Any]:
        """Return an answer in TypeSafe's format."""
        assert isinstance(answer, PredicateAnswer)
        return {"type": "noul", "noul": answer.probability, "label_mass": answer.label_mass}


class SystemOneChoice(Entry):
    """Choice of one option."""

    type: Literal["choice"]
    instructions: Content | None = None
    criteria: Annotated[dict[str, Content | None], Field(min_length=1, max_length=MAX_OPTIONS)]

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        return len(self.criteria)

    def question(self) -> Question:
        """Return the question of `LLM.decide`."""
        options = [Option(label, _described(content)) for label, content in self.criteria.items()]
        return Choice(_text(self.instructions, "Which option is right?"), options)

    def answer(self, answer: Answer | None) -> dict[str, Any]:
        """Return an answer in TypeSafe's format; None is the answer to a question with a single option."""
        if answer is None:
            (label,) = self.criteria
            return {"type": "choice", "choice": label, "confidence": _CERTAIN, "probabilities": {label: _CERTAIN}}
        assert isinstance(answer, ChoiceAnswer)
        fields = {"choice": answer.choice, "confidence": answer.confidence, "probabilities": answer.probabilities}
        return {"type": "choice", **fields, "label_mass": answer.label_mass, "method": answer.method}


class SystemOneScore(Entry):
    """Rating on a scale of levels."""

    type: Literal["score"]
    instructions: Content | None = None
    criteria: Annotated[FastList[Content], Field(min_length=1, max_length=MAX_OPTIONS)]

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        return len(self.criteria)

    def question(self) -> Question:
        """Return the question of `LLM.decide`."""
        levels = [Level(_text(content, "")) for content in self.criteria]
        return Rating(_text(self.instructions, "Which level is right?"), levels)

    def answer(self, answer: Answer | None) -> dict[str, Any]:
        """Return an answer in TypeSafe's format; None is the answer to a question with a single level."""
        legend = {str(number): content for number, content in enumerate(self.criteria)}
        if answer is None:
            certain = {"score": 0.0, "confidence": _CERTAIN, "legend": legend, "probabilities": {"0": _CERTAIN}}
            return {"type": "score", **certain}
        assert isinstance(answer, RatingAnswer)
        shares = {str(number): share for number, share in enumerate(answer.probabilities.values())}
        fields = {"score": answer.score, "confidence": answer.confidence, "legend": legend, "probabilities": shares}
        return {"type": "score", **fields, "label_mass": answer.label_mass, "method": answer.method}


NamedQuestion = Annotated[SystemOneNoul | SystemOneChoice | SystemOneScore, Kinds()]


class SystemOneBody(DecideBody):
    """Request body of `/v1/systemone`."""

    state: Content
    """A text, a JSON object or array, or messages."""
    questions: Annotated[dict[str, NamedQuestion], Field(min_length=1)]
    """Nouls, choices and scores by the names of their answers."""

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        return sum(question.num_values for question in self.questions.values())

    def call(self) -> tuple[OneState, list[Question]]:
        """Return the state and the questions that have several possible answers; see `DecideBody.call`."""
        questions = []
        for name, named in self.questions.items():
            try:
                question = named.question()
            except ValueError as error:
                raise RequestError(f": {error}", param="questions", part=_shown(name)) from None
            if _is_open(named):
                questions.append(question)
        return OneState(self.state), questions

    def answer(self, output: DecisionOutput, min_mass: float) -> dict[str, Any]:
        """Return answers and usage; see `DecideBody.answer`. This format has no refusals."""
        left = iter(output.answers)
        answers = {name: q.answer(next(left) if _is_open(q) else None) for name, q in self.questions.items()}
        return {"answers": answers, "usage": usage_of(output.usage)}

    def part(self, part: str) -> str:
        """Return the name of a question that an error names by its number."""
        number = part.removeprefix("question ")
        names = [name for name, question in self.questions.items() if _is_open(question)]
        return _shown(names[int(number)]) if number.isdecimal() and number != part else part


def _is_open(question: SystemOneNoul | SystemOneChoice | SystemOneScore) -> bool:
    """Return whether a question has more than one possible answer."""
    return isinstance(question, SystemOneNoul) or question.num_values > 1


def _shown(name: str) -> str:
    return f"question {name[:80]!r}"


def _text(content: Content | None, default: str) -> str:
    """Return a content as text.

    Raises:
        ValueError: the content is no JSON.
    """
    if content is None:
        return default
    return content if isinstance(content, str) else compact(content)


def _described(content: Content | None) -> str | None:
    return _text(content, "") or None
