"""Splitting of chat messages into the parts of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from chunkattn.errors import NotRenderedError, RequestError
from chunkattn.parsers.chat_template import ChatTemplate, texts_of, with_texts
from chunkattn.parsers.messages import check_rendered, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from chunkattn.parsers.encode import ControlTokens

TRUSTED_ROLES = ("system", "developer", "assistant")
"""Roles with trusted contents. Contents of all other roles, such as `user` and `tool`, are untrusted."""


class ChatPieces(NamedTuple):
    """Rendered conversation, cut where the first user message's content begins. Parts are in pieces for `PlainEncoder.fill`.

    Attributes:
        prefix: text before the cut; empty for a conversation that is not cut.
        question: text behind the cut, with later turns and the generation prompt.
        history: text from the cut to the last user message's content. It is empty without `with_history`, for one user message,
            and where the template moves the last one's content.
    """

    prefix: list[str]
    question: list[str]
    history: list[str]

    def with_instruction(self, instruction: str, *, is_trusted: bool) -> ChatPieces:
        """Return the pieces with an instruction directly behind the cut.

        Args:
            instruction: text of the instruction; an empty one changes nothing.
            is_trusted: whether the instruction may become control tokens.
        """
        if not instruction:
            return self

        def begun(pieces: list[str]) -> list[str]:
            return [instruction + pieces[0], *pieces[1:]] if is_trusted else ["", instruction, *pieces]

        return self._replace(question=begun(self.question), history=begun(self.history) if self.history else [])


def split_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    control: ControlTokens,
    is_trusted: Callable[[Any], bool],
    template_options: Mapping[str, Any],
    *,
    is_cut: bool = True,
    with_history: bool = False,
) -> ChatPieces:
    """Render the chat template at one time, and cut the text where the first user message's content begins.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: messages of the conversation.
        control: tokens that untrusted contents must not become.
        is_trusted: function that returns whether the contents of a role may become control tokens.
        template_options: variables of the template.
        is_cut: whether to cut the text. A text that is not cut needs no user message.
        with_history: whether to find where the last user message's content begins.

    Raises:
        RequestError: a message is malformed, there is no usable template, the template changes contents that hold a control
            token, or the text is to be cut, and there is no user message or the template moves its content.
        NotRenderedError: the template leaves out a message or a part of it, or the tools.
    """
    template, originals = ChatTemplate(tokenizer, template_options), messages
    messages = read_messages(template, messages)
    users = [i for i, m in enumerate(messages) if m.get("role") == "user"]
    if is_cut and not users:
        raise RequestError(
            "messages hold no user message, and documents stand in front of the first one's content", param="messages"
        )
    if template_options.get("tools") and not template.shows_tools():
        text = (
            "the chat template does not show tools, so the model would not see them; leave them out, or give another template"
        )
        raise NotRenderedError(text, param="tools")
    text = template.render(messages)
    cut = _start(template, messages, users[0], text) if is_cut else 0
    if cut is None:
        raise RequestError("the chat template does not render the first user message in place", param="messages")
    check_rendered(messages, [m["role"] for m in originals], template)
    untrusted = [not is_trusted(message.get("role")) for message in messages]
    try:
        bounds = _untrusted_starts(template, messages, untrusted, text, control)
    except RecursionError:
        raise RequestError("messages are nested too deeply", param="messages") from None
    history: list[str] = []
    if with_history and users[-1] > users[0]:
        last = _start(template, messages, users[-1], text)
        history = _pieces(text, cut, last, bounds) if last is not None and last > cut else []
    return ChatPieces(_pieces(text, 0, cut, bounds), _pieces(text, cut, len(text), bounds), history)


def _start(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], number: int, text: str) -> int | None:
    """Return where the content of a message begins in the rendered text; None if the template moves it."""
    mark = str(uuid4().int)  # random, so no text contains it; digits, which no template escapes or capitalises
    first, *others = texts_of(messages[number])
    # The mark stands for the content. Where the template reads the content before it writes it, the mark stands before it.
    for begun in (mark, mark + first):
        marked = [*messages[:number], with_texts(messages[number], [begun, *others]), *messages[number + 1 :]]
        probe = template.render(marked)
        start = probe.find(mark)
        if start >= 0 and text[:start] == probe[:start]:
            return start
    return None


def text_of(messages: Any) -> str:
    """Return all text in messages, for a check of its length.

    Raises:
        RequestError: the messages are nested too deeply.
    """
    try:
        return "".join(_strings(messages))
    except RecursionError:
        raise RequestError("messages are nested too deeply", param="messages") from None


def _untrusted_starts(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    untrusted: Sequence[bool],
    text: str,
    control: ControlTokens,
) -> list[int]:
    """Return the positions in `text` that split control tokens written by untrusted contents, each after its first character.

    The list is empty if the template or trusted contents wrote all control tokens.
    """
    strings = _strings([message for message, is_untrusted in zip(messages, untrusted, strict=True) if is_untrusted])
    if not any(map(control.starts.search, strings)):
        return []
    taken = set(text)
    mark = next((c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in taken), "")  # a private-use character
    marked = [
        _marked(message, control, mark) if is_untrusted else message
        for message, is_untrusted in zip(messages, untrusted, strict=True)
    ]
    parts = template.render(marked).split(mark) if mark else []
    trusted = [token for part in parts for token in control.find(part)]
    if "".join(parts) != text and (any(map(control.find, strings)) or trusted != control.find(text)):
        raise RequestError(
            "contents of user or tool messages hold the text of a control token, and the chat template changes these "
            "contents; remove the token's text, or start the engine with special_tokens_in_documents=True",
            param="messages",
        )
    if trusted == control.find(text):
        return []
    starts, place = [], 0
    for part in parts[:-1]:
        place += len(part)
        starts.append(place)
    return starts


def _pieces(text: str, start: int, end: int, bounds: Sequence[int]) -> list[str]:
    """Return `text[start:end]` cut at the bounds inside it, with an empty untrusted piece at every odd place."""
    edges = [start, *(b for b in bounds if start < b < end), end]
    first, *rest = [text[left:right] for left, right in pairwise(edges)]
    return [first, *(piece for part in rest for piece in ("", part))]


def _marked(message: Mapping[str, Any], control: ControlTokens, mark: str) -> dict[str, Any]:
    """Return a message with a mark after every character that could begin a control token."""

    def marked(text: str) -> str:
        return control.starts.sub(rf"\g<0>{mark}", text)

    changed = {name: _map(value, marked) for name, value in message.items() if name not in ("role", "content")}
    return with_texts({**message, **changed}, [*map(marked, texts_of(message))])


def _strings(value: Any) -> list[str]:
    """Return all strings in a value, including keys of mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for entry in value.items() for text in _strings(entry)]
    return [text for entry in value for text in _strings(entry)] if isinstance(value, (list, tuple)) else []


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with every string in it changed, including keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(entry, change) for entry in value]
    return value
