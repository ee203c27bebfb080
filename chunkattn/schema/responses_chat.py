"""`responses_chat`: the chat that a body of `/v1/responses` stands for.

The function reads a body as it was sent. A server translates a valid one; a gateway translates any one, for its routing keys.
The function raises on a malformed body, as the readers of `chunkattn.schema.parts` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Object = Mapping[str, Any]

_OWN = frozenset(
    (
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "reasoning",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
    )
)
"""Fields that a chat does not have, or has in another form. All others are those of a chat."""
_FUNCTION = ("name", "description", "parameters", "strict")
_SCHEMA = ("name", "description", "schema", "strict")
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""


def responses_chat(body: Object) -> dict[str, Any]:
    """Return the body of the chat that answers a body of `/v1/responses`.

    Args:
        body: decoded JSON body.

    Raises:
        Exception: one of `chunkattn.schema.parts.MALFORMED`.
    """
    chat = {name: value for name, value in body.items() if name not in _OWN}
    chat["messages"] = _messages(body.get("instructions"), body["input"])
    if (most := body.get("max_output_tokens")) is not None:
        chat["max_tokens"] = most
    text = body.get("text") or {}
    if (form := _response_format(text.get("format") or {})) is not None:
        chat["response_format"] = form
    if (verbosity := text.get("verbosity")) is not None:
        chat["verbosity"] = verbosity
    if (effort := (body.get("reasoning") or {}).get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if LOGPROBS in (body.get("include") or ()) or body.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    return chat | _tools(body)


def _tools(body: Object) -> dict[str, Any]:
    """Return the tools of a chat. Without tools, a choice among them says nothing."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools and choice in ("auto", "none"):
        choice = None
    if isinstance(choice, Mapping):
        choice = _choice(choice)
    given = {"tool_choice": choice}
    if tools:
        given["tools"] = [{"type": "function", "function": present(tool, _FUNCTION)} for tool in tools]
    return {name: value for name, value in given.items() if value is not None}


def _choice(choice: Object) -> dict[str, Any]:
    """Return the choice of one function, or of several that are allowed."""
    if choice["type"] == "allowed_tools":
        allowed = {"mode": choice["mode"], "tools": [*map(_choice, choice["tools"])]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(form: Object) -> dict[str, Any] | None:
    match form.get("type"):
        case None | "text":
            return None
        case "json_schema":
            return {"type": "json_schema", "json_schema": present(form, _SCHEMA)}
        case kind:
            return {"type": kind}


def _messages(instructions: Any, given: Any) -> list[dict[str, Any]]:
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    turns = _Turns()
    for item in given:
        turns.add(item)
    return messages + turns.messages


class _Turns:
    """Messages of items. Reasoning, text and calls that follow each other are one message of the assistant.

    Attributes:
        messages: the messages so far.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._said: dict[str, Any] | None = None

    def add(self, item: Object) -> None:
        """Add an item."""
        kind = item.get("type") or "message"
        if kind == "reasoning":
            self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = _reasoning(item)
        elif kind == "function_call":
            called = {"id": item["call_id"], "type": "function", "function": present(item, ("name", "arguments"))}
            self._assistant().setdefault("tool_calls", []).append(called)
        elif kind == "message" and item["role"] == "assistant":
            self._assistant("content", "tool_calls")["content"] = _content(item["content"])
        else:
            self._said = None
            if kind == "message":
                self.messages.append({"role": item["role"], "content": _content(item["content"])})
            else:
                result = {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])}
                self.messages.append(result)

    def _assistant(self, *taken: str) -> dict[str, Any]:
        """Return the assistant's message, or a new one after a message of another role or with one of the fields."""
        if self._said is None or self._said.keys() & {*taken}:
            self._said = {"role": "assistant"}
            self.messages.append(self._said)
        return self._said


def _content(content: Any) -> Any:
    """Return a text as it is, and parts as the text parts of a chat."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]} for part in content]


def _reasoning(item: Object) -> str:
    """Return the text of reasoning, or of its summary where the text was not sent."""
    return "".join(part["text"] for part in item.get("content") or item.get("summary") or ())


def present(thing: Object, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of an object that are given, of some names."""
    return {name: thing[name] for name in names if thing.get(name) is not None}
