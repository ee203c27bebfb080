"""`MessageForm`: answers of `/v1/messages`, translated from those to a chat, whole and as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chunkattn.server.citations import Documents
from chunkattn.server.cited_blocks import END, StatementCutter
from chunkattn.server.forms import Form
from chunkattn.web.error_events import error_events, named_event
from chunkattn.web.errors import ApiError
from chunkattn.web.paths import MESSAGES_PATH

Event = dict[str, Any]

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's `stop_reason` by the chat's `finish_reason`; any other reason ends the turn."""
_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": "", "citations": None},
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of the deltas of a block, and the field with their text."""
MAX_CITED_TEXT = 4096
"""Code points of a cited document that a citation repeats: an answer may cite a long document many times."""


class MessageForm(Form):
    """Form of one answer of the Messages API.

    Thinking, text and calls of tools become content blocks in the order in which they come. With citations, every statement of
    the text is a block.

    Args:
        common: `id` and `model` of the chat's answer.
        request_id: id of the HTTP request.
        documents: documents that the answer may cite; None without citations.
    """

    end = ""

    def __init__(self, common: Mapping[str, Any], request_id: str = "", documents: Documents | None = None) -> None:
        self._request_id, self._documents = request_id, documents
        self._message: dict[str, Any] = {
            "id": f"msg_{common['id'].rpartition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": common["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._has_begun, self._call = False, 0
        self._block: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._cutter: StatementCutter | None = None
        self._size = 0  # code points of the content

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the message of a whole answer to a chat."""
        (choice,) = answer["choices"]
        message, usage = choice["message"], answer["usage"]
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        chunk = {"choices": [{**choice, "delta": {**message, "tool_calls": calls}}], "usage": usage}
        for _ in self._taken(chunk):
            pass
        return self._message | {"usage": _usage(usage)}

    def event(self, chunk: dict[str, Any]) -> str:
        """Return the events of a chunk."""
        return "".join(map(named_event, self._taken(chunk)))

    def failure(self, error: ApiError) -> str:
        """Return the event `error`."""
        return error_events(error, MESSAGES_PATH, self._request_id, 0)

    def _taken(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk: of its choice, or of the usage behind the last choice."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._message | {"usage": _usage(chunk["usage"])}}
        for choice in chunk["choices"]:
            yield from self._grown(choice["delta"])
            if choice["finish_reason"] is not None:
                yield from self._closed()
                self._message |= _ended(choice)
        if not chunk["choices"]:
            ends = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
            yield {"type": "message_delta", "delta": ends, "usage": _usage(chunk["usage"])}
            yield {"type": "message_stop"}

    def _grown(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of what the answer has gained."""
        if text := delta.get("reasoning_content"):
            yield from self._written("thinking", text)
        text, citations = delta.get("content") or "", delta.get("citations") or ()
        if self._documents is not None:
            yield from self._stated(text, citations)
        elif text:
            yield from self._written("text", text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if self._block is None or self._block["type"] != "tool_use" or self._call != call["index"]:
                self._call = call["index"]
                yield from self._opened({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if text := function.get("arguments"):
                yield self._delta(text)

    def _written(self, kind: str, text: str) -> Iterator[Event]:
        """Yield the events of more text in a block of a kind."""
        if self._block is None or self._block["type"] != kind:
            yield from self._opened(_EMPTY[kind])
        yield self._delta(text)

    def _stated(self, text: str, citations: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """Yield the events of more content, with a block for each statement."""
        if self._cutter is None or (self._block is not None and self._block["type"] != "text"):
            self._cutter = StatementCutter(self._size)
        self._size += len(text)
        for piece in self._cutter.take(text, citations):
            if piece is END:
                yield from self._closed()
            elif isinstance(piece, str):
                yield from self._written("text", piece)
            else:
                yield from self._cited(piece)

    def _cited(self, citation: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a citation of the open block: one for each of its documents."""
        if self._block is None or self._block["type"] != "text":
            yield from self._opened(_EMPTY["text"])
        assert self._documents is not None
        assert self._block is not None
        block = self._block
        block["citations"] = block["citations"] or []
        for source in citation["sources"]:
            document = self._documents(source["index"])
            told = {
                "cited_text": document.text[:MAX_CITED_TEXT],
                "document_index": source["index"],
                "document_title": document.title,
                "file_id": document.id,
            }
            if document.num_blocks is None:
                told |= {"type": "char_location", "start_char_index": 0, "end_char_index": len(document.text)}
            else:
                told |= {"type": "content_block_location", "start_block_index": 0, "end_block_index": document.num_blocks}
            block["citations"].append(told)
            yield self._event({"type": "citations_delta", "citation": told})

    @property
    def _index(self) -> int:
        return len(self._message["content"])

    def _opened(self, block: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that end the open block and begin another one."""
        yield from self._closed()
        self._block, self._texts = {**block}, []
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, text: str) -> Event:
        """Return the event of more text in the open block."""
        assert self._block is not None
        self._texts.append(text)
        kind, field = _DELTAS[self._block["type"]]
        return self._event({"type": kind, field: text})

    def _event(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _closed(self) -> Iterator[Event]:
        """Yield the event that ends the open block."""
        if (block := self._block) is not None:
            text, self._block = "".join(self._texts), None
            if block["type"] == "tool_use":
                block["input"] = _arguments(text)
            else:
                block[block["type"]] = text
            yield {"type": "content_block_stop", "index": self._index}
            self._message["content"].append(block)


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; those that are no JSON object, such as unfinished ones, are empty."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ended(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reason for which a choice ended."""
    reason, sequence = _STOPS.get(choice["finish_reason"], "end_turn"), choice.get("stop_reason")
    if reason == "end_turn" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in Anthropic's form, which counts cached tokens apart."""
    details = {**usage["prompt_tokens_details"]}
    cached = details.pop("cached_tokens", 0)
    reasoned = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    thinking = {} if reasoned is None else {"output_tokens_details": {"thinking_tokens": reasoned}}
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        **thinking,
        **details,
    }
