"""`AnswerReader`: the text of one sample, read in pieces or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chunkattn.answer_parsers.events import Arguments, CallBegun, Content, Event, Reasoning, Sink
from chunkattn.answer_parsers.reasoning import ReasoningParser
from chunkattn.answer_parsers.source import Source, Wait
from chunkattn.answer_parsers.tool_parser import ToolParser
from chunkattn.answer_parsers.tools import Tools


@dataclass
class Call:
    """Call of a tool.

    Attributes:
        name: name of the function.
        arguments: text of a JSON object, unless the model wrote something else.
    """

    name: str
    arguments: str = ""


@dataclass
class Message:
    """Parts of an answer.

    Attributes:
        content: text of the answer.
        reasoning: text of the reasoning; None without any.
        calls: calls of tools.
    """

    content: str = ""
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Sequence[Event]) -> None:
        """Add events."""
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning = (self.reasoning or "") + event.text
            elif isinstance(event, CallBegun):
                self.calls.append(Call(event.name))
            else:
                self.calls[event.index].arguments += event.text


class AnswerReader:
    """Reader of the text of one sample as it arrives. Its events depend on the text alone, not on its pieces.

    Args:
        tool_parser: form of calls; None takes calls for content.
        tools: tools of the request; None without any.
        reasoning_parser: form of the reasoning; None takes it for content.
        is_open: whether the answer begins inside the reasoning.
    """

    def __init__(
        self,
        tool_parser: ToolParser | None = None,
        tools: Tools | None = None,
        reasoning_parser: ReasoningParser | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        self._source = Source()
        self._sink = Sink(lambda: self._source.place)
        self._is_parallel = tools is None or tools.parallel
        self._flow: Wait[None] | None = self._read(tool_parser, tools, reasoning_parser, is_open)

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Add a piece of the text, and return its events.

        Args:
            text: the piece.
            last: whether the text ends with it.
        """
        self._source.feed(text)
        self._source.ended = last
        if self._flow is not None:
            try:
                next(self._flow)
            except StopIteration:
                self._flow = None
        if last:
            self._sink.finish()
        events = self._sink.take()
        if self._is_parallel:
            return events
        return [event for event in events if not isinstance(event, (CallBegun, Arguments)) or event.index == 0]

    def _read(
        self,
        tool_parser: ToolParser | None,
        tools: Tools | None,
        reasoning_parser: ReasoningParser | None,
        is_open: bool,
    ) -> Wait[None]:
        if reasoning_parser is not None:
            yield from reasoning_parser.read(self._source, self._sink, is_open)
        if tool_parser is not None and tools is not None:
            yield from tool_parser.read(self._source, self._sink, tools)
        else:
            yield from self._source.until((), self._sink.content)
