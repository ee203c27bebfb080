"""Tokenization of untrusted text without control tokens."""

from __future__ import annotations

from collections.abc import Sequence

from chunkattn.errors import RequestError
from chunkattn.parsers.encode import PartEncoder
from chunkattn.parsers.special_tokens import ControlTokenError, ControlTokens


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
