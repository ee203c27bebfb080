"""Texts of single tokens as they stand in a text, and what of a growing text can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput
from chunkattn.server.errors import ApiError
from chunkattn.server.logprobs import Entry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Texts of tokens; some tokenizers drop the space before a token that stands alone, so it is decoded behind another."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.piece = lru_cache(maxsize=1 << 18)(self._piece)
        self._before = [] if tokenizer is None else tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._text_before = "" if tokenizer is None else str(tokenizer.decode(self._before))

    def _piece(self, token: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token}"
        return str(self.tokenizer.decode([*self._before, token])).removeprefix(self._text_before)

    def alone(self, token: int) -> str:
        """Text of a token with which a text begins."""
        return f"token_id:{token}" if self.tokenizer is None else str(self.tokenizer.decode([token]))

    def whole(self, token_ids: Sequence[int]) -> str:
        """Text of many tokens.

        Raises:
            ApiError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ApiError(400, "this engine has no tokenizer, so there is no text of tokens", code="no_tokenizer")
        return str(self.tokenizer.decode(list(token_ids)))

    def prompt_offsets(self, output: RequestOutput) -> tuple[list[int], int]:
        """Where the text of each prompt token begins, and where the last one ends."""
        entries: Sequence[Entry] = output.prompt_logprobs or []
        offsets, end = [], 0
        for token, entry in zip(output.prompt_token_ids, entries, strict=True):
            offsets.append(end)
            end += len(self.alone(token) if entry is None else self.piece(token))
        return offsets, end


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
        offset: where the text of the next token begins, for whoever counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._held = max(map(len, stop), default=1) - 1
        self._chars = self._tokens = self.offset = 0
        self._ended = False

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
