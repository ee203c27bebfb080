"""Questions of `LLM.decide` and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkattn.outputs import ScoreUsage


@dataclass(frozen=True)
class Option:
    """One option of a `Choice`.

    Attributes:
        value: the option, a text or a bool. `"true"` and `True` are different options.
        description: text that the model reads beside the value; None for none.
    """

    value: str | bool
    description: str | None = None


@dataclass(frozen=True)
class Level:
    """One level of a `Rating`.

    Attributes:
        label: name of the level.
        description: text that the model reads beside the label; None for none.
    """

    label: str
    description: str | None = None


@dataclass(frozen=True)
class Predicate:
    """Statement or question that is answered by yes or no.

    Attributes:
        text: the statement.
        yes: description of the cases in which yes is right; None for none.
        no: description of the cases in which no is right; None for none.
        name: name of the answer; no two questions of a call may have one name.
    """

    text: str
    yes: str | None = None
    no: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Choice:
    """Question whose answer is one of 2 to 255 options. Their order changes no answer, unless a trained head reads them.

    Attributes:
        text: the question.
        options: the options, all different.
        name: see `Predicate`.
    """

    text: str
    options: Sequence[str | bool | Option]
    name: str | None = None


@dataclass(frozen=True)
class Rating:
    """Question whose answer is a level of a scale with 2 to 255 levels.

    Attributes:
        text: the question.
        levels: the levels from the lowest to the highest, all different.
        name: see `Predicate`.
    """

    text: str
    levels: Sequence[str | Level]
    name: str | None = None


Question = Predicate | Choice | Rating


@dataclass(frozen=True)
class PredicateAnswer:
    """Answer to a `Predicate`.

    Attributes:
        name: name of the question, or None.
        probability: P(yes) / (P(yes) + P(no)).
        label_mass: P(yes) + P(no), with all spellings of both words.
    """

    name: str | None
    probability: float
    label_mass: float


@dataclass(frozen=True)
class ChoiceAnswer:
    """Answer to a `Choice`.

    Attributes:
        name: name of the question, or None.
        choice: the likeliest option. Of equal options it is the first in sorted order.
        confidence: 1 - H / ln(n), with the entropy H of the n probabilities in nats: 0 for equal probabilities, and 1 for a
            single possible option.
        probabilities: probability of each option, in the caller's order. The sum is 1.
        label_mass: sum of the labels' probabilities before they are normalised. For `likelihood`, the sum of the texts'
            probabilities, which may exceed 1 where one text begins another: then it is no probability. For `separate`,
            P(yes) + P(no) of the option where this sum is smallest. For a trained head, 1.
        method: method by which the question was asked: `letters`, `likelihood`, `separate` or `head`. With more options than
            letters, `letters` becomes `likelihood`.
    """

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: dict[str | bool, float]
    label_mass: float
    method: str


@dataclass(frozen=True)
class RatingAnswer:
    """Answer to a `Rating`.

    Attributes:
        name: name of the question, or None.
        score: mean of the levels' numbers, weighted by their probabilities. The lowest level has the number 0.
        confidence: see `ChoiceAnswer`.
        probabilities: probability of each level, from the lowest to the highest. The sum is 1.
        label_mass: see `ChoiceAnswer`.
        method: see `ChoiceAnswer`.
    """

    name: str | None
    score: float
    confidence: float
    probabilities: dict[str, float]
    label_mass: float
    method: str


Answer = PredicateAnswer | ChoiceAnswer | RatingAnswer


@dataclass(frozen=True)
class DecisionOutput:
    """Answers to all questions about one state.

    Attributes:
        answers: one answer per question, in order.
        usage: token counts; the state counts once.
        method: method that was taken, never `auto`. An answer names its own.
    """

    answers: list[Answer]
    usage: ScoreUsage
    method: str
