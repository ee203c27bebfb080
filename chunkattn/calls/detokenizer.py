"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 6
"""Prompt tokens decoded along with the output: a tokenizer may treat the first token of a text differently."""

_UNKNOWN = "\ufffd"
_AT_ONCE = 128
"""Tokens that are decoded together: where one of them is half a character, all are decoded singly."""
_LONGEST = 16
"""Tokens that are held back: a character has four bytes, so this many are none, and each is decoded with all before it."""


class Detokenizer:
    """Incremental text of one sample, cut at stop strings.

    Tokens become text when it is asked for, any number at once: decoding one costs as much as decoding many. How often it
    is asked for changes nothing in it. Where there are stop strings, each token is searched as it comes.

    Attributes:
        stopped_by: the stop string that ended it, if one did.
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
        if self._before.endswith(_UNKNOWN):  # it ends within a character: no context is better
            self._ids, self._before = [], ""
        self._text, self._num_generated, self._ended = "", 0, False
        self._begin, self._done = 0, len(self._ids)
        self._settled = (self._done, False)

    @property
    def text(self) -> str:
        """Everything so far but the bytes of an unfinished character, unless it is the end or they are too many for one."""
        self._settle()
        return self._text

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> bool:
        """Take tokens, which may be the last; True when a stop string ended the text. Where there are any, one by one."""
        self._ids += token_ids
        self._num_generated += len(token_ids)
        self._ended = last
        return self._search()

    def flush(self) -> bool:
        """The text ends here; True when a stop string turns up in what was held back."""
        self._ended = True
        return self._search()

    def _search(self) -> bool:
        if not self._stop:
            return False
        searched = len(self._text)
        self._settle()
        return self._num_generated >= self._min_tokens and self._cut(searched)

    def _settle(self) -> None:
        """Decode what is new, up to the last token that ends a character."""
        end, state = len(self._ids), (len(self._ids), self._ended)
        if state == self._settled or self.stopped_by is not None:
            return
        self._settled = state
        for until in (*range(self._done + _AT_ONCE, end, _AT_ONCE), end):
            new = self._new(until)
            if _UNKNOWN in new:
                self._settle_singly(until)
            else:
                self._take(new, until)

    def _settle_singly(self, end: int) -> None:
        # Some decoders give up a whole run of bytes for one that is astray: token by token, it harms no character before it.
        held = 0
        for until in range(self._done + 1, end + 1):
            new = self._new(until)
            held = held + 1 if new.endswith(_UNKNOWN) else 0
            if held in (0, _LONGEST) or (self._ended and until == len(self._ids)):
                held = 0
                self._take(new, until)

    def _new(self, until: int) -> str:
        """The text that the tokens from `_done` on add to those before them."""
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
        """Cut at the earliest stop string; what lies before `searched` was looked through already."""
        found = []
        for stop in self._stop:
            place = self._text.find(stop, max(searched - len(stop) + 1, 0))
            if place >= 0:
                found.append((place, stop))
        if not found:
            return False
        place, self.stopped_by = min(found)
        self._text = self._text[: place + len(self.stopped_by) * self._include_stop]
        return True
