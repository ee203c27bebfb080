"""Data of an evaluation: one JSON object a line, each a question over documents, a ranking, or decisions about a state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from chunkattn.calls.decide_files import questions_of
from chunkattn.calls.decide_states import read_state
from chunkattn.decisions import Choice, Level, Option, Predicate
from chunkattn.decisions import Question as Asked
from chunkattn.errors import RequestError, shown


@dataclass(frozen=True)
class Question:
    """Question over documents.

    Attributes:
        line: number of the line in the file, from 1.
        prefix: text before the documents; the system message of a model with a chat template. May be empty.
        documents: texts of the documents, at least one.
        question: text of the question.
        answers: right answers. The first is the gold answer, whose log-probability is read.
        gold: places of the documents that hold the answer; None if the data does not say.
    """

    line: int
    prefix: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Ranking:
    """Query and documents to rank.

    Attributes:
        line: number of the line in the file, from 1.
        query: text of the query.
        documents: texts of the documents, at least one.
        relevance: grade of each document; 0 is irrelevant.
    """

    line: int
    query: str
    documents: tuple[str, ...]
    relevance: tuple[int, ...]


@dataclass(frozen=True)
class Decisions:
    """Typed questions about a state, with their right answers.

    Attributes:
        line: number of the line in the file, from 1.
        state: the state; see `chunkattn.calls.decide_states.read_state`.
        questions: the questions, at least one.
        answers: place of the right answer of each question: in its options or levels; of a predicate, 0 for yes and 1 for no.
    """

    line: int
    state: Any
    questions: tuple[Asked, ...]
    answers: tuple[int, ...]


Line = Question | Ranking | Decisions


def read_data(path: Path, limit: int | None = None) -> Sequence[Question] | Sequence[Ranking] | Sequence[Decisions]:
    """Read a file of questions, a file of rankings or a file of decisions. Empty lines are skipped.

    Args:
        path: file to read, UTF-8.
        limit: number of lines to read; None reads all.

    Returns:
        All lines, of one kind.

    Raises:
        RequestError: the file cannot be read or is empty, a line is malformed, or the file mixes kinds. The
            message names the line, the field and the expected value.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    found: list[Line] = []
    for number, text in enumerate(lines, 1):
        if limit is not None and len(found) == limit:
            break
        if not text.strip():
            continue
        fields = _Fields(f"{path} line {number}", _object(text, f"{path} line {number}"))
        decides = fields.has("questions") or (fields.has("state") and not (fields.has("query") or fields.has("question")))
        kind = _decisions if decides else _ranking if fields.has("query") else _question
        found.append(kind(number, fields))
        if type(found[-1]) is not type(found[0]):
            kinds = "questions (`question`), rankings (`query`) or decisions (`questions`)"
            raise RequestError(f"{path} line {number}: a file holds {kinds}, not several of them")
    if not found:
        raise RequestError(f"{path} holds no line")
    return cast("Sequence[Question] | Sequence[Ranking] | Sequence[Decisions]", found)


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise RequestError(f"{place} nests too deep") from None
    except ValueError as error:
        raise RequestError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{place} must be a JSON object, got {type(value).__name__}")
    return value


class _Fields:
    """Fields of one line, read with their checks."""

    def __init__(self, place: str, values: dict[str, Any]) -> None:
        self.place, self._values = place, values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def fail(self, name: str, expected: str) -> RequestError:
        got = _json(self._values[name])[:80] if name in self._values else "nothing"
        return RequestError(f"{self.place}: `{name}` must be {expected}, got {got}", param=name)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.fail(name, "a text" if default is not None else "a non-empty text")
        return value

    def listed(self, name: str, expected: str, accept: Callable[[Any], bool]) -> list[Any]:
        values = self._values.get(name)
        if not isinstance(values, list) or not values or not all(map(accept, values)):
            raise self.fail(name, f"a non-empty list of {expected}")
        return values

    def documents(self) -> tuple[str, ...]:
        found = self.listed("documents", "texts, or of objects with a `text` and perhaps a `title`", _is_document)
        return tuple(map(_document, found))


def _is_document(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("text"), str) and isinstance(value.get("title", ""), str)
    return isinstance(value, str)


def _document(value: str | dict[str, str]) -> str:
    """Return the text of a document. A title becomes its first line."""
    if isinstance(value, str):
        return value
    return f"{value['title']}\n{value['text']}" if value.get("title") else value["text"]


def _is_place(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _question(number: int, fields: _Fields) -> Question:
    documents = fields.documents()
    question = fields.text("question")
    answers = fields.listed("answers", "non-empty texts", lambda value: isinstance(value, str) and bool(value.strip()))
    gold = None
    if fields.has("gold"):
        expected = f"places of documents, 0 to {len(documents) - 1}"
        gold = tuple(fields.listed("gold", expected, lambda value: _is_place(value) and value < len(documents)))
    return Question(number, fields.text("prefix", ""), documents, question, tuple(answers), gold)


def _ranking(number: int, fields: _Fields) -> Ranking:
    documents = fields.documents()
    relevance = fields.listed("relevance", "integers of at least 0", _is_place)
    if len(relevance) != len(documents):
        raise fields.fail("relevance", f"a list of {len(documents)} integers, one for each document")
    return Ranking(number, fields.text("query"), documents, tuple(relevance))


def _decisions(number: int, fields: _Fields) -> Decisions:
    state = fields["state"]
    read_state(state, f"{fields.place}: `state`")
    questions = tuple(questions_of(fields["questions"], f"{fields.place}: `questions`"))
    answers = fields.listed("answers", f"{len(questions)} right answers", lambda value: value is not None)
    if len(answers) != len(questions):
        raise fields.fail("answers", f"a list of {len(questions)} right answers, one for each question")
    pairs = enumerate(zip(questions, answers, strict=True))
    return Decisions(number, state, questions, tuple(_right(asked, answer, n, fields.place) for n, (asked, answer) in pairs))


def _right(asked: Asked, answer: Any, number: int, place: str) -> int:
    """Return the place of the right answer of a question."""
    listed: list[Any]
    if isinstance(asked, Predicate):
        listed = [True, False]
    elif isinstance(asked, Choice):
        listed = [option.value if isinstance(option, Option) else option for option in asked.options]
    else:
        listed = [level.label if isinstance(level, Level) else level for level in asked.levels]
    for index, value in enumerate(listed):
        if type(value) is type(answer) and value == answer:
            return index
    expected = ", ".join(map(_json, listed[:5])) + (", ..." if len(listed) > 5 else "")
    raise RequestError(f"{place}: answer {number} must be one of {expected}, got {_json(answer)[:80]}", param="answers")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError):
        return shown(value)
