"""`Chat`: requests to `/v1/chat/completions`, and the builder of their answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from chunkattn.answer_parsers.events import Arguments, CallBegun, Content, Event, Reasoning
from chunkattn.answer_parsers.reader import AnswerReader, Message
from chunkattn.calls.generate import GenerateJob
from chunkattn.citations import REQUIRED
from chunkattn.engine.grammars import grammar_of
from chunkattn.errors import RequestError
from chunkattn.outputs import CompletionOutput, RequestOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.schema.generation import ChatBody
from chunkattn.server.answers import Answer
from chunkattn.server.citations import ContentPlaces, Documents, citation_objects, documents_of
from chunkattn.server.state import ServerState
from chunkattn.server.texts import Tail, chat_logprobs
from chunkattn.structured_outputs import StructuredOutputsParams
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Caller

_TAIL_TOKENS = 16
"""Tokens at a prompt's end that may hold the beginning of the reasoning."""


class Chat(Answer):
    """Request to `/v1/chat/completions`."""

    kind, object_name, chunk_name, field = "chatcmpl", "chat.completion", "chat.completion.chunk", "documents"

    def __init__(self, body: ChatBody, state: ServerState, caller: Caller) -> None:
        super().__init__(body, state, caller)
        self.body, self.documents = body, body.chunks(self.contents)
        self._tools, self._reasoning = body.tools_of(), state.reasoning_parser
        self._calls = state.tool_parser if self._tools is not None and self._tools.mode != "none" else None
        if self._tools is not None and self._tools.mode != "none" and self._calls is None:
            text = "the chat template of this model has no known form of calls; start the server with --tool-call-parser"
            raise ApiError(400, text, param="tools", code="unsupported_parameter")
        self._readers: dict[int, tuple[AnswerReader, ContentPlaces]] = {}
        self._ids: dict[tuple[int, int], str] = {}
        self._is_open = False
        self._may_reason = False
        self._reasoned: dict[tuple[str, int], int] = {}
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        self.params = body.sampling(
            state.llm.frontend.sampling_defaults, max_tokens=body.argument("max_tokens"), logprobs=num_top
        )
        if state.shows_markers(self._calls, self._reasoning):
            self.params = replace(self.params, skip_special_tokens=False)

    @property
    def prompt_size(self) -> int:
        """Return the characters of all messages, tools and documents."""
        tools = sum(len(str(tool)) for tool in self.body.shown_tools)
        return sum(m.size for m in self.body.messages) + tools + self.documents_size(self.documents or ())

    def cited_documents(self) -> Documents | None:
        """Return the documents that the answers may cite, as citations show them; None without citations."""
        if self.citations is None:
            return None
        records = {number: document.record for number, document in self.stored.items()}
        return documents_of(self.body.documents or (), records, self.texts)

    async def streams(self) -> list[AsyncGenerator[RequestOutput, None]]:
        """Return the generator of the conversation's outputs."""
        self.caller.take(1)
        return [self.state.llm.stream(self._job, timeout=self.state.config.request_timeout_s, snapshots=False)]

    def prompt(self) -> ParsedPrompt:
        """Return the prompt of the conversation.

        Raises:
            RequestError: the conversation cannot be rendered, or does not fit.
        """
        frontend, body = self.state.llm.frontend, self.body
        messages = [m.plain() for m in body.messages]
        how: dict[str, Any] = {"chunk_mode": body.chunk_mode, "citations": self.citations}
        (parsed,) = frontend.parse_chat([messages], self.documents, body.template_options(), self.focus, **how)
        return parsed

    def _job(self) -> GenerateJob:
        """Return the job of the conversation."""
        frontend, parsed = self.state.llm.frontend, self.prompt()
        self._hold_to_form(parsed)
        if parsed.cited is not None:
            opens = self._reasoning.start[0] if self._reasoning and self._may_reason and not self._is_open else ""
            parsed = replace(parsed, cited=replace(parsed.cited, around=self._around_cited, not_first=opens))
        job = self.job_of(parsed, most_tokens=frontend.sampling_defaults.get("max_tokens"))
        self.check_generated(job, parsed)
        return job

    def _hold_to_form(self, prompt: ParsedPrompt) -> None:
        """Note whether the answer begins inside the reasoning or may open it, and set the grammar of its calls.

        The shape that the request asks for holds behind the reasoning, and for answers without calls.

        Raises:
            RequestError: a schema cannot be enforced.
        """
        self._check_cited_calls()
        reasoning, texts, before = self._reasoning, self.state.texts, None
        if reasoning is not None and texts.tokenizer is not None:
            tail = texts.whole(prompt.layout.token_ids[-_TAIL_TOKENS:].tolist())
            continued = self.body.messages[-1].text if self.body.continue_final_message else ""
            self._is_open = reasoning.is_open(tail, continued)
            if not reasoning.is_over(tail, continued):
                before = partial(reasoning.before, is_open=self._is_open)
        self._may_reason = before is not None
        asked = self.params.structured_outputs
        if self._calls is None or self._tools is None or not (self._tools.is_enforced or asked is not None):
            if reasoning is not None and before is not None and asked is not None:
                grammar = reasoning.before_shape(grammar_of(asked), texts.special_id, is_open=self._is_open)
                self.params = replace(self.params, structured_outputs=StructuredOutputsParams(grammar=grammar))
            return
        form = None if asked is None else grammar_of(asked)
        grammar = self._calls.grammar(self._tools, texts.special_id, before, form)
        try:
            shape = StructuredOutputsParams(grammar=grammar)
        except RequestError as error:
            raise RequestError(f"the tools cannot be enforced: {error}", param="tools") from None
        self.params = replace(self.params, structured_outputs=shape)

    def _check_cited_calls(self) -> None:
        """Check that citations and calls may stand in one answer: each has a grammar of the whole answer.

        Raises:
            RequestError: the answer must make calls, or must cite and may make calls.
        """
        if self.citations is None or self._calls is None or self._tools is None:
            return
        if self._tools.is_enforced:
            text = "citations and enforced calls exclude each other; set tool_choice to auto or none, without strict tools"
            raise RequestError(text, param="citations")
        if self.citations.mode == REQUIRED:
            text = "required citations and tools exclude each other; set tool_choice to none, or the mode of citations to auto"
            raise RequestError(text, param="citations")

    def _around_cited(self, text: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the shape of an answer whose text has a shape. Required citations stand behind the reasoning.

        Optional ones do where a marker of the reasoning is a special token, which the shape of a text does not hold.

        Args:
            text: shape of a text that cites.
        """
        reasoning, special_id = self._reasoning, self.state.texts.special_id
        if reasoning is None or not self._may_reason or self.citations is None:
            return text
        if self.citations.mode != REQUIRED and special_id(reasoning.start) is special_id(reasoning.end) is None:
            return text
        return StructuredOutputsParams(grammar=reasoning.before_shape(grammar_of(text), special_id, is_open=self._is_open))

    def usage(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """Return the usage of the request, with the tokens of the reasoning in a model that marks it."""
        told = super().usage(outputs)
        if self._reasoning is not None:
            count = sum(self._reasoning_tokens(output, sample) for output in outputs for sample in output.outputs)
            told["completion_tokens_details"] = {"reasoning_tokens": count}
        return told

    def _reasoning_tokens(self, output: RequestOutput, sample: CompletionOutput) -> int:
        """Return the number of a sample's tokens up to the end of its reasoning."""
        reasoning, place = self._reasoning, (output.request_id, sample.index)
        if reasoning is None or not (self._is_open or sample.text.lstrip().startswith(reasoning.start)):
            return 0
        if reasoning.end not in sample.text:
            return len(sample.token_ids)
        if place not in self._reasoned:
            self._reasoned[place] = self.texts.count_through(sample.token_ids, reasoning.end)
        return self._reasoned[place]

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return the choice of a finished sample."""
        token_logprobs = None if sample.logprobs is None else self._logprobs(sample.token_ids, sample.logprobs)
        reader, places = self._reader()
        read, events = Message(), reader.feed(sample.text, last=True)
        read.add(events)
        content = self.body.echoed + read.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if sample.citations is not None:
            places.add(events)
            message["citations"] = citation_objects(sample.citations, places.place)
        if read.reasoning is not None and self.body.include_reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            functions = ({"name": call.name, "arguments": call.arguments} for call in read.calls)
            message["content"] = content or None
            message["tool_calls"] = [{"id": self._new_id(), "type": "function", "function": one} for one in functions]
        choice = self.entry(index, {"message": message}, token_logprobs, sample, output)
        return {**choice, "finish_reason": _reason(sample, has_calls=bool(read.calls))}

    def begin(self, index: int, output: RequestOutput, tail: Tail) -> dict[str, Any] | None:
        """Return the choice with the assistant's role, which opens a sample's stream."""
        opened = {"role": "assistant", "content": self.body.echoed}
        return {"index": index, "delta": opened, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, new: CompletionOutput, output: RequestOutput, tail: Tail) -> dict[str, Any] | None:
        """Return a choice with what a sample has gained, or None for text that may begin a call."""
        token_logprobs = None if new.logprobs is None else self._logprobs(new.token_ids, new.logprobs)
        if index not in self._readers:
            self._readers[index] = self._reader()
        reader, places = self._readers[index]
        ended = new.finish_reason is not None
        events = reader.feed(new.text, last=ended)
        delta = self._delta(index, events)
        if new.citations is not None:
            places.add(events)
            if cited := citation_objects(places.settled(new.citations, ended=ended), places.place):
                delta["citations"] = cited
        if token_logprobs and not delta:
            delta = {"content": ""}
        if not delta and new.finish_reason is None:
            return None
        reason = _reason(new, has_calls=(index, 0) in self._ids)
        choice = {"index": index, "delta": delta, "logprobs": token_logprobs, "finish_reason": reason}
        return choice if new.finish_reason is None else {**choice, "stop_reason": new.stop_reason}

    def _delta(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return the fields of a delta with events. Pieces of one kind, and of one call, are together."""
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallBegun):
                call_id = self._ids[index, event.index] = self._new_id()
                function = {"name": event.name, "arguments": ""}
                calls[event.index] = {"index": event.index, "id": call_id, "type": "function", "function": function}
            elif isinstance(event, Arguments):
                empty = {"index": event.index, "function": {"arguments": ""}}
                calls.setdefault(event.index, empty)["function"]["arguments"] += event.text
        shown = {"reasoning_content": reasoning if self.body.include_reasoning else "", "content": content}
        return {name: text for name, text in shown.items() if text} | ({"tool_calls": [*calls.values()]} if calls else {})

    def _reader(self) -> tuple[AnswerReader, ContentPlaces]:
        reader = AnswerReader(self._calls, self._tools, self._reasoning, is_open=self._is_open)
        return reader, ContentPlaces(len(self.body.echoed))

    def _new_id(self) -> str:
        return "" if self._calls is None else self._calls.new_id()

    def _logprobs(self, token_ids: list[int], entries: list[Any]) -> dict[str, Any]:
        return chat_logprobs(token_ids, entries, self.body.top_logprobs or 0, self.texts, self.token_name)


def _reason(sample: CompletionOutput, *, has_calls: bool) -> str | None:
    """Return the reason for a sample's end: calls take the place of a stop, and not of a limit."""
    return "tool_calls" if has_calls and sample.finish_reason == "stop" else sample.finish_reason
