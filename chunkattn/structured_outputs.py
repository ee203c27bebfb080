"""`StructuredOutputsParams`: the shape that a generated text must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkattn.errors import RequestError, shown

MAX_GRAMMAR_CHARS = 1 << 17
"""Limit on the characters of a schema, a regular expression, a grammar, or all choices together."""
MAX_CHOICES = 4096
PARAM = "structured_outputs"
"""Name of the argument in errors."""
_TEXTS = ("json", "regex", "grammar")
_SHAPES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Shape of a generated text, under vLLM's names. Exactly one of the first five fields is set.

    Attributes:
        json: JSON schema of the text, as a text or a mapping; kept as a text.
        regex: regular expression that the whole text matches, in the syntax of Rust's crate `regex`, without look-around.
        choice: texts of which the answer is one, at most 4096; kept as a tuple.
        grammar: context-free grammar in llguidance's dialect of Lark, whose rule `start` the text follows, or in llama.cpp's
            GBNF, whose rule `root` it follows.
        json_object: whether the text is any JSON object.
        disable_any_whitespace: whether JSON is written without whitespace between its tokens.

    Raises:
        RequestError: none or several of the first five fields are set, or one has a wrong type or is too long. It is a
            `ValueError`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _error(f"{name} must be True or False, got {shown(getattr(self, name))}")
        given = [name for name in _SHAPES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise _error(f"exactly one of {', '.join(_SHAPES)} must be set, {found}")
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _as_text(self.json))
        for name in _TEXTS:
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                kind = "a text or a mapping" if name == "json" else "a text"
                raise _error(f"{name} must be {kind} that is not empty, got {shown(text)}")
            _check_size(name, len(text or ""))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise _error(f"disable_any_whitespace needs json or json_object, got {given[0]}")


def _error(message: str) -> RequestError:
    return RequestError(f"{PARAM}: {message}", param=PARAM)


def _check_size(name: str, size: int) -> None:
    if size > MAX_GRAMMAR_CHARS:
        raise _error(f"{name} has {size} characters, at most {MAX_GRAMMAR_CHARS} are allowed")


def _as_text(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON, its keys in the order given: answers have their properties in this order."""
    try:
        return json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise _error(f"json is no JSON schema: {reason}") from None


def _choices(choices: Any) -> tuple[str, ...]:
    """Return the choices of an answer.

    Raises:
        RequestError: there is none, there are too many, or one is no text or empty.
    """
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
        raise _error(f"choice must be a list of texts, got {shown(choices)}")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise _error(f"choice must have between 1 and {MAX_CHOICES} entries, got {len(choices)}")
    for place, text in enumerate(choices):
        if not isinstance(text, str) or not text:
            raise _error(f"choice {place} must be a text that is not empty, got {shown(text)}")
    _check_size("choice", sum(map(len, choices)))
    return tuple(choices)
