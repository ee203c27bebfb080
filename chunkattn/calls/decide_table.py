"""Answers of decisions as a table: one row a state, the same columns in every row."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from chunkattn.decisions import (
    Answer,
    Choice,
    ChoiceAnswer,
    DecisionOutput,
    Option,
    Predicate,
    PredicateAnswer,
    Question,
    Rating,
)
from chunkattn.outputs import ScoreUsage

_USAGE = [field.name for field in fields(ScoreUsage)]


def table_header(questions: Sequence[Question]) -> list[str]:
    """Return the columns of the answers to questions.

    A question's first column is its name, or its text without one, and holds the answer: `yes` or `no`, the likeliest option,
    or the score. The probabilities, `confidence` and `label mass` follow, each behind the question's name. The last columns are
    the token counts.

    Args:
        questions: the questions, whose names differ.
    """
    names = list[str]()
    for question in questions:
        name = question.name or question.text
        names += [name, *(f"{name}: {share}" for share in _shares(question))]
        names += ([] if isinstance(question, Predicate) else [f"{name} confidence"]) + [f"{name} label mass"]
    seen, columns = Counter[str](), list[str]()
    for name in [*names, *_USAGE]:
        seen[name] += 1
        columns.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return columns


def table_row(output: DecisionOutput) -> list[str]:
    """Return the values of `table_header`'s columns. `float` reads the numbers back without loss.

    Args:
        output: answers about one state.
    """
    usage = [repr(getattr(output.usage, name)) for name in _USAGE]
    return [value for answer in output.answers for value in _values(answer)] + usage


def csv_line(values: Sequence[str]) -> bytes:
    """Return a line of CSV (RFC 4180) in UTF-8. A lone surrogate becomes its escape, as in JSON.

    Args:
        values: the values of a row.
    """
    line = io.StringIO()
    csv.writer(line).writerow(values)
    return line.getvalue().encode("utf-8", "backslashreplace")


def _values(answer: Answer) -> list[str]:
    if isinstance(answer, PredicateAnswer):
        first = "yes" if answer.probability >= 0.5 else "no"
        return [first, repr(answer.probability), repr(answer.label_mass)]
    first = _text(answer.choice) if isinstance(answer, ChoiceAnswer) else repr(answer.score)
    shares: Sequence[float] = list(answer.probabilities.values())
    return [first, *map(repr, shares), repr(answer.confidence), repr(answer.label_mass)]


def _shares(question: Question) -> list[str]:
    """Return the names of a question's probabilities."""
    match question:
        case Choice():
            return [_text(entry.value if isinstance(entry, Option) else entry) for entry in question.options]
        case Rating():
            return [entry if isinstance(entry, str) else entry.label for entry in question.levels]
    return ["yes"]


def _text(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value
