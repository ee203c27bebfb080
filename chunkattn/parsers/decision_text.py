"""`MarkedEncoder`: tokenizer of a decision model's prompts, whose marks say where its head reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from chunkattn.errors import RequestError
from chunkattn.parsers.encode import PlainEncoder

_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
"""Private characters around the text of a control token that a user wrote."""
_ESCAPED = ("\\uf8f0", "\\uf8f1")
_OVERLAP = 256
"""Characters before the end of a shared beginning that are tokenized again with every text."""
_AGREED = 4
"""Tokens within the overlap that must be equal before the tokens in front of them are reused."""
Encode = Callable[[str, str, str], tuple[list[int], list[int]]]
"""`MarkedEncoder.__call__`."""


class MarkedEncoder:
    """Tokenizer of texts with marks and splits, in which users' texts do not become control tokens.

    The user's control tokens are wrapped before a template writes the text, and unwrapped before it is tokenized.

    Args:
        plain: tokenizer of trusted and untrusted text.
        mark: text of a mark.
        split: text that only divides the text for the tokenizer.
        sanitizes: whether the user's texts never become control tokens. If not, marks and splits in them are left out.
    """

    def __init__(self, plain: PlainEncoder, mark: str, split: str, *, sanitizes: bool) -> None:
        self._plain, self._mark, self._sanitizes = plain, mark, sanitizes
        words = sorted([mark, split, *(plain.control.ids if sanitizes else ())], key=len, reverse=True)
        self._words = re.compile("|".join(map(re.escape, words)))
        # A template may cut the text of a user, and leave one of the two characters.
        pieces = f"{_OPEN}({self._words.pattern}){_CLOSE}|({re.escape(mark)}|{re.escape(split)})|[{_OPEN}{_CLOSE}]"
        self._pieces = re.compile(pieces)

    def wrapped(self, value: Any) -> Any:
        """Return a JSON value of the user with its control tokens wrapped.

        Args:
            value: texts, or lists and objects of texts.
        """
        if isinstance(value, str):
            value = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._words.sub(rf"{_OPEN}\g<0>{_CLOSE}" if self._sanitizes else "", value)
        if isinstance(value, Mapping):
            return {self.wrapped(key) if isinstance(key, str) else key: self.wrapped(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.wrapped(entry) for entry in value]
        return value

    def __call__(self, text: str, name: str, param: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text without its marks and splits, and the number of tokens before each mark.

        Args:
            text: text that a template wrote of wrapped values.
            name: name of the text, for error messages.
            param: name of the argument that holds the text.

        Raises:
            RequestError: the text cannot be tokenized, or the template has escaped the user's control tokens.
        """
        if any(escaped in text for escaped in _ESCAPED):
            raise RequestError(f"{name} holds a control token, which the model's template escapes", param=param)
        ids, marks = list[int](), list[int]()
        start, is_inner = 0, False
        for found in self._pieces.finditer(text):
            ids += self._encoded([text[start : found.start()]], name, param, is_inner)
            start, is_inner = found.end(), found[2] is None
            if found[1]:
                ids += self._encoded(["", found[1]], name, param, True)
            elif found[2] == self._mark:
                marks.append(len(ids))
        return ids + self._encoded([text[start:]], name, param, is_inner), marks

    def behind(self, shared: str, text: str, name: str, param: str) -> Encode:
        """Return an encoder with the results of this one, which tokenizes a beginning that texts share only once.

        A text that begins so is tokenized from a little before the end of the beginning on. A tokenizer merges neighbours, so
        once a few tokens there equal those of `text`, all before them are equal, too. If they differ, the whole text is
        tokenized.

        Args:
            shared: the beginning.
            text: a text that begins so.
            name: name of the text, for error messages.
            param: name of the argument that holds the text.

        Raises:
            RequestError: as `__call__`.
        """
        start = len(shared) - _OVERLAP
        if start <= 0 or re.match(f"[^{_OPEN}]*{_CLOSE}", shared[start:]):  # short, or within a user's control token
            return self
        (whole, marks), (end, _) = self(text, name, param), self(text[start:], name, param)
        same = 0
        while same < min(len(whole), len(end)) and whole[-1 - same] == end[-1 - same]:
            same += 1
        kept, cut = len(whole) - same, len(end) - same

        def encode(text: str, name: str, param: str) -> tuple[list[int], list[int]]:
            if text.startswith(shared) and same >= _AGREED:
                ids, own = self(text[start:], name, param)
                if ids[: cut + _AGREED] == end[: cut + _AGREED]:
                    before = [mark for mark in marks if mark <= kept]
                    return whole[:kept] + ids[cut:], before + [mark - cut + kept for mark in own if mark > cut]
            return self(text, name, param)

        return encode

    def _encoded(self, pieces: list[str], name: str, param: str, is_inner: bool) -> list[int]:
        """Return the token ids of trusted text at even places and untrusted text at odd ones.

        The text of a user's control token, and text behind one, is read behind a line break. So SentencePiece writes no space
        before it, as in transformers' `encode_marked_chat`.
        """
        if not any(pieces):
            return []
        if is_inner:
            line, ids = self._plain.encode("\n"), self._plain.fill(["\n" + pieces[0], *pieces[1:]], name, param)
            if ids[: len(line)] == line:
                return ids[len(line) :]
        return self._plain.fill(pieces, name, param)
