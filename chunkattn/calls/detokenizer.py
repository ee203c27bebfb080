"""`Detokenizer`: turns token ids into text as they arrive, in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 6
"""Prompt tokens decoded together with the output, since a tokenizer may treat the first token of a text differently."""

_UNKNOWN = "\ufffd"
_DECODE_TOGETHER = 128
"""Tokens decoded together. If one of them ends within a character, all are decoded one by one."""
_MAX_HELD = 16
"""Tokens held back at most: a character has at most four bytes, and each held token is decoded with all before it."""


def token_decoder(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str | None]:
    """Return a cached function from a token id to its text."""

    @lru_cache(maxsize=65536)
    def decode(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id])

    return decode


class Detokenizer:
    """Incremental text of one sample, cut at stop strings.

    Tokens are decoded when the text is read, any number at once: decoding many costs as much as decoding one. The text does
    not depend on how often it is read. With stop strings, each token is decoded and searched when it is added.

    Attributes:
        stopped_by: stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: list[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stopped_by: str | None = None
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        self._ids = prompt_ids[-_CONTEXT:]
        self._before: str | None = self._decode(0, len(self._ids))
        if self._before.endswith(_UNKNOWN):  # the context ends within a character, so it is dropped
            self._ids, self._before = [], ""
        self._text, self._num_generated, self._ended = "", 0, False
        self._begin, self._done = 0, len(self._ids)
        self._settled = (self._done, False)

    @property
    def text(self) -> str:
        """Return the text so far, without the bytes of an unfinished character.

        Such bytes are included at the end of the text, or when they are too many for a character.
        """
        self._settle()
        return self._text

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> bool:
        """Add tokens, and return True if a stop string ended the text.

        Args:
            token_ids: new tokens; one at a time if there are stop strings.
            last: whether these are the last tokens of the text.
        """
        self._ids += token_ids
        self._num_generated += len(token_ids)
        self._ended = last
        return self._search()

    def flush(self) -> bool:
        """End the text, and return True if the bytes held back complete a stop string."""
        self._ended = True
        return self._search()

    def _search(self) -> bool:
        if not self._stop:
            return False
        searched = len(self._text)
        self._settle()
        return self._num_generated >= self._min_tokens and self._cut(searched)

    def _settle(self) -> None:
        """Decode the new tokens, up to the last token that ends a character."""
        end, state = len(self._ids), (len(self._ids), self._ended)
        if state == self._settled or self.stopped_by is not None:
            return
        self._settled = state
        for until in (*range(self._done + _DECODE_TOGETHER, end, _DECODE_TOGETHER), end):
            new = self._new(until)
            if _UNKNOWN in new:
                self._settle_singly(until)
            else:
                self._take(new, until)

    def _settle_singly(self, end: int) -> None:
        # Some decoders drop a whole run of bytes for one invalid byte. Decoding by token keeps the characters before it.
        held = 0
        for until in range(self._done + 1, end + 1):
            new = self._new(until)
            held = held + 1 if new.endswith(_UNKNOWN) else 0
            if held in (0, _MAX_HELD) or (self._ended and until == len(self._ids)):
                held = 0
                self._take(new, until)

    def _new(self, until: int) -> str:
        """Return the text that the tokens from `_done` to `until` add to the text of the tokens before them."""
        if self._before is None:
            self._before = self._decode(self._begin, self._done)
        now = self._decode(self._begin, until)
        return now[len(self._before) :] if now.startswith(self._before) else self._decode(self._done, until)

    def _take(self, new: str, until: int) -> None:
        if new:
            self._text += new
            self._begin, self._done = self._done, until
            self._before = None

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)

    def _cut(self, searched: int) -> bool:
        """Cut the text at the earliest stop string, and return whether there is one; text before `searched` has none."""
        ends = []
        for stop in self._stop:
            place = self._text.find(stop, max(searched - len(stop) + 1, 0))
            if place >= 0:
                ends.append((place, stop))
        if not ends:
            return False
        place, self.stopped_by = min(ends)
        self._text = self._text[: place + len(self.stopped_by) * self._include_stop]
        return True
