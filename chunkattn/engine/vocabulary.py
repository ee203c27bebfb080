"""`Vocabulary`: the bytes of every token, as grammars of texts read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from chunkattn.errors import RequestError
from chunkattn.structured_outputs import PARAM

_SPACE = "\u2581"
"""Mark of a space in the vocabularies of SentencePiece."""
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Name of a byte in the vocabularies of SentencePiece."""


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of the tokens of a model.

    Attributes:
        tokens: bytes of every token id, in order.
        special: ids that stand for no text, such as control tokens and ids without a token.
    """

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Any, rows: int) -> Vocabulary:
        """Return the vocabulary of a tokenizer.

        Args:
            tokenizer: fast tokenizer of transformers; None for an engine without one.
            rows: number of token ids of the model; further ids of the tokenizer are left out.

        Raises:
            RequestError: there is no tokenizer, or its tokens are neither byte-level nor SentencePiece's.
        """
        if tokenizer is None:
            raise RequestError(f"{PARAM} needs a tokenizer and this engine has none", param=PARAM)
        backend = tokenizer.backend_tokenizer
        kinds = _kinds(json.loads(backend.to_str()).get("decoder"))
        if not {"ByteLevel", "ByteFallback", "Metaspace", "Replace"} & kinds:
            text = f"{PARAM}: the tokens of this tokenizer are neither byte-level nor SentencePiece's"
            raise RequestError(text, param=PARAM)
        bytes_of: Callable[[str], bytes] = partial(_piece, has_bytes="ByteFallback" in kinds)
        if "ByteLevel" in kinds:
            bytes_of = partial(_byte_level, alphabet=byte_alphabet())
        added = backend.get_added_tokens_decoder()
        texts = {number: text for text, number in backend.get_vocab(with_added_tokens=False).items()}
        size = min(rows, max((*texts, *added)) + 1)
        tokens, special = [b""] * size, list[int]()
        for number in range(size):
            token = added.get(number)
            if token is not None:  # the decoder reads it as any other token
                tokens[number] = bytes_of(token.content)
                if token.special:
                    special.append(number)
            elif number not in texts:
                special.append(number)
            else:
                tokens[number] = bytes_of(texts[number])
        return Vocabulary(tuple(tokens), tuple(special))


def _kinds(part: Any) -> set[str]:
    """Return the types of a decoder, and of the decoders of a sequence."""
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))}.union(*map(_kinds, part.get("decoders", ())))


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: `bytes_to_unicode` of GPT-2's encoder.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def _byte_level(text: str, alphabet: Mapping[str, int]) -> bytes:
    """Return the bytes of a byte-level token. One with a character outside the alphabet stands for its own text."""
    known = [alphabet.get(char) for char in text]
    return text.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _piece(text: str, has_bytes: bool) -> bytes:
    """Return the bytes of a piece of SentencePiece.

    Args:
        text: text of the piece.
        has_bytes: whether a piece such as `<0x0A>` is a byte; otherwise it stands for its text.
    """
    if has_bytes and (byte := BYTE_PIECE.fullmatch(text)):
        return bytes([int(byte[1], 16)])
    return text.replace(_SPACE, " ").encode()
