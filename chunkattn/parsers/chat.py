"""Splitting of chat messages into the parts of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from chunkattn.errors import RequestError
from chunkattn.parsers.messages import check_rendered, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from chunkattn.parsers.encode import ControlTokens

TRUSTED_ROLES = ("system", "developer", "assistant")
"""Roles with trusted contents. Contents of all other roles, such as `user` and `tool`, are untrusted."""


class ChatPieces(NamedTuple):
    """Rendered conversation, cut where the first user message's content begins. Parts are in pieces for `PlainEncoder.fill`.

    Attributes:
        prefix: text before the cut.
        question: text behind the cut, with later turns and the generation prompt.
        history: text from the cut to the last user message's content. It is empty without `with_history`, for one user message,
            and where the template moves the last one's content.
    """

    prefix: list[str]
    question: list[str]
    history: list[str]


def split_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    control: ControlTokens,
    is_trusted: Callable[[Any], bool],
    *,
    with_history: bool = False,
    **template_options: Any,
) -> ChatPieces:
    """Render the chat template and cut it where the first user message's content begins.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: messages of the conversation.
        control: tokens that untrusted contents must not become.
        is_trusted: function that returns whether the contents of a role may become control tokens.
        with_history: whether to find where the last user message's content begins.
        **template_options: variables of the template.

    Raises:
        RequestError: a message is malformed, there is no user message or no usable template, the template moves the content,
            or it changes contents that hold a control token.
        NotRenderedError: the template leaves out a message or a part of it.
    """
    given, messages = messages, read_messages(tokenizer, messages, template_options)
    users = [i for i, m in enumerate(messages) if m.get("role") == "user"]
    if not users:
        raise RequestError("messages hold no user message", param="messages")
    text = _render(tokenizer, messages, template_options)
    cut = _start(tokenizer, messages, users[0], text, template_options)
    if cut is None:
        raise RequestError("the chat template does not render the first user message in place", param="messages")
    check_rendered(messages, [m["role"] for m in given], lambda probe: _render(tokenizer, probe, template_options))
    untrusted = [not is_trusted(message.get("role")) for message in messages]
    try:
        bounds = _untrusted_starts(tokenizer, messages, untrusted, text, control, template_options)
    except RecursionError:
        raise RequestError("messages are nested too deeply", param="messages") from None
    history: list[str] = []
    if with_history and users[-1] > users[0]:
        last = _start(tokenizer, messages, users[-1], text, template_options)
        history = _pieces(text, cut, last, bounds) if last is not None and last > cut else []
    return ChatPieces(_pieces(text, 0, cut, bounds), _pieces(text, cut, len(text), bounds), history)


def _start(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    number: int,
    text: str,
    options: dict[str, Any],
) -> int | None:
    """Return where the content of a message begins in the rendered text; None if the template moves it."""
    mark = f"\u2063{uuid4().hex}\u2063"  # random, so no text contains it
    marked = [*messages[:number], {**messages[number], "content": mark}, *messages[number + 1 :]]
    probe = _render(tokenizer, marked, options)
    start = probe.find(mark)
    return None if start < 0 or text[:start] != probe[:start] else start


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
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    untrusted: Sequence[bool],
    text: str,
    control: ControlTokens,
    options: dict[str, Any],
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
    parts = _render(tokenizer, marked, options).split(mark) if mark else []
    trusted = [token for part in parts for token in control.find(part)]
    if "".join(parts) != text and (any(map(control.find, strings)) or trusted != control.find(text)):
        raise RequestError(
            "contents of user or tool messages hold the text of a control token, and the chat template changes these "
            "contents, so the template's own control tokens cannot be identified. Remove the token's text from the "
            "messages, or start the engine with special_tokens_in_documents=True",
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
    changed = {name: _map(value, lambda text: control.starts.sub(rf"\g<0>{mark}", text)) for name, value in message.items()}
    return {**changed, "role": message.get("role")}


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


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **{"add_generation_prompt": True, **options})
    except Exception as error:  # templates are programs and may raise anything
        raise RequestError(f"the chat template failed: {error}", param="messages") from error
