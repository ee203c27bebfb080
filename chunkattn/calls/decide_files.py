"""Files of decisions: questions in YAML or JSON, states in JSON lines, and answers as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

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
)
from chunkattn.errors import RequestError
from chunkattn.local_files import check_unique, read_small, unique_pairs

_KEYS = {"predicate": {"yes", "no"}, "choice": {"options"}, "rating": {"levels"}}
"""Keys of a question beside `name`, by the key that holds its text."""


@dataclass(frozen=True)
class StateLine:
    """State of one line of a file.

    Attributes:
        line: number of the line, from 1.
        state: the state; see `chunkattn.parsers.states.read_state`.
        id: the caller's name of the state, a text or an integer; None for none.
        documents: documents before this state alone, texts or lists of token ids.
    """

    line: int
    state: Any
    id: str | int | None = None
    documents: Sequence[str | list[int]] = ()


# Questions


class _Loader(yaml.SafeLoader):
    """YAML whose plain scalars are texts, except true, false and null. `yes`, `3` and `2024-01-31` are texts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        try:
            check_unique(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        except ValueError as error:
            raise yaml.MarkedYAMLError(None, None, str(error), node.start_mark) from None
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def read_questions(path: Path) -> list[Question]:
    """Read a file of questions: a list of mappings, see `question_of`.

    Args:
        path: file to read, UTF-8: JSON if its name ends in `.json`, else YAML.

    Raises:
        RequestError: the file cannot be read or is larger than 16 MiB, or a question is malformed. The message names the
            file and the question.
    """
    try:
        text = read_small(path)
        is_json = path.suffix == ".json"
        value = json.loads(text, object_pairs_hook=unique_pairs) if is_json else yaml.load(text, _Loader)  # a safe loader
    except RecursionError:
        raise RequestError(f"{path} cannot be read: its lists and mappings nest too deep", param="questions") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RequestError(f"{path} cannot be read: {' '.join(str(error).split())}", param="questions") from None
    return questions_of(value, str(path))


def questions_of(value: Any, place: str) -> list[Question]:
    """Return questions from a list of mappings.

    Args:
        value: the list, see `question_of`.
        place: file, and line if there is one, for error messages.

    Raises:
        RequestError: the list is empty or malformed. The message names the place and the question.
    """
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else _kind(value)
        raise RequestError(f"{place} must hold a list of questions, got {got}", param="questions")
    return [question_of(entry, f"{place}: question {number}") for number, entry in enumerate(value)]


def question_of(value: Any, place: str) -> Question:
    """Return a question from a mapping with the key `predicate`, `choice` or `rating`, which holds its text.

    A predicate may have `yes` and `no`. A choice has `options`: texts, bools, or mappings with `value` and `description`. A
    rating has `levels`: texts, or mappings with `label` and `description`. Each may have a `name`.

    Args:
        value: the mapping.
        place: name of the question, for error messages.

    Raises:
        RequestError: the mapping lacks a key, or has an unknown one. `LLM.decide` checks the texts.
    """
    if not isinstance(value, Mapping) or len(kinds := _KEYS.keys() & value.keys()) != 1:
        got = f"the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else _kind(value)
        raise RequestError(f"{place} must be a mapping with one of {', '.join(_KEYS)}, got {got}", param="questions")
    (kind,) = kinds
    known = {kind, "name", *_KEYS[kind]}
    _check_keys(value, known, f"{place}, a {kind},")
    text, name = value[kind], value.get("name")
    if kind == "predicate":
        return Predicate(text, value.get("yes"), value.get("no"), name)
    noun, key = ("options", "value") if kind == "choice" else ("levels", "label")
    entries, made = value.get(noun), list[Any]()
    if not isinstance(entries, list):
        raise RequestError(f"{place} needs a list of {noun}, got {_kind(entries)}", param="questions")
    for number, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            at = f"{place}, {noun[:-1]} {number},"
            _check_keys(entry, {key, "description"}, at)
            if key not in entry:
                raise RequestError(f"{at} needs the key {key!r}", param="questions")
            entry = (Option if kind == "choice" else Level)(entry[key], entry.get("description"))
        made.append(entry)
    return (Choice if kind == "choice" else Rating)(text, made, name)


def _check_keys(value: Mapping[Any, Any], known: set[str], place: str) -> None:
    if unknown := [key for key in value if key not in known]:
        text = f"{place} has the unknown key {unknown[0]!r}; the keys are {', '.join(sorted(known))}"
        raise RequestError(text, param="questions")


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


# States


def read_states(file: Iterable[bytes], name: str) -> Iterator[StateLine]:
    """Yield the states of JSON lines, one at a time. Empty lines are skipped.

    A line holds a state: a text, an object, messages or an array; or an object with the key `state`, and perhaps `id` and
    `documents`, a list of texts, of objects with the key `text`, or of lists of token ids.

    Args:
        file: lines, UTF-8.
        name: name of the file, for error messages.

    Raises:
        RequestError: a line is malformed. The message names the line.
    """
    for number, data in enumerate(file, 1):
        if data.strip():
            yield _state(data, number, f"{name} line {number}")


def _state(data: bytes, number: int, place: str) -> StateLine:
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise RequestError(f"{place} nests too deep", param="state") from None
    except ValueError as error:
        raise RequestError(f"{place} is not JSON: {error}", param="state") from None
    if not isinstance(value, dict) or "state" not in value:
        return StateLine(number, value)
    if unknown := [key for key in value if key not in ("state", "id", "documents")]:
        text = f"{place} has the unknown key {unknown[0]!r} beside `state`; the keys are state, id and documents"
        raise RequestError(f"{text}; an object that is itself the state goes into `state`", param="state")
    name = value.get("id")
    if isinstance(name, bool) or not isinstance(name, (str, int, type(None))):
        raise RequestError(f"{place}: `id` must be a text or an integer, got {_kind(name)}", param="state")
    return StateLine(number, value["state"], name, _documents(value.get("documents"), place))


def _documents(value: Any, place: str) -> list[str | list[int]]:
    """Return the documents of a line.

    Raises:
        RequestError: they are no list, or one is malformed.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{place}: `documents` must be a list, got {_kind(value)}", param="documents")
    documents = list[str | list[int]]()
    for number, entry in enumerate(value):
        text = entry["text"] if isinstance(entry, dict) and entry.keys() == {"text"} else entry
        if not isinstance(text, (str, list)):
            got = f"the keys {', '.join(entry)}" if isinstance(entry, dict) else _kind(entry)
            expected = "a text, an object with the key `text`, or a list of token ids"
            raise RequestError(f"{place}: document {number} must be {expected}, got {got}", param="documents")
        documents.append(text)
    return documents


# Answers


def as_json(output: DecisionOutput) -> dict[str, Any]:
    """Return the answers about a state as a JSON object. Probabilities are a list, because `true` and `"true"` may be options.

    Args:
        output: answers about one state.
    """
    return {"answers": [*map(_answer, output.answers)], "usage": asdict(output.usage), "method": output.method}


def _answer(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, PredicateAnswer):
        return {"name": answer.name, "type": "predicate", "probability": answer.probability, "label_mass": answer.label_mass}
    is_choice = isinstance(answer, ChoiceAnswer)
    first = {"choice": answer.choice} if isinstance(answer, ChoiceAnswer) else {"score": answer.score}
    key = "value" if is_choice else "label"
    return {
        "name": answer.name,
        "type": "choice" if is_choice else "rating",
        **first,
        "confidence": answer.confidence,
        "probabilities": [{key: option, "probability": share} for option, share in answer.probabilities.items()],
        "label_mass": answer.label_mass,
        "method": answer.method,
    }
