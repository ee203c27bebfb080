"""`Vocabulary`: the bytes of every token, as grammars of texts read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from chunkattn.errors import RequestError
from chunkattn.structured_outputs import PARAM

_SPACE = "\u2581"
"""Mark of a space in the vocabularies of SentencePiece."""


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
        state = json.loads(backend.to_str())
        kinds = _kinds(state.get("decoder")) | _kinds(state.get("pre_tokenizer"))
        model = state.get("model") or {}
        if not ({"ByteLevel", "ByteFallback", "Metaspace", "Replace"} & kinds or model.get("byte_fallback")):
            text = f"{PARAM}: the tokens of this tokenizer are neither byte-level nor SentencePiece's"
            raise RequestError(text, param=PARAM)
        bytes_of = _byte_level() if "ByteLevel" in kinds else None
        added = backend.get_added_tokens_decoder()
        texts = {number: text for text, number in backend.get_vocab(with_added_tokens=False).items()}
        size = min(rows, max((*texts, *added)) + 1)
        tokens, special = [b""] * size, list[int]()
        for number in range(size):
            token = added.get(number)
            if token is not None:
                tokens[number] = token.content.encode()
                if token.special:
                    special.append(number)
            elif number not in texts:
                special.append(number)
            elif bytes_of is None:
                tokens[number] = _piece(texts[number])
            else:
                tokens[number] = b"".join(bytes_of.get(char, char.encode()) for char in texts[number])
        return Vocabulary(tuple(tokens), tuple(special))


def _kinds(part: Any) -> set[str]:
    """Return the types of a part of a tokenizer, and of the parts of a sequence."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("decoders", ()), *part.get("pretokenizers", ())]
    return {str(part.get("type"))}.union(*map(_kinds, inner))


def _byte_level() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: `bytes_to_unicode` of GPT-2's encoder.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): bytes([byte]) for byte in shown} | {chr(256 + n): bytes([byte]) for n, byte in enumerate(hidden)}


def _piece(text: str) -> bytes:
    """Return the bytes of a piece of SentencePiece."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()
