"""Messages of a conversation as chat templates read them, and the check that a template renders each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from chunkattn.errors import NotRenderedError, RequestError
from chunkattn.parsers.chat_template import ChatTemplate, texts_of, with_texts

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API. Other roles are accepted if the chat template names them."""
_WORD = re.compile(r"[a-z][a-z_-]*")
_FIELDS = {"role", "content", "type", "text", "name", "tool_calls", "tool_call_id", "function", "arguments", "id", "parameters"}
_FIELDS |= {"description", "properties", "required", "reasoning_content", "thinking", "image", "image_url", "video", "audio"}
"""Words that templates quote for other reasons."""
_MARK_DIGITS = 9
"""Digits of the number behind a random mark."""


def read_messages(template: ChatTemplate, messages: Any) -> list[dict[str, Any]]:
    """Return copies of messages in the form that a chat template reads.

    The role `developer` becomes `system` unless the template names it. Contents are texts or text parts, as the template reads
    them. An assistant message with `tool_calls` may have no content. The arguments of a call become a mapping if they are the
    text of a JSON object.

    Args:
        template: the chat template.
        messages: messages of the caller.

    Raises:
        RequestError: a message is malformed, its role is unknown, or there is no message.
    """
    if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) for m in messages):
        raise _malformed("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise _malformed("messages are empty; give at least one message")
    return [template.shaped(_read(number, message, template.text)) for number, message in enumerate(messages)]


def _malformed(text: str) -> RequestError:
    return RequestError(text, param="messages")


def _read(number: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or _names(template, role)):
        raise _malformed(f"message {number} has the unknown role {str(role)[:40]!r}; the roles are {', '.join(ROLES)}")
    read = dict(message)
    if role == "developer" and not _names(template, role):
        read["role"] = "system"
    if "tool_calls" in read and not read["tool_calls"]:  # templates take even an empty list for calls
        del read["tool_calls"]
    name = f"message {number} ({role})"
    calls = read.get("tool_calls")
    if calls is not None:
        if role != "assistant" or not isinstance(calls, (list, tuple)):
            text = "must be a list" if role == "assistant" else "belong to assistant messages alone"
            raise _malformed(f"the tool_calls of {name} {text}")
        read["tool_calls"] = [_read_call(call, name) for call in calls]
    content = read.get("content")
    if content is None and calls is not None:
        content = ""  # some templates concatenate the content, and none renders a null
    elif isinstance(content, (list, tuple)) and all(map(_is_text, content)):
        content = [*content]
    elif not isinstance(content, str):
        raise _malformed(f"the content of {name} must be a string or a list of text parts, got {type(content).__name__}")
    return {**read, "content": content}


def _names(template: str, role: str) -> bool:
    """Return whether a template names a role, as a word in quotes that is no field of a message."""
    return _WORD.fullmatch(role) is not None and role not in _FIELDS and (f"'{role}'" in template or f'"{role}"' in template)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _read_call(call: Any, name: str) -> dict[str, Any]:
    """Return one entry of `tool_calls`, with its arguments as a mapping where possible."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        reason = 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise _malformed(f"an entry in the tool_calls of {name} {reason}")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):  # a model's faulty call must not end the conversation
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def check_rendered(messages: Sequence[Mapping[str, Any]], roles: Sequence[str], template: ChatTemplate) -> None:
    """Check that a template renders the content and the calls of every message.

    A text is rendered if a random mark at its end appears in the rendered text behind the whole text, or one at its beginning
    before it. A template may change a text between both marks, and remove the beginning of an assistant's content, its
    reasoning. Blank texts need not be rendered.

    Args:
        messages: messages from `read_messages`.
        roles: roles as the caller gave them, for error messages.
        template: the chat template.

    Raises:
        NotRenderedError: the template leaves out a message, a part of it, or its calls.
    """
    # Digits alone: templates that escape, quote, trim or capitalise contents keep them.
    key = str(uuid4().int)
    pattern = re.compile(rf"{key}(\d{{{_MARK_DIGITS}}})")
    owners = list[int]()
    texts = dict[int, str]()  # stripped texts by the number of their mark
    for number, message in enumerate(messages):
        for text in texts_of(message):
            if text.strip():
                texts[len(owners)] = text.strip()
            owners.append(number)
    first_call = len(owners)
    owners += [number for number, message in enumerate(messages) for _ in message.get("tool_calls", ())]
    if not texts and first_call == len(owners):
        return
    all_marks = [f"{key}{number:0{_MARK_DIGITS}}" for number in range(len(owners))]

    def rendered(at_end: bool) -> tuple[set[int], set[int]]:
        """Return the numbers of the marks in the rendered text, and those of the marks beside which stands their whole text."""
        of_texts, of_calls = iter(all_marks[:first_call]), iter(all_marks[first_call:])
        probes = []
        for message in messages:
            probe = with_texts(message, [_with_mark(text, mark, at_end) for text, mark in zip(texts_of(message), of_texts)])
            if "tool_calls" in message:
                probe["tool_calls"] = [_renamed(call, mark) for call, mark in zip(message["tool_calls"], of_calls)]
            probes.append(probe)
        marks, whole, output = set(), set(), template.render(probes)
        for match in pattern.finditer(output):
            number = int(match[1])
            text = texts.get(number, "")
            marks.add(number)
            start = match.start() - len(text) if at_end else match.end()
            if text and output.startswith(text, max(start, 0)):
                whole.add(number)
        return marks, whole

    ends, whole = rendered(at_end=True)
    if lost := [owner for number, owner in enumerate(owners) if number >= first_call and number not in ends]:
        raise _not_rendered(lost[0], roles, "the tool_calls of ")
    changed = {n for n in texts if n not in whole and not (n in ends and messages[owners[n]]["role"] == "assistant")}
    if changed:
        starts, whole = rendered(at_end=False)
        seen = {owners[number] for number in starts | ends}
        for number in sorted(changed - whole):
            if number not in ends or number not in starts:
                raise _not_rendered(owners[number], roles, "all of " if owners[number] in seen else "")


def _with_mark(text: str, mark: str, at_end: bool) -> str:
    """Return a text with a mark behind its last visible character, or before its first; a blank text as it is."""
    if not (stripped := text.strip()):
        return text
    before, _, after = text.partition(stripped)
    return f"{before}{stripped}{mark}{after}" if at_end else f"{before}{mark}{stripped}{after}"


def _renamed(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "name": f"{call['function']['name']}{mark}"}}


def _not_rendered(number: int, roles: Sequence[str], part: str) -> NotRenderedError:
    return NotRenderedError(
        f"the chat template does not render {part}message {number} ({roles[number]}), so the model would not see it; "
        "leave it out, or put its text into a message that the template renders",
        param="messages",
    )
