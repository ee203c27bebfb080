"""Tokenization of parts, trusted and untrusted. Each part is tokenized alone; leading special tokens stand before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chunkattn.errors import CapacityError, RequestError
from chunkattn.fair_threads import check_wanted
from chunkattn.parsers.special_tokens import ControlTokenError, ControlTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PIECE = 1 << 14
"""Characters of a long text that are tokenized at once to measure the text."""
_CHARS_PER_TOKEN = 4
"""Characters per token of most texts. A text that has more for each token of the limit is measured before it is tokenized."""
_MARGIN = 1024
"""Tokens that cutting a text into pieces may add to it, beside a quarter of the limit."""


class PartEncoder:
    """Tokenizer of prompt parts. Without a tokenizer every text is an error.

    Attributes:
        tokenizer: tokenizer of the model, or None.
        leading_ids: special tokens that the tokenizer puts before a text.
        limit: number of tokens above which a text can never be served; None for no limit.
        limit_name: name of the limit, for error messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.leading_ids = _leading_ids(tokenizer) if tokenizer is not None else []
        self.limit: int | None = None
        self.limit_name = "max_model_len"

    def __call__(self, text: str, name: str = "the text", param: str = "prompt") -> list[int]:
        """Return the token ids of one part, without special tokens.

        Args:
            text: text of the part.
            name: name of the part, for error messages.
            param: name of the argument that holds the part.

        Raises:
            RequestError: the engine has no tokenizer, or the text is not valid Unicode.
            CapacityError: the text has far more tokens than `limit`.
            AbandonedError: the caller has left.
        """
        check_wanted()
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer and this engine has none; send token ids", param=param)
        try:
            self.check_length(text, name, param)
            return self._ids(text)
        except (TypeError, UnicodeError) as error:  # a lone surrogate from undecodable bytes
            message = f" {text[:40]!r} cannot be tokenized; is it valid Unicode?"
            raise RequestError(message, param=param, part=name) from error

    def _ids(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def check_length(self, text: str, name: str, param: str) -> None:
        """Check that a text is not far too long, without tokenizing the whole text.

        Args:
            text: text of the part.
            name: name of the part, for error messages.
            param: name of the argument that holds the part.

        Raises:
            CapacityError: the text has far more tokens than `limit`.
            AbandonedError: the caller has left.
        """
        if self.limit is None or (end := self._far_end(text, self.limit)) is None:
            return
        tokens = f" of {len(text)} characters has more than {self.limit} tokens in its first {end}"
        raise CapacityError(f"{tokens}, {self.limit_name} is {self.limit}; shorten it", param=param, part=name)

    def head(self, text: str) -> str:
        """Return a text without its far end, for a caller that keeps at most `limit` tokens.

        Args:
            text: text that the caller cuts to its first tokens.
        """
        return text if self.limit is None else text[: self._far_end(text, self.limit)]

    def _far_end(self, text: str, limit: int) -> int | None:
        """Return a number of characters that surely have more than `limit` tokens; None if the text may be shorter.

        No bound on characters per token holds for all tokenizers: some drop or merge characters without limit. The text is
        therefore tokenized in pieces until the tokens are more than the cuts between the pieces can explain.
        """
        if self.tokenizer is None or len(text) <= max(_PIECE, _CHARS_PER_TOKEN * limit):
            return None
        tokens = 0
        for start in range(0, len(text), _PIECE):
            check_wanted()
            tokens += len(self._ids(text[start : start + _PIECE]))
            if tokens > limit + limit // 4 + _MARGIN:
                return start + _PIECE
        return None

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


class PlainEncoder:
    """Tokenizer of untrusted text, alone or inside trusted text.

    Args:
        encode: tokenizer of parts.
        control: tokens that untrusted text must not become; None for `encode.added`.
    """

    def __init__(self, encode: PartEncoder, control: ControlTokens | None = None) -> None:
        self._encode = encode
        self.control = encode.added if control is None else control

    def __call__(self, text: str, name: str = "the text", param: str = "query") -> list[int]:
        """Return the token ids of an untrusted text, without control tokens. See `PartEncoder` for the arguments.

        Raises:
            RequestError: the engine has no tokenizer, the text is not valid Unicode, or the tokenizer has no other tokens for
                the text of a control token.
        """
        ids = self._encode(text, name, param)
        return ids if self.control.is_clean(text, ids) else self._without(["", text], name, param)

    def fill(self, pieces: Sequence[str], name: str = "the text", param: str = "query") -> list[int]:
        """Return the token ids of joined pieces: trusted text at even places, untrusted text at odd places.

        Trusted text may contain control tokens. A control token must lie within one piece, so neighbouring pieces cannot form
        a control token together. If untrusted text has no control tokens, the ids equal the ids of the whole text.

        Args:
            pieces: texts, alternately trusted and untrusted.
            name: name of the text, for error messages.
            param: name of the argument that holds the text.

        Raises:
            RequestError: the pieces cannot be tokenized, for a reason of `__call__`.
        """
        whole = "".join(pieces)
        self._encode.check_length(whole, name, param)
        own = [token for piece in pieces[::2] for token in self.control.find(piece)]
        if own == self.control.find(whole):
            ids = self._encode(whole, name, param)
            if self.control.follows(ids, own):
                return ids
        return self._without(pieces, name, param)

    def _without(self, pieces: Sequence[str], name: str, param: str) -> list[int]:
        try:
            return self.control.encode(pieces)
        except ControlTokenError as error:
            reason = f"{name} holds {error.tokens}, which this tokenizer cannot take as plain text"
            raise RequestError(reason, param=param) from error
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"{name} cannot be tokenized; is it valid Unicode?", param=param) from error


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text (BOS), without the special tokens after the text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
