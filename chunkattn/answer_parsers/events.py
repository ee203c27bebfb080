"""Events of an answer that is read, and `Sink`, which collects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text of the answer.

    Attributes:
        text: the text.
        begin: characters of the sample's text before it.
    """

    text: str
    begin: int


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Beginning of a call of a tool.

    Attributes:
        index: number of the call in the answer.
        name: name of the function.
    """

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """Piece of a call's arguments, which are the text of a JSON object together.

    Attributes:
        index: number of the call in the answer.
        text: the piece.
    """

    index: int
    text: str


Event = Content | Reasoning | CallBegun | Arguments


class Sink:
    """Collector of events. White space beside calls and behind reasoning is no content.

    Args:
        place: function that returns the number of characters before the text that is added.

    Attributes:
        calls: number of calls that have begun.
    """

    def __init__(self, place: Callable[[], int]) -> None:
        self.calls, self._place = 0, place
        self._events: list[Event] = []
        self._space, self._space_begin = "", 0
        self._drops_space = False

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken

    def content(self, text: str) -> None:
        """Add text of the answer."""
        begin = self._place()
        if self._drops_space:
            begin += len(text) - len(text.lstrip())
            text = text.lstrip()
        if not text:
            return
        self._drops_space = False
        if self._space:
            text, begin = self._space + text, self._space_begin
        shown = text.rstrip()
        self._space, self._space_begin = text[len(shown) :], begin + len(shown)
        if shown:
            self._events.append(Content(shown, begin))

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning, which drops the white space before the answer."""
        self._drops_space = True
        if text:
            self._events.append(Reasoning(text))

    def call(self, name: str) -> None:
        """Begin a call."""
        self._space, self._drops_space = "", True
        self._events.append(CallBegun(self.calls, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add a piece of the arguments of the last call."""
        if text:
            self._events.append(Arguments(self.calls - 1, text))

    def finish(self) -> None:
        """Add the white space at the end of the content."""
        if self._space:
            self._events.append(Content(self._space, self._space_begin))
            self._space = ""
