"""`Source`: an answer's text as it arrives, which parsers read as generators that wait for more of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

Wait = Generator[None, None, T]
"""Generator that yields whenever it needs more text. Its result depends on the text alone, not on the pieces of it."""

_SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\]+')
_CONTROL = re.compile(r"[\x00-\x1f]")
_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_CLOSING = {"{": "}", "[": "]"}


class Source:
    """Text that grows until it ends, with a place up to which it has been read.

    Attributes:
        ended: whether no more text will come.
    """

    def __init__(self) -> None:
        self._text, self._at, self._is_marked, self._is_cut = "", 0, False, False
        self._dropped = 0  # characters before `_text`
        self.ended = False

    def feed(self, text: str) -> None:
        """Add text to the end, and forget what has been read, unless a mark holds it."""
        if not self._is_marked:
            self._drop()
        self._text += text

    # Places

    @property
    def place(self) -> int:
        """Return the number of characters before the next one."""
        return self._dropped + self._at

    def _drop(self) -> None:
        """Forget what has been read."""
        self._text, self._at, self._dropped = self._text[self._at :], 0, self.place

    def mark(self) -> None:
        """Mark the place, for `rewind`. The text behind it is kept until `rewind` or `release`."""
        self._drop()
        self._is_marked, self._is_cut = True, False

    def rewind(self) -> None:
        """Return to the mark, and drop it."""
        self._at, self._is_marked = 0, False

    def cut_off(self) -> Wait[bool]:
        """Return whether the text ends at the place, or within a marker that was sought there; the rest is stepped over."""
        if (yield from self.more()) and not self._is_cut:
            return False
        self._at = len(self._text)
        return True

    def rewind_unless_cut(self) -> Wait[None]:
        """Drop the mark, and return to it unless what was read behind it is cut off."""
        if not (yield from self.cut_off()):
            self.rewind()
        self.release()

    def release(self) -> None:
        """Drop the mark."""
        self._is_marked = False

    # Characters

    def more(self) -> Wait[bool]:
        """Wait for a character; return False at the end of the text."""
        while self._at >= len(self._text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Wait[str]:
        """Return the next character without stepping over it; an empty text at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def character(self) -> Wait[str]:
        """Step over the next character and return it; an empty text at the end."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def starts(self, marker: str) -> Wait[bool]:
        """Return whether the text goes on with a marker. It is not stepped over."""
        while True:
            held = self._text[self._at : self._at + len(marker)]
            if held == marker or not marker.startswith(held) or self.ended:
                self._is_cut |= bool(held) and held != marker and marker.startswith(held)
                return held == marker
            yield

    def took(self, marker: str) -> Wait[bool]:
        """Step over a marker, and return whether it was there."""
        if found := (yield from self.starts(marker)):
            self._at += len(marker)
        return found

    def drop_cut(self, markers: tuple[str, ...]) -> Wait[None]:
        """Step over the beginning of a marker with which the text ends."""
        for marker in markers:
            if not (yield from self.starts(marker)) and self._is_cut:
                self._at = len(self._text)

    def space(self) -> Wait[None]:
        """Step over white space."""
        while (yield from self.more()):
            self._at = _end(_SPACE, self._text, self._at)
            if self._at < len(self._text):
                return

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None], *, drops_cut: bool = False) -> Wait[str | None]:
        """Pass the text before the first of several markers on as it arrives.

        Args:
            markers: texts, none of which begins with another.
            emit: function that gets the text in pieces.
            drops_cut: whether the beginning of a marker with which the text ends is left out.

        Returns:
            The marker, which is not stepped over; None at the end of the text.
        """
        pattern = _pattern(markers)
        while True:
            found = pattern.search(self._text, self._at) if pattern is not None else None
            if found is not None and self.ended and found[0] not in markers:
                found = _whole(markers).search(self._text, self._at) or (found if drops_cut else None)
            end = len(self._text) if found is None else found.start()
            if end > self._at:
                emit(self._text[self._at : end])
            self._at = end
            if found is not None and found[0] in markers:
                return found[0]
            if self.ended:
                self._at = len(self._text)
                return None
            yield

    def line_until(self, markers: tuple[str, ...], allowed: re.Pattern[str]) -> Wait[str | None]:
        """Return the text before the first of several markers; None if it holds a character that is not allowed.

        Args:
            markers: texts; the one that is found is not stepped over.
            allowed: pattern of the allowed characters, each by itself.
        """
        taken = ""
        while char := (yield from self.peek()):
            for marker in markers:
                if (yield from self.starts(marker)):
                    return taken
            if not allowed.fullmatch(char):
                return None
            taken += char
            self._at += 1
        return None

    # JSON

    def string(self, emit: Callable[[str], None]) -> Wait[bool]:
        """Pass a JSON string on as it arrives, with its quotes; return False if there is none, or the text ends in it.

        Line breaks and other control characters, which JSON allows as escapes alone, are passed on as escapes.
        """
        if (yield from self.peek()) != '"':
            return False
        self._at += 1
        emit('"')
        while (yield from self.more()):
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                emit('"')
                return True
            if char == "\\":
                while len(self._text) - self._at < 2:
                    if self.ended:
                        self._at = len(self._text)
                        return False
                    yield
                end = self._at + 2
            else:
                end = _end(_IN_STRING, self._text, self._at)
            emit(_CONTROL.sub(_escape, self._text[self._at : end]))
            self._at = end
        return False

    def container(self, emit: Callable[[str], None]) -> Wait[bool]:
        """Pass a JSON object or list on as it arrives.

        Returns:
            Whether its brackets match. Otherwise, the place is the first fault: a wrong bracket, a `<` outside of strings, or
            the end of the text.
        """
        open_brackets: list[str] = []
        while (yield from self.more()):
            char = self._text[self._at]
            if char == '"':
                if not (yield from self.string(emit)):
                    return False
                continue
            if char == "<" or (char in "}]" and (not open_brackets or _CLOSING[open_brackets.pop()] != char)):
                return False
            end = self._at + 1 if char in "{}[]" else _end(_OUTSIDE, self._text, self._at)
            if char in _CLOSING:
                open_brackets.append(char)
            emit(self._text[self._at : end])
            self._at = end
            if not open_brackets:
                return char in "}]"
        return False

    def scalar(self, emit: Callable[[str], None]) -> Wait[bool]:
        """Pass a JSON number or word on; return False if there is none."""
        taken = ""
        while (char := (yield from self.peek())) and (char.isalnum() or char in "+-."):
            taken += char
            self._at += 1
        if taken:
            emit(taken)
        return bool(taken)


def _escape(found: re.Match[str]) -> str:
    """Return a control character as an escape of JSON."""
    return json.dumps(found[0])[1:-1]


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a pattern's match at a place, or the place."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


@lru_cache(maxsize=64)
def _whole(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


@lru_cache(maxsize=64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return the pattern of the markers, and of a beginning of one at the end of the text."""
    if not markers:
        return None
    begun = "|".join(re.escape(marker[:size]) for marker in markers for size in range(len(marker) - 1, 0, -1))
    return re.compile(f"{'|'.join(map(re.escape, markers))}|(?:{begun})\\Z")
