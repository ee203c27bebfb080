"""Texts of single tokens as they stand in a text, and what of a growing text can be sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput
from chunkattn.server.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}


class Offsets:
    """Where each token of a growing text begins; the bytes of one character begin together.

    Args:
        tokenizer: None for an engine that has none.
        begin: where the first token begins.
        context: tokens before the text.
        skip_special_tokens: whether those have no text.

    Attributes:
        end: where the next token begins.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        begin: int = 0,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = False,
    ) -> None:
        self.end = self._begin = begin
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, list(context), skip_special_tokens=skip_special_tokens)

    def take(self, token: int) -> int:
        """Where this token begins."""
        begin = self.end
        if self._text is None:
            self.end += len(_name(token))
        else:
            self._text.add((token,))
            self.end = self._begin + len(self._text.text)
        return begin

    def finish(self) -> int:
        """Where the text ends, a piece of a character included."""
        if self._text is not None:
            self._text.flush()
            self.end = self._begin + len(self._text.text)
        return self.end


def _name(token: int) -> str:
    """What stands for the text of a token where there is no tokenizer."""
    return f"token_id:{token}"


class TokenTexts:
    """Texts of tokens; some tokenizers drop the space before a token that stands alone, so it is decoded behind another.

    Args:
        tokenizer: None for an engine that has none.
        leading_ids: put before a text; they are no part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, leading_ids: Sequence[int]) -> None:
        self.tokenizer, self._leading = tokenizer, list(leading_ids)
        self.piece = lru_cache(maxsize=1 << 18)(self._piece)
        self.raw = lru_cache(maxsize=1 << 18)(self._raw)
        self._before = [] if tokenizer is None else tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._text_before = "" if tokenizer is None else str(tokenizer.decode(self._before))

    def _piece(self, token: int) -> str:
        if self.tokenizer is None:
            return _name(token)
        return str(self.tokenizer.decode([*self._before, token])).removeprefix(self._text_before)

    def _raw(self, token: int) -> bytes:
        """The bytes of a token, which may be a piece of a character only."""
        text = self.piece(token)
        if self.tokenizer is None or _UNKNOWN not in text:
            return text.encode("utf-8", "replace")
        symbol = str(self.tokenizer.convert_ids_to_tokens(token))
        if byte := _BYTE.fullmatch(symbol):  # as SentencePiece names it
            return bytes.fromhex(byte[1])
        if all(letter in _BYTE_OF for letter in symbol):  # as byte-level BPE does
            return bytes(_BYTE_OF[letter] for letter in symbol)
        return text.encode("utf-8", "replace")

    def whole(self, token_ids: Sequence[int]) -> str:
        """Text of many tokens.

        Raises:
            ApiError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ApiError(400, "this engine has no tokenizer, so there is no text of tokens", code="no_tokenizer")
        return str(self.tokenizer.decode(list(token_ids)))

    def prompt_offsets(self, output: RequestOutput) -> tuple[list[int], int]:
        """Where the text of each prompt token begins, and where the last one ends. Of text, every part is one by itself."""
        ids, entries = output.prompt_token_ids, output.prompt_logprobs or []
        is_text = output.prompt is not None
        leading = len(self._leading) if is_text and ids[: len(self._leading)] == self._leading else 0
        offsets, growing = [0] * leading, Offsets(self.tokenizer)
        for token, entry in zip(ids[leading:], entries[leading:], strict=True):
            if entry is None and is_text:
                growing = Offsets(self.tokenizer, growing.finish())
            offsets.append(growing.take(token))
        return offsets, growing.finish()


@dataclass
class Part:
    """What is new of a sample."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Tail:
    """Cuts the growing text of one sample into parts. What may be the beginning of a stop string is held back.

    Args:
        stop: stop strings of the request.

    Attributes:
        offsets: of its tokens, for whoever tells them.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._held = max(map(len, stop), default=1) - 1
        self._chars = self._tokens = 0
        self._ended = False
        self.offsets: Offsets | None = None

    def take(self, sample: CompletionOutput) -> Part | None:
        """What is new, if anything."""
        end = len(sample.text) if sample.finish_reason else max(len(sample.text) - self._held, self._chars)
        text, ids, ends = sample.text[self._chars : end], sample.token_ids[self._tokens :], sample.finish_reason is not None
        if not (text or ids or ends) or self._ended:
            return None
        logprobs = None if sample.logprobs is None else sample.logprobs[self._tokens :]
        self._chars, self._tokens, self._ended = end, len(sample.token_ids), ends
        return Part(text, ids, logprobs, sample.finish_reason, sample.stop_reason)


def usage(outputs: Sequence[RequestOutput], *, generated: int | None = None, chunks: bool = False) -> dict[str, object]:
    """OpenAI's usage of a request's prompts.

    Args:
        outputs: one a prompt.
        generated: tokens to tell instead of those generated.
        chunks: tell the cached tokens of every chunk, too.
    """
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = sum(len(s.token_ids) for o in outputs for s in o.outputs) if generated is None else generated
    details: dict[str, object] = {"cached_tokens": sum(o.num_cached_tokens for o in outputs)}
    if chunks:
        counts = [[{"tokens": n, "cached_tokens": c} for n, c in zip(o.chunk_lens, o.num_cached_chunk_tokens)] for o in outputs]
        details["chunks"] = counts[0] if len(counts) == 1 else counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
