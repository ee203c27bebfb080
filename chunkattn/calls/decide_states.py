"""States of `LLM.decide`: one state or a list of states, and the text of a state as the model reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chunkattn.errors import RequestError

State = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""State of `LLM.decide`: a text, a JSON object, or messages, each an object with `role` and `content`."""
States = Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]
"""List of states. A JSON array is a state only within such a list."""


def read_state(state: Any, part: str = "state") -> str:
    """Return the text of one state.

    A text stays as it is. A JSON object or array becomes compact JSON. Messages become a transcript: one compact JSON object
    per line, in order, with all keys, so that no content can look like another message.

    Args:
        state: argument of the caller: a text, a JSON object, messages or a JSON array.
        part: name of the state, for error messages.

    Raises:
        RequestError: the state is empty, or neither text nor JSON.
    """
    if isinstance(state, str):
        text = state
    elif is_messages(state):
        text = "\n".join(_compact(message, part) for message in state)
    elif isinstance(state, (Mapping, list, tuple)):
        text = _compact(state, part)
    else:
        reason = f" must be a text, a JSON object or array, or messages, got {type(state).__name__}"
        raise RequestError(reason, param="state", part=part)
    if not text.strip():
        raise RequestError(" is empty", param="state", part=part)
    return text


def list_states(state: Any) -> list[Any] | None:
    """Return the entries of a list of states; None if the argument is one state.

    Args:
        state: argument of the caller.

    Raises:
        RequestError: the list is empty.
    """
    if not isinstance(state, (list, tuple)) or is_messages(state):
        return None
    if not state:
        raise RequestError("the list of states is empty", param="state")
    return list(state)


def is_messages(state: Any) -> bool:
    """Return whether a state is a list of messages: of objects that all have `role` and `content`."""
    if not isinstance(state, (list, tuple)) or not state:
        return False
    return all(isinstance(entry, Mapping) and {"role", "content"} <= entry.keys() for entry in state)


def _compact(value: Any, part: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f" is no JSON: {error}", param="state", part=part) from error
