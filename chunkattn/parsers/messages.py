"""Messages of a conversation as chat templates read them, and the check that a template renders each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from chunkattn.errors import NotRenderedError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API. Other roles are accepted if the chat template names them."""
_WORD = re.compile(r"[a-z][a-z_-]*")
_FIELDS = {"role", "content", "type", "text", "name", "tool_calls", "tool_call_id", "function", "arguments", "id", "parameters"}
_FIELDS |= {"description", "properties", "required", "reasoning_content", "thinking", "image", "image_url", "video", "audio"}
"""Words that templates quote for other reasons."""


def read_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Any, template_options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return copies of messages in the form that chat templates expect.

    The role `developer` becomes `system` unless the template names it. Text parts are joined. An assistant message with
    `tool_calls` may have no content. The arguments of a call become a mapping if they are the text of a JSON object.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: messages of the caller.
        template_options: variables of the template.

    Raises:
        RequestError: a message is malformed, or its role is unknown.
    """
    if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}", param="messages")
    template = _template(tokenizer, template_options)
    return [_read(number, message, template) for number, message in enumerate(messages)]


def _template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """Return the text of the chat template, or an empty text: without a template, rendering raises the error."""
    try:
        return str(tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")))
    except Exception:
        return ""


def _read(number: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or _names(template, role)):
        text = f"message {number} has the unknown role {str(role)[:40]!r}; the roles are {', '.join(ROLES)}"
        raise RequestError(text, param="messages")
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
            raise RequestError(f"the tool_calls of {name} {text}", param="messages")
        read["tool_calls"] = [_read_call(call, name) for call in calls]
    content = read.get("content")
    if content is None and calls is not None:
        content = ""  # some templates concatenate the content, and none renders a null
    elif isinstance(content, (list, tuple)) and content and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        text = f"the content of {name} must be a string or a list of text parts, got {type(content).__name__}"
        raise RequestError(text, param="messages")
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
        raise RequestError(f"an entry in the tool_calls of {name} {reason}", param="messages")
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


def check_rendered(
    messages: Sequence[Mapping[str, Any]], roles: Sequence[str], render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> None:
    """Check that a template renders the content and the calls of every message.

    A message is rendered if a random mark at the end of its content appears in the rendered text behind the whole content, or
    one at its beginning before it. A template may change a content between both marks, and remove the beginning of an
    assistant's content, its reasoning. Contents without text need not be rendered.

    Args:
        messages: messages from `read_messages`.
        roles: roles as the caller gave them, for error messages.
        render: function that renders messages.

    Raises:
        NotRenderedError: the template leaves out a message, a part of it, or its calls.
    """
    key = f"\u2063{uuid4().int}:"
    marks = re.compile(rf"{key}(\d+)\u2063")
    texts = {number: text for number, message in enumerate(messages) if (text := message["content"].strip())}
    if not texts and not any("tool_calls" in message for message in messages):
        return
    calls = {place: number for place, (number, _) in enumerate(_calls(messages), len(messages))}

    def marked(number: int, message: Mapping[str, Any], at_end: bool, first_call: int) -> dict[str, Any]:
        changed = dict(message)
        if text := texts.get(number):
            before, _, after = message["content"].partition(text)
            changed["content"] = before + (f"{text}{key}{number}\u2063" if at_end else f"{key}{number}\u2063{text}") + after
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "name": f"{call['function']['name']}{key}{place}\u2063"}}
                for place, call in enumerate(message["tool_calls"], first_call)
            ]
        return changed

    def rendered(at_end: bool) -> tuple[set[int], set[int]]:
        """Return the marks in the rendered text, and the numbers of the messages whose whole content is beside its mark."""
        probes, place = [], len(messages)
        for number, message in enumerate(messages):
            probes.append(marked(number, message, at_end, place))
            place += len(message.get("tool_calls", ()))
        found, whole, output = set(), set(), render(probes)
        for match in marks.finditer(output):
            number, text = int(match[1]), texts.get(int(match[1]), "")
            found.add(number)
            start = match.start() - len(text) if at_end else match.end()
            if text and output.startswith(text, max(start, 0)):
                whole.add(number)
        return found, whole

    ends, whole = rendered(at_end=True)
    if lost := [number for place, number in calls.items() if place not in ends]:
        raise _not_rendered(lost[0], roles, "the tool_calls of ")
    changed = {n for n in texts if n not in whole and not (n in ends and messages[n]["role"] == "assistant")}
    if changed:
        starts, whole = rendered(at_end=False)
        for number in sorted(changed - whole):
            if number not in ends or number not in starts:
                raise _not_rendered(number, roles, "" if number not in starts | ends else "all of ")


def _calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            yield number, call


def _not_rendered(number: int, roles: Sequence[str], part: str) -> NotRenderedError:
    return NotRenderedError(
        f"the chat template does not render {part}message {number} ({roles[number]}), so the model would not see it; "
        "leave it out, or put its text into a message that the template renders",
        param="messages",
    )
