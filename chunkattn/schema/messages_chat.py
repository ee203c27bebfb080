"""`messages_chat`: the chat that a body of `/v1/messages` stands for; see `chunkattn.schema.responses_chat`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from chunkattn.schema.responses_chat import Object, present

_OWN = frozenset(
    (
        "cache_control",
        "messages",
        "metadata",
        "output_config",
        "stop_sequences",
        "system",
        "thinking",
        "tool_choice",
        "tools",
    )
)
"""Fields that a chat does not have, or has in another form. All others are those of a chat."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_chat(body: Object) -> dict[str, Any]:
    """Return the body of the chat that answers a body of `/v1/messages`.

    A last message of the assistant is continued. Document blocks of all turns are documents of the chat, behind those of the
    field `documents`; one with citations enabled enables those of the chat, unless the field `citations` is given.

    Args:
        body: decoded JSON body.

    Raises:
        Exception: one of `chunkattn.schema.parts.MALFORMED`.
    """
    chat = {name: value for name, value in body.items() if name not in _OWN}
    messages = [] if (system := body.get("system")) is None else [{"role": "system", "content": _texts(system)}]
    for message in body["messages"]:
        messages += _messages(message)
    chat["messages"] = messages
    if blocks := _document_blocks(body["messages"]):
        chat["documents"] = [*(body.get("documents") or ()), *map(_document, blocks)]
        if body.get("citations") is None and any((block.get("citations") or {}).get("enabled") for block in blocks):
            chat["citations"] = True
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    if (stops := body.get("stop_sequences")) is not None:
        chat["stop"] = stops
    if body.get("stream"):  # the first event tells the tokens of the prompt
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    config = body.get("output_config") or {}
    if (effort := config.get("effort")) is not None:
        chat["reasoning_effort"] = effort
    if form := config.get("format"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
    if (mode := (body.get("thinking") or {}).get("type")) in ("enabled", "disabled"):
        variables = body.get("chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"enable_thinking": mode == "enabled", **variables}
    return chat | _tools(body)


def _tools(body: Object) -> dict[str, Any]:
    chat, choice = dict[str, Any](), body.get("tool_choice")
    if tools := body.get("tools"):
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    if choice is not None:
        kind = choice["type"]
        named = {"type": "function", "function": {"name": choice["name"]}} if kind == "tool" else _CHOICES[kind]
        if tools or named not in ("auto", "none"):
            chat["tool_choice"] = named
        if (alone := choice.get("disable_parallel_tool_use")) is not None:
            chat["parallel_tool_calls"] = not alone
    return chat


def _function(tool: Object) -> dict[str, Any]:
    return present({**tool, "parameters": tool["input_schema"]}, ("name", "description", "parameters", "strict"))


def _messages(message: Object) -> Iterable[dict[str, Any]]:
    """Return the messages of a chat: results of tools are messages of their own, before or after the texts around them."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_said(content)]
    messages = list[dict[str, Any]]()
    for block in content:
        if block["type"] == "document":
            continue
        if block["type"] == "tool_result":
            result = block.get("content")
            text = "" if result is None else _texts(result)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _texts([block])
        else:
            messages.append({"role": role, "content": _texts([block])})
    return messages or [{"role": role, "content": ""}] * bool(content)


def _document_blocks(messages: Iterable[Object]) -> list[Object]:
    contents = [message["content"] for message in messages if message["role"] == "user"]
    return [block for content in contents if not isinstance(content, str) for block in content if block["type"] == "document"]


def joined_blocks(texts: Iterable[str]) -> str:
    """Return the text of a document that was given as content blocks: each is a line, for the model and in citations."""
    return "\n".join(texts)


def _document(block: Object) -> dict[str, Any]:
    """Return the document of a chat: the context is a line between title and text."""
    source = block["source"]
    text = source["data"] if source["type"] == "text" else source["content"]
    if not isinstance(text, str):
        text = joined_blocks(part["text"] for part in text)
    if context := block.get("context"):
        text = f"{context}\n{text}"
    return {"title": block.get("title"), "text": text}


def _said(blocks: Iterable[Object]) -> dict[str, Any]:
    """Return an assistant's message: its thinking, its texts and its calls."""
    fields: dict[str, list[Any]] = {"reasoning_content": [], "content": [], "tool_calls": []}
    for block in blocks:
        match block["type"]:
            case "thinking":
                fields["reasoning_content"].append(block["thinking"])
            case "text":
                fields["content"] += _texts([block])
            case "tool_use":
                called = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
                fields["tool_calls"].append({"id": block["id"], "type": "function", "function": called})
    said: dict[str, Any] = {"role": "assistant"} | {name: value for name, value in fields.items() if value}
    if "reasoning_content" in said:
        said["reasoning_content"] = "".join(said["reasoning_content"])
    return said


def _texts(content: Any) -> Any:
    """Return a text as it is, and text blocks as the text parts of a chat."""
    return content if isinstance(content, str) else [{"type": "text", "text": block["text"]} for block in content]
