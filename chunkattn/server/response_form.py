"""`ResponseForm`: answers of `/v1/responses`, translated from those to a chat, whole and as a stream of events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from chunkattn.server.citations import Documents
from chunkattn.server.forms import Form
from chunkattn.server.response_items import CallItem, Event, WrittenItem
from chunkattn.web.error_events import error_events, named_event
from chunkattn.web.errors import ApiError
from chunkattn.web.paths import RESPONSES_PATH

MAX_REPEATED_LOGPROBS = 4096
"""Log-probabilities up to which the events at the end of a stream repeat them: an event is encoded on the event loop."""
_FAILURES = {429: "rate_limit_exceeded"}
"""Code of a failed response by status. Others are `invalid_prompt` below 500 and `server_error` from there."""


class ResponseForm(Form):
    """Form of one answer of the Responses API.

    Reasoning, text and calls of functions become output items in the order in which they come.

    Args:
        common: `id`, `created` and `model` of the chat's answer.
        repeated: fields of the response that repeat the request.
        request_id: id of the HTTP request.
        documents: documents that the answer may cite; None without citations.
    """

    end = ""

    def __init__(
        self,
        common: Mapping[str, Any],
        repeated: Mapping[str, Any],
        request_id: str = "",
        documents: Documents | None = None,
    ) -> None:
        self._hex, self._request_id = common["id"].rpartition("-")[2], request_id
        self._documents = documents
        self._size = self._begin = 0  # code points of the content, and of the content before the last message
        self._response: dict[str, Any] = {
            "id": f"resp_{self._hex}",
            "object": "response",
            "created_at": common["created"],
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": common["model"],
            "output": [],
            "usage": None,
            **repeated,
        }
        self._number, self._has_begun, self._status = 0, False, "completed"
        self._item: WrittenItem | CallItem | None = None
        self._call, self._most_logprobs = 0, float(MAX_REPEATED_LOGPROBS)
        self._held: list[Mapping[str, Any]] = []  # log-probabilities of tokens whose text has not come

    # The form of an answer

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response of a whole answer to a chat."""
        self._most_logprobs = math.inf
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
        chunk = {"choices": [{**choice, "delta": {**message, "tool_calls": calls}}]}
        for part in (chunk, {"choices": [], "usage": answer["usage"]}):
            for _ in self._taken(part):
                pass
        return self._response

    def event(self, chunk: dict[str, Any]) -> str:
        """Return the events of a chunk."""
        return self._texts(self._taken(chunk))

    def failure(self, error: ApiError) -> str:
        """Return `response.failed`, and the event `error`."""
        code = _FAILURES.get(error.status, "invalid_prompt" if error.status < 500 else "server_error")
        self._response |= {"status": "failed", "error": {"code": code, "message": error.body["error"]["message"]}}
        failed = self._texts([*self._begun(), {"type": "response.failed", "response": self._response}])
        return failed + error_events(error, RESPONSES_PATH, self._request_id, self._number)

    def _texts(self, events: Iterable[Event]) -> str:
        """Return the texts of events, each with its number behind its type."""
        texts = []
        for event in events:
            texts.append(named_event({"type": event["type"], "sequence_number": self._number, **event}))
            self._number += 1
        return "".join(texts)

    # Events

    def _begun(self) -> Iterator[Event]:
        """Yield the events that open a stream, once."""
        if not self._has_begun:
            self._has_begun = True
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": self._response}

    def _taken(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk: of its choice, or of the usage behind the last choice."""
        yield from self._begun()
        for choice in chunk["choices"]:
            yield from self._grown(choice["delta"], (choice.get("logprobs") or {}).get("content") or ())
            if (reason := choice["finish_reason"]) is not None:
                yield from self._ended("incomplete" if reason == "length" else "completed")
        if not chunk["choices"]:
            if self._status == "incomplete":
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            self._response |= {"status": self._status, "usage": _usage(chunk["usage"])}
            yield {"type": f"response.{self._status}", "response": self._response}

    def _grown(self, delta: Mapping[str, Any], logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """Yield the events of what the answer has gained."""
        self._held += logprobs
        if text := delta.get("reasoning_content"):
            yield from self._written("reasoning", text)
        if text := delta.get("content"):
            yield from self._written("message", text, _tokens_of(text, self._held, has_more=bool(delta.get("tool_calls"))))
            self._size += len(text)
        if (citations := delta.get("citations")) and isinstance(self._item, WrittenItem):  # a message, behind its text
            yield from self._item.cited(self._annotations(citations))
        for call in delta.get("tool_calls") or ():
            yield from self._called(call)
        if any(delta.get(name) for name in ("reasoning_content", "content", "tool_calls")):
            self._held.clear()

    def _written(self, kind: str, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Event]:
        """Yield the events of more text in an item of a kind."""
        if self._item is None or self._item.item["type"] != kind:
            item = {"id": self._id("rs" if kind == "reasoning" else "msg"), "type": kind}
            if kind == "reasoning":
                yield from self._opened(WrittenItem(self._index, {**item, "summary": []}, {"type": "reasoning_text"}))
            else:
                part, self._begin = {"type": "output_text", "annotations": [], "logprobs": []}, self._size
                yield from self._opened(WrittenItem(self._index, {**item, "role": "assistant"}, part, self._most_logprobs))
        assert isinstance(self._item, WrittenItem)
        yield self._item.grown(text, logprobs)

    def _annotations(self, citations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the annotations of citations: one for each document of each."""
        assert self._documents is not None
        for citation in citations:
            span = {name: max(citation[name] - self._begin, 0) for name in ("start", "end")}
            for source in citation["sources"]:
                yield {
                    "type": "file_citation",
                    "index": span["end"],
                    "file_id": source["id"],
                    "filename": self._documents(source["index"]).title or source["id"],
                    "start_index": span["start"],
                    "document_index": source["index"],
                }

    def _called(self, call: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of more of a call. Another `index` begins another call."""
        function = call.get("function") or {}
        if not isinstance(self._item, CallItem) or self._call != call["index"]:
            self._call = call["index"]
            about = {"call_id": call["id"], "name": function["name"]}
            yield from self._opened(CallItem(self._index, {"id": self._id("fc"), "type": "function_call", **about}))
        if text := function.get("arguments"):
            assert isinstance(self._item, CallItem)
            yield self._item.grown(text)

    def _opened(self, item: WrittenItem | CallItem) -> Iterator[Event]:
        """Yield the events that end the open item and add another one."""
        yield from self._closed("completed")
        self._item = item
        yield from item.added()

    def _closed(self, status: str) -> Iterator[Event]:
        """Yield the events that end the open item."""
        if self._item is not None:
            yield from self._item.done(status)
            self._response["output"].append(self._item.item)
            self._item = None

    def _ended(self, status: str) -> Iterator[Event]:
        """Yield the events of the answer's end. An answer without anything is an empty message."""
        self._status = status
        if self._item is None or (self._held and self._item.item["type"] == "message"):
            yield from self._written("message", "", self._held)
        yield from self._closed(status)

    @property
    def _index(self) -> int:
        """Return the place of the item that is opened next."""
        return len(self._response["output"]) + (self._item is not None)

    def _id(self, kind: str) -> str:
        """Return the id of the item that is opened next."""
        return f"{kind}_{self._hex}{self._index:02x}"


def _tokens_of(text: str, logprobs: Sequence[Mapping[str, Any]], *, has_more: bool) -> list[Mapping[str, Any]]:
    """Return the log-probabilities of the tokens of `text`, and drop those of earlier reasoning.

    Args:
        text: text of the answer.
        logprobs: log-probabilities in a chat's form. A text whose bytes they do not hold has all of them.
        has_more: whether the tokens behind the text belong to calls. Otherwise they end the answer, and the text has them.
    """
    sought, written = text.encode("utf-8", "replace"), b"".join(bytes(one["bytes"]) for one in logprobs)
    begin, place = written.rfind(sought), 0
    if begin < 0:
        return [*logprobs]
    kept = list[Mapping[str, Any]]()
    for one in logprobs:
        if place + len(one["bytes"]) > begin and not (has_more and place >= begin + len(sought)):
            kept.append(one)
        place += len(one["bytes"])
    return kept


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage in the form of the Responses API."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **(usage.get("completion_tokens_details") or {})},
        "total_tokens": usage["total_tokens"],
    }
