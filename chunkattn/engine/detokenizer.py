"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 6
"""Prompt tokens decoded along with the output: a tokenizer may treat the first token of a text differently."""


_LONGEST = 16
"""Tokens that are held back: a character has four bytes, so this many are none, and each is decoded with all before it."""


class Detokenizer:
    """Incremental text of one sample, cut at stop strings.

    Attributes:
        text: everything decoded so far.
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
        self.text = ""
        self.stopped_by: str | None = None
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        self._ids = prompt_ids[-_CONTEXT:]
        if self._decode(0, len(self._ids)).endswith("\ufffd"):  # it ends within a character: no context is better
            self._ids = []
        self._num_generated = self._held = 0
        self._begin, self._done = 0, len(self._ids)

    def add(self, token_id: int, *, last: bool = False) -> bool:
        """Take one token; True when a stop string ended the text.

        Bytes of an unfinished character are held back until it is whole, or until `last`, or until they are too many for one.
        """
        self._ids.append(token_id)
        self._num_generated += 1
        before, now = self._decode(self._begin, self._done), self._decode(self._begin, len(self._ids))
        self._held = self._held + 1 if now.endswith("\ufffd") else 0
        if 0 < self._held < _LONGEST and not last:  # held back
            return False
        self._held = 0
        searched = len(self.text)
        self.text += now[len(before) :]
        if len(now) > len(before):
            self._begin, self._done = self._done, len(self._ids)
        return self._num_generated >= self._min_tokens and self._cut(searched)

    def flush(self) -> bool:
        """Add what was held back, for the text ends here; True when a stop string turns up in it."""
        searched = len(self.text)
        self.text += self._decode(self._begin, len(self._ids))[len(self._decode(self._begin, self._done)) :]
        self._done = len(self._ids)
        return self._num_generated >= self._min_tokens and self._cut(searched)

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)

    def _cut(self, searched: int) -> bool:
        """Cut at the earliest stop string; what lies before `searched` was looked through already."""
        found = []
        for stop in self._stop:
            place = self.text.find(stop, max(searched - len(stop) + 1, 0))
            if place >= 0:
                found.append((place, stop))
        if not found:
            return False
        place, self.stopped_by = min(found)
        self.text = self.text[: place + len(self.stopped_by) * self._include_stop]
        return True
