"""Data of an evaluation: one JSON object a line, each a question over documents, a ranking, or decisions about a state."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from chunkattn.calls.decide_files import questions_of
from chunkattn.calls.decide_questions import level_of, option_of
from chunkattn.decisions import Choice, Predicate
from chunkattn.decisions import Question as Asked
from chunkattn.errors import RequestError, shown
from chunkattn.parsers.states import read_state


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
        answer_parts: alternatives of every part of the answer, for a question that asks for several things at once; None if
            each of `answers` is a whole answer.
    """

    kind: ClassVar[str] = "questions"
    counted: ClassVar[str] = "questions"
    line: int
    prefix: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...] | None = None
    answer_parts: tuple[tuple[str, ...], ...] | None = None

    @property
    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        """Return lists of alternatives. A text contains the answer if it contains one alternative of each list."""
        return self.answer_parts or (self.answers,)


@dataclass(frozen=True)
class Ranking:
    """Query and documents to rank.

    Attributes:
        line: number of the line in the file, from 1.
        query: text of the query.
        documents: texts of the documents, at least one.
        relevance: grade of each document; 0 is irrelevant.
    """

    kind: ClassVar[str] = "rankings"
    counted: ClassVar[str] = "queries"
    line: int
    query: str
    documents: tuple[str, ...]
    relevance: tuple[int, ...]


@dataclass(frozen=True)
class Decisions:
    """Typed questions about a state, with their right answers.

    Attributes:
        line: number of the line in the file, from 1.
        state: the state; see `chunkattn.parsers.states.read_state`.
        questions: the questions, at least one.
        answers: place of the right answer of each question: in its options or levels; of a predicate, 0 for yes and 1 for no.
    """

    kind: ClassVar[str] = "decisions"
    counted: ClassVar[str] = "states"
    line: int
    state: Any
    questions: tuple[Asked, ...]
    answers: tuple[int, ...]


Line = Question | Ranking | Decisions


def read_data(path: Path, limit: int | None = None) -> list[Line]:
    """Read a file of questions, a file of rankings or a file of decisions. Empty lines are skipped.

    Args:
        path: file to read, UTF-8; a name that ends in `.gz` is read as gzip.
        limit: number of lines to read; None reads all.

    Returns:
        All lines, of one kind.

    Raises:
        RequestError: the file cannot be read or is empty, a line is malformed, or the file mixes kinds. The
            message names the line, the field and the expected value.
    """
    lines: list[Line] = []
    for fields in read_objects(path, limit):
        decides = fields.has("questions") or (fields.has("state") and not (fields.has("query") or fields.has("question")))
        kind = _decisions if decides else _ranking if fields.has("query") else _question
        lines.append(kind(fields))
        if type(lines[-1]) is not type(lines[0]):
            kinds = "questions (`question`), rankings (`query`) or decisions (`questions`)"
            raise RequestError(f"{fields.place}: a file holds {kinds}, not several of them")
    return lines


def questions_from(lines: Iterable[Mapping[str, Any]], name: str) -> list[Question]:
    """Return questions of lines that were made and not read.

    Args:
        lines: JSON objects in the form of a data file.
        name: name of the lines in errors.

    Raises:
        RequestError: a line is malformed.
    """
    return [_question(Fields(f"{name} line {number}", number, values)) for number, values in enumerate(lines, 1)]


