"""Untrusted text, tokenized as text alone: what looks like a control token in it does not become one."""

from __future__ import annotations

from collections.abc import Sequence

from chunkattn.errors import RequestError
from chunkattn.parsers.encode import PartEncoder
from chunkattn.parsers.special_tokens import ControlTokenError, ControlTokens


class PlainEncoder:
    """Tokenizes untrusted text, alone or inside trusted text.

    Args:
        encode: the tokenizer.
        control: which tokens untrusted text must not become; None is `encode.added`.
    """

    def __init__(self, encode: PartEncoder, control: ControlTokens | None = None) -> None:
        self._encode = encode
        self.control = encode.added if control is None else control

    def __call__(self, text: str, name: str = "the text", param: str = "query") -> list[int]:
        """Token ids of an untrusted text, none of them a control token. Arguments are those of `PartEncoder`.

        Raises:
            RequestError: no tokenizer, no valid Unicode, or the tokenizer knows no way to take it as text.
        """
        ids = self._encode(text, name, param)
        return ids if self.control.is_clean(text, ids) else self._without(["", text], name, param)

    def fill(self, pieces: Sequence[str], name: str = "the text", param: str = "query") -> list[int]:
        """Token ids of joined pieces: trusted text at even places, in which control tokens count, untrusted at odd ones.

        A control token counts within one piece only, so neighbouring pieces cannot form one together. Without control
        tokens in untrusted text the ids are those of the whole text.

        Raises:
            RequestError: as for one text.
        """
        own = [token for piece in pieces[::2] for token in self.control.find(piece)]
        whole = "".join(pieces)
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
