"""Tokenization of parts. Each part is tokenized alone; leading special tokens stand before the first part only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chunkattn.errors import RequestError
from chunkattn.parsers.special_tokens import ControlTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PartEncoder:
    """Tokenizer of prompt parts. Without a tokenizer every text is an error.

    Attributes:
        tokenizer: tokenizer of the model, or None.
        leading_ids: special tokens that the tokenizer puts before a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.leading_ids = _leading_ids(tokenizer) if tokenizer is not None else []

    def __call__(self, text: str, name: str = "the text", param: str = "prompt") -> list[int]:
        """Return the token ids of one part, without special tokens.

        Args:
            text: text of the part.
            name: name of the part, for error messages.
            param: name of the argument that holds the part.

        Raises:
            RequestError: the engine has no tokenizer, or the text is not valid Unicode.
        """
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer and this engine has none; send token ids", param=param)
        try:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except (TypeError, UnicodeError) as error:  # a lone surrogate from undecodable bytes
            message = f" {text[:40]!r} cannot be tokenized; is it valid Unicode?"
            raise RequestError(message, param=param, part=name) from error

    def parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of consecutive parts. The first begins with the tokenizer's leading special tokens.

        Args:
            texts: texts of the parts, at least one.
        """
        first, *rest = [self(t) for t in texts]
        return [[*self.leading_ids, *first], *rest]

    @cached_property
    def special(self) -> ControlTokens:
        """Return the tokens that the tokenizer marks as special."""
        marked = {str(token): i for i, token in self._added.items() if getattr(token, "special", False)}
        named = zip(getattr(self.tokenizer, "all_special_tokens", ()), getattr(self.tokenizer, "all_special_ids", ()))
        return ControlTokens(self.tokenizer, {**marked, **{str(token): int(i) for token, i in named}})

    @cached_property
    def added(self) -> ControlTokens:
        """Return all added tokens except white space. Some are not special, as Qwen3's `<think>`."""
        return ControlTokens(self.tokenizer, {str(token): i for i, token in self._added.items() if str(token).strip()})

    @property
    def _added(self) -> dict[int, Any]:
        decoder = getattr(self.tokenizer, "added_tokens_decoder", None)
        return {int(i): token for i, token in decoder.items()} if isinstance(decoder, Mapping) else {}


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text (BOS), without the special tokens after the text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