def read_objects(path: Path, limit: int | None = None) -> Iterator[Fields]:
    """Yield the JSON objects of a file, one a line. Empty lines are skipped.

    Args:
        path: file to read, UTF-8; a name that ends in `.gz` is read as gzip.
        limit: number of objects to read; None reads all.

    Raises:
        RequestError: the file cannot be read or is empty, or a line is no JSON object.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    # Not `splitlines`: JSON may hold U+2028 and other line separators within a text.
    filled = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not filled:
        raise RequestError(f"{path} holds no line")
    for number, line in filled[:limit]:
        place = f"{path} line {number}"
        yield Fields(place, number, _object(line, place))


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


@contextmanager
def at_line(number: int, *where: str) -> Iterator[None]:
    """Name a line of the data in the errors about a block.

    Args:
        number: number of the line, from 1.
        *where: more about the place.
    """
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{', '.join([f'line {number}', *where])}: {error}") from None


class Fields:
    """Fields of one line, read with their checks.

    Args:
        place: name of the line in errors.
        line: number of the line, from 1.
        values: the JSON object.
    """

    def __init__(self, place: str, line: int, values: Mapping[str, Any]) -> None:
        self.place, self.line, self._values = place, line, values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return self._values.get(name) is not None

    def fail(self, name: str, expected: str) -> RequestError:
        """Return the error about a field."""
        got = _json(self._values[name])[:80] if name in self._values else "nothing"
        return RequestError(f"{self.place}: `{name}` must be {expected}, got {got}", param=name)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text, which is non-empty without a default."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.fail(name, "a text" if default is not None else "a non-empty text")
        return value

    def listed(self, name: str, expected: str, accept: Callable[[Any], bool]) -> list[Any]:
        """Return a non-empty list of accepted values."""
        values = self._values.get(name)
        if not _is_list(values, accept):
            raise self.fail(name, f"a non-empty list of {expected}")
        return cast("list[Any]", values)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a non-empty list of non-empty texts."""
        return tuple(self.listed(name, "non-empty texts", _is_filled))

    def documents(self) -> tuple[str, ...]:
        """Return the texts of the documents."""
        values = self.listed("documents", "texts, or of objects with a `text` and perhaps a `title`", _is_document)
        return tuple(map(_document, values))


def _is_list(value: Any, accept: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(accept, value))


def _is_filled(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


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


def _question(fields: Fields) -> Question:
    documents = fields.documents()
    question, answers = fields.text("question"), fields.texts("answers")
    gold, parts = None, None
    if fields.has("gold"):
        expected = f"places of documents, 0 to {len(documents) - 1}"
        gold = tuple(fields.listed("gold", expected, lambda value: _is_place(value) and value < len(documents)))
    if fields.has("answer_parts"):
        expected = "non-empty lists of non-empty texts"
        parts = tuple(map(tuple, fields.listed("answer_parts", expected, lambda value: _is_list(value, _is_filled))))
    return Question(fields.line, fields.text("prefix", ""), documents, question, answers, gold, parts)


def _ranking(fields: Fields) -> Ranking:
    documents = fields.documents()
    relevance = fields.listed("relevance", "integers of at least 0", _is_place)
    if len(relevance) != len(documents):
        raise fields.fail("relevance", f"a list of {len(documents)} integers, one for each document")
    return Ranking(fields.line, fields.text("query"), documents, tuple(relevance))


def _decisions(fields: Fields) -> Decisions:
    state = fields["state"]
    read_state(state, f"{fields.place}: `state`")
    questions = tuple(questions_of(fields["questions"], f"{fields.place}: `questions`"))
    answers = fields.listed("answers", f"{len(questions)} right answers", lambda value: value is not None)
    if len(answers) != len(questions):
        raise fields.fail("answers", f"a list of {len(questions)} right answers, one for each question")
    pairs = enumerate(zip(questions, answers, strict=True))
    places = tuple(_right(asked, answer, number, fields.place) for number, (asked, answer) in pairs)
    return Decisions(fields.line, state, questions, places)


def _right(asked: Asked, answer: Any, number: int, place: str) -> int:
    """Return the place of the right answer of a question."""
    match asked:
        case Predicate():
            values: list[Any] = [True, False]
        case Choice():
            values = [option_of(option).value for option in asked.options]
        case _:
            values = [level_of(level).label for level in asked.levels]
    for index, value in enumerate(values):
        if type(value) is type(answer) and value == answer:
            return index
    expected = ", ".join(map(_json, values[:5])) + (", ..." if len(values) > 5 else "")
    raise RequestError(f"{place}: answer {number} must be one of {expected}, got {_json(answer)[:80]}", param="answers")


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError):
        return shown(value)
