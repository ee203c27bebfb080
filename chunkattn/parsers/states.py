"""States of `LLM.decide`: their text, and `StateTemplate`, a chat template cut into a state and the questions behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from chunkattn.errors import NotRenderedError, RequestError
from chunkattn.parsers.arguments import check_template_options
from chunkattn.parsers.chat_template import ChatTemplate
from chunkattn.parsers.encode import PlainEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OneState(NamedTuple):
    """State that is one whatever its type, such as a JSON array.

    Attributes:
        value: text or JSON value.
    """

    value: Any


State = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | OneState
"""State of `LLM.decide`: a text, a JSON object, or messages, each an object with `role` and `content`."""
States = Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]
"""List of states. A JSON array is a state only within such a list."""

ANCHOR = "Question:"
"""Words at the end of the prefix. A question is tokenized behind them, since some tokenizers change the beginning of a text."""
_MIDDLE = f"\n\n{ANCHOR}"
_TODAY = datetime(2024, 7, 26)
"""Date for templates that print one: with the current date, the tokens of a state would change at midnight."""
_REASONING = (("<think>", "</think>"), ("<|think|>", "<|/think|>"), ("[THINK]", "[/THINK]"))
_TRIMMED = "\u2003"
"""Space that no template writes. A template that trims contents removes it."""


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
    if isinstance(state, OneState):
        state = state.value
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


def json_state(state: Any) -> Any:
    """Return one state as a text or JSON value, for a template that writes it itself.

    Args:
        state: see `read_state`.

    Raises:
        RequestError: as `read_state`.
    """
    read_state(state)
    return state.value if isinstance(state, OneState) else state


def list_states(state: Any) -> list[Any] | None:
    """Return the entries of a list of states; None if the argument is one state.

    Args:
        state: argument of the caller.

    Raises:
        RequestError: the list is empty.
    """
    if isinstance(state, OneState) or not isinstance(state, (list, tuple)) or is_messages(state):
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


class StateTemplate:
    """Chat template around a user message of a state, a blank line and `Question: `; cut behind the colon.

    The template is rendered once, with random marks in place of the texts. No text of a caller passes through the template, so
    a text can neither become control tokens nor change what the template writes. The tokens of the prefix and of a question
    together are the tokens of the whole text.

    Args:
        plain: tokenizer of the users' texts.
        system: content of a system message, which may hold control tokens; None for no system message.
        options: variables of the template. `enable_thinking` and `thinking` default to False, and `date_string` to a fixed
            date.

    Attributes:
        before: text before the state.
        before_ids: token ids of that text alone, which stand before documents. A chat with documents has the same.
        after: text behind the question, up to where the answer begins.

    Raises:
        RequestError: the variables are no mapping, there is no chat template, the template changes the content, or it leaves a
            block of reasoning open.
        NotRenderedError: the template leaves out the system message.
    """

    def __init__(self, plain: PlainEncoder, system: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._plain = plain
        variables = dict(check_template_options(options))
        tokenizer = plain.encode.tokenizer
        if tokenizer is None or not (variables.get("chat_template") or getattr(tokenizer, "chat_template", None)):
            raise RequestError("decide needs a chat template, and this tokenizer has none", param="questions")
        state, question = (f"\u2063{uuid4().hex}\u2063" for _ in range(2))
        content = f"{_TRIMMED}{state}{_MIDDLE} {question}"
        messages = [] if system is None else [{"role": "system", "content": system}]
        text = _render(
            tokenizer, [*messages, {"role": "user", "content": content}], variables, "system" if messages else "questions"
        )
        if system is not None and system.strip() not in text:
            raise NotRenderedError("the chat template does not render the system message", param="system")
        if text.count(state) != 1 or text.count(question) != 1 or f"{state}{_MIDDLE} {question}" not in text:
            raise RequestError("the chat template does not render the content of a user message as it is", param="questions")
        before, self.after = text.split(f"{state}{_MIDDLE} {question}")
        self.before, self._trims = before.removesuffix(_TRIMMED), not before.endswith(_TRIMMED)
        for opened, closed in _REASONING:
            if self.after.rfind(opened) > self.after.rfind(closed):
                reason = f"the chat template leaves {opened} open where the answer begins, and decide reads no reasoning"
                raise RequestError(f"{reason}; turn it off with chat_template_kwargs", param="questions")
        self.before_ids = plain.fill([self.before], "the system message", "system")
        self._anchor = plain.fill([ANCHOR])
        self._end = f".{self.after}"  # a question ends with a full stop
        self._end_ids = plain.fill([self._end])

    def prefix(self, state: str, *, behind_documents: bool = False) -> list[int]:
        """Return the token ids of a state and everything before it.

        Args:
            state: untrusted text of the state.
            behind_documents: leave out the text before the state, which stands before documents then.

        Raises:
            RequestError: the state cannot be tokenized (see `PlainEncoder.fill`).
        """
        before = "" if behind_documents else self.before
        return self._plain.fill([before, state.lstrip() if self._trims else state, _MIDDLE], "state", "state")

    def item(self, pieces: Sequence[str], name: str) -> list[int]:
        """Return the token ids of a question behind the prefix.

        Args:
            pieces: texts, alternately trusted (even places) and untrusted (odd places). The last is trusted.
            name: name of the question, for error messages.

        Raises:
            RequestError: the question cannot be tokenized, or not apart from the state.
        """
        first, *between, last = pieces
        ids = self._plain.fill([f"{ANCHOR} {first}", *between, last + self.after], name, "questions")
        count = len(self._anchor)
        if ids[:count] != self._anchor:
            raise RequestError(f" cannot be tokenized apart from {ANCHOR!r} before it", param="questions", part=name)
        return ids[count:]

    def answer(self, text: str, name: str) -> list[int]:
        """Return the token ids of an answer behind a question that ends with a full stop.

        Args:
            text: untrusted text of the answer.
            name: name of the question, for error messages.

        Raises:
            RequestError: the answer cannot be tokenized, or not apart from the question.
        """
        ids, count = self._plain.fill([self._end, text], name, "questions"), len(self._end_ids)
        if ids[:count] != self._end_ids or len(ids) == count:
            reason = f": the answer {text!r} cannot be tokenized apart from the chat template before it"
            raise RequestError(reason, param="questions", part=name)
        return ids[count:]

    def label(self, text: str) -> int | None:
        """Return the one token with which a text begins the answer; None if the text is not one token there.

        Args:
            text: trusted text of the answer.
        """
        ids = self._plain.fill([f"{self._end}{text}"])
        return ids[-1] if ids[:-1] == self._end_ids else None


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], variables: dict[str, Any], param: str) -> str:
    options = {"enable_thinking": False, "thinking": False, "date_string": _TODAY.strftime("%d %b %Y"), **variables}
    template = ChatTemplate(tokenizer, options, _TODAY)
    try:
        return template.render([template.shaped(message) for message in messages])
    except RequestError as error:
        raise RequestError(error.message, param=param) from error
