"""Calls written as a JSON object with the name of a function and its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.source import Source, Wait

ARGUMENTS = ("arguments", "parameters")
"""Keys of the arguments in the forms of all families."""


class Found(Enum):
    """Result of a reading: no call, a whole one, or one whose arguments are malformed or cut off."""

    NONE = "none"
    WHOLE = "whole"
    BROKEN = "broken"


@dataclass(frozen=True)
class JsonCall:
    """Reader of one call `{"name": ..., "arguments": {...}}`.

    A call begins once its name and the beginning of its arguments have been read. Up to there, the text may turn out to be no
    call, and the caller rewinds it. The arguments are passed on as they are written, valid or not.

    Args:
        is_known: function that returns whether a name belongs to a function.
        others: further keys that a call may have; None for any.
    """

    is_known: Callable[[str], bool]
    others: Container[str] | None = None

    def read(self, source: Source, sink: Sink) -> Wait[Found]:
        """Read a call. The place is behind the object, or at its first fault."""
        name: str | None = None
        held: str | None = None
        if not (yield from source.took("{")):
            return Found.NONE
        while True:
            yield from source.space()
            if (key := (yield from self._string(source))) is None:
                return Found.NONE
            yield from source.space()
            if not (yield from source.took(":")):
                return Found.NONE
            yield from source.space()
            if key == "name":
                name = yield from self._string(source)
                if not name or not self.is_known(name):
                    return Found.NONE
            elif key in ARGUMENTS and name is not None and (yield from source.starts("{")):
                return (yield from self._stream(source, sink, name))
            elif key in ARGUMENTS:
                if (held := _as_object((yield from self._value(source)))) is None:
                    return Found.NONE
            elif (self.others is not None and key not in self.others) or (yield from self._value(source)) is None:
                return Found.NONE
            yield from source.space()
            if (yield from source.took("}")):
                break
            if not (yield from source.took(",")):
                return Found.NONE
        if name is None:
            return Found.NONE
        source.release()
        sink.call(name)
        sink.arguments("{}" if held is None else held)
        return Found.WHOLE

    def _stream(self, source: Source, sink: Sink, name: str) -> Wait[Found]:
        """Pass the arguments on as they arrive, and read the rest of the object."""
        source.release()
        sink.call(name)
        if not (yield from source.container(sink.arguments)):
            return Found.BROKEN
        while True:
            yield from source.space()
            if (yield from source.took("}")) or not (yield from source.took(",")):
                return Found.WHOLE
            yield from source.space()
            if (yield from self._string(source)) is None:
                return Found.WHOLE
            yield from source.space()
            if not (yield from source.took(":")):
                return Found.WHOLE
            yield from source.space()
            if (yield from self._value(source)) is None:
                return Found.WHOLE

    def _string(self, source: Source) -> Wait[str | None]:
        """Return the value of a JSON string, or None."""
        pieces: list[str] = []
        if not (yield from source.string(pieces.append)):
            return None
        value = _decoded("".join(pieces))
        return value if isinstance(value, str) else None

    def _value(self, source: Source) -> Wait[str | None]:
        """Return the text of a JSON value, or None."""
        pieces: list[str] = []
        char = yield from source.peek()
        read = source.string if char == '"' else source.container if char in ("{", "[") else source.scalar
        return "".join(pieces) if (yield from read(pieces.append)) else None


def _decoded(text: str) -> object:
    """Return a JSON value; None if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_object(text: str | None) -> str | None:
    """Return the text of a JSON object that is written as one, as a string that holds it, or as null."""
    if text is None or text == "null":
        return None if text is None else "{}"
    value = _decoded(text)
    if isinstance(value, str):
        text, value = value, _decoded(value)
    return text if isinstance(value, dict) else None
