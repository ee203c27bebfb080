"""Tokens in answers: texts, character offsets, log-probabilities and counts, and the part by which a text has grown."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.engine.vocabulary import BYTE_PIECE, byte_alphabet
from chunkattn.outputs import CompletionOutput, FocusOutput, Logprob, RequestOutput
from chunkattn.web.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Entry = dict[int, Logprob] | None
"""Log-probabilities of one token by token id."""

_UNKNOWN = "\ufffd"
_BYTE_OF = byte_alphabet()


class Offsets:
    """Character offsets of the tokens of a growing text. Tokens that are bytes of one character begin at the same offset.

    Args:
        tokenizer: tokenizer of the model; None for an engine without one.
        begin: offset of the first token.
        context: token ids before the text.
        skip_special_tokens: whether special tokens have no text.

    Attributes:
        end: offset of the next token.
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
        """Add a token and return its offset."""
        begin = self.end
        if self._text is None:
            self.end += len(token_name(token))
        else:
            self._text.add((token,))
            self.end = self._begin + len(self._text.text)
        return begin

    def finish(self) -> int:
        """Return the end of the text, an incomplete character included."""
        if self._text is not None:
            self._text.flush()
            self.end = self._begin + len(self._text.text)
        return self.end


def token_name(token: int) -> str:
    """Return the name of a token by its id, as vLLM writes it."""
    return f"token_id:{token}"


class TokenTexts:
    """Texts of single tokens. A token is decoded after another token, because some tokenizers drop the space of a first token.

    Args:
        tokenizer: tokenizer of the model; None for an engine without one.
        leading_ids: special token ids that the tokenizer puts before a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, leading_ids: Sequence[int]) -> None:
        self.tokenizer, self._leading = tokenizer, list(leading_ids)
        self.piece = lru_cache(maxsize=1 << 18)(self._piece)
        self.raw = lru_cache(maxsize=1 << 18)(self._raw)
        self._before = [] if tokenizer is None else tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._text_before = "" if tokenizer is None else str(tokenizer.decode(self._before))

    def _piece(self, token: int) -> str:
        if self.tokenizer is None:
            return token_name(token)
        return str(self.tokenizer.decode([*self._before, token])).removeprefix(self._text_before)

    def _raw(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        text = self.piece(token)
        if self.tokenizer is None or _UNKNOWN not in text:
            return text.encode("utf-8", "replace")
        symbol = str(self.tokenizer.convert_ids_to_tokens(token))
        if byte := BYTE_PIECE.fullmatch(symbol):
            return bytes.fromhex(byte[1])
        if all(letter in _BYTE_OF for letter in symbol):  # byte-level BPE's letters
            return bytes(_BYTE_OF[letter] for letter in symbol)
        return text.encode("utf-8", "replace")

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that has a text, or None."""
        number, is_special = self._added.get(text, (None, False))
        return number if is_special else None

    def count_through(self, token_ids: Sequence[int], marker: str) -> int:
        """Return the number of tokens up to the first occurrence of a marker and with it, or of all tokens without it.

        Args:
            token_ids: token ids of a text.
            marker: text, of one token or of several.
        """
        number, _ = self._added.get(marker, (None, False))
        if number is not None and number in token_ids:
            return token_ids.index(number) + 1
        return bisect_left(range(len(token_ids)), x=True, key=lambda size: marker in self.whole(token_ids[:size]))

    @cached_property
    def _added(self) -> dict[str, tuple[int, bool]]:
        """Return the id of each added token by its text, and whether the token is special."""
        added = {} if self.tokenizer is None else self.tokenizer.added_tokens_decoder
        return {token.content: (number, token.special) for number, token in added.items()}

    def whole(self, token_ids: Sequence[int]) -> str:
        """Return the text of a token sequence.

        Raises:
            ApiError: 400, the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise ApiError(400, "this engine has no tokenizer, so there is no text of tokens", code="no_tokenizer")
        return str(self.tokenizer.decode(list(token_ids)))

    def prompt_offsets(self, output: RequestOutput, *, add_special_tokens: bool = True) -> tuple[list[int], int]:
        """Return the offset of each prompt token, and the end of the last token.

        Each part of a text prompt is decoded by itself, as it was tokenized.

        Args:
            output: output with the prompt's token ids and log-probabilities.
            add_special_tokens: whether the tokenizer's leading special tokens, which have no text, stand before a text.
        """
        ids, entries = output.prompt_token_ids, output.prompt_logprobs or []
        is_text = output.prompt is not None
        has_leading = is_text and add_special_tokens and ids[: len(self._leading)] == self._leading
        leading = len(self._leading) if has_leading else 0
        offsets, growing = [0] * leading, Offsets(self.tokenizer)
        begins = _begins_of_texts(output)
        for index, (token, entry) in enumerate(zip(ids[leading:], entries[leading:], strict=True), leading):
            if is_text and (entry is None or index in begins):
                growing = Offsets(self.tokenizer, growing.finish())
            offsets.append(growing.take(token))
        return offsets, growing.finish()


def _begins_of_texts(output: RequestOutput) -> set[int]:
    """Return the indices of prompt tokens that begin a text within a part, behind a document that is joined or read again."""
    focus, begin, begins = output.focus, output.prefix_len + sum(output.chunk_lens), set[int]()
    lens = dict(enumerate(output.chunk_lens)) if output.joined is None else output.joined
    if output.joined is not None:
        begins = {output.prefix_len + size for size in accumulate(lens.values())}
    if focus is not None and focus.mode == "reread":
        begins |= {begin + size for size in accumulate(lens[number] for number in focus.shown)}
    return begins


class Tail:
    """Cutter of a growing sample into what its stream sends at once. It holds back text that may begin a stop string.

    Args:
        stop: stop strings of the request.

    Attributes:
        offsets: offsets of the sample's tokens, if log-probabilities are reported.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._held = max(map(len, stop), default=1) - 1
        self._chars = self._tokens = self._cited = 0
        self._ended = False
        self.offsets: Offsets | None = None

    def take(self, sample: CompletionOutput) -> CompletionOutput | None:
        """Return text, tokens, log-probabilities and citations that a sample has gained, or None if it has gained nothing."""
        end = len(sample.text) if sample.finish_reason else max(len(sample.text) - self._held, self._chars)
        text, ids, ends = sample.text[self._chars : end], sample.token_ids[self._tokens :], sample.finish_reason is not None
        cited = None if sample.citations is None else [c for c in sample.citations[self._cited :] if c.end <= end]
        if not (text or ids or ends or cited) or self._ended:
            return None
        self._cited += len(cited or ())
        logprobs = None if sample.logprobs is None else sample.logprobs[self._tokens :]
        self._chars, self._tokens, self._ended = end, len(sample.token_ids), ends
        return replace(sample, text=text, token_ids=ids, logprobs=logprobs, citations=cited)


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, offsets: Sequence[int], decode: Callable[[int], str]
) -> dict[str, Any]:
    """Return the `logprobs` of a completion: `tokens`, `token_logprobs`, `top_logprobs` and `text_offset`.

    Args:
        token_ids: tokens to report.
        entries: log-probabilities by token id for each token; None for a token without log-probabilities,
            such as the first prompt token.
        num_top: number of likeliest tokens requested. The token itself is always included.
        offsets: character offset of each token's text.
        decode: function from a token id to its text.
    """
    pairs = list(zip(token_ids, entries, strict=True))
    return {
        "tokens": [decode(t) for t in token_ids],
        "token_logprobs": [None if e is None else e[t].logprob for t, e in pairs],
        "top_logprobs": [None if e is None else _by_text(t, e, num_top, decode) for t, e in pairs] if num_top else None,
        "text_offset": list(offsets),
    }


def _by_text(token: int, entry: dict[int, Logprob], num_top: int, decode: Callable[[int], str]) -> dict[str, float]:
    """Return the log-probabilities by text. Tokens of equal text (bytes of a character) share the likeliest token's entry."""
    found: dict[str, float] = {}
    for other, value in sorted(entry.items(), key=lambda pair: pair[1].rank):
        if value.rank <= num_top or other == token:
            found.setdefault(decode(other), value.logprob)
    return found


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob]],
    num_top: int,
    texts: TokenTexts,
    decode: Callable[[int], str],
) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice.

    Args:
        token_ids: generated tokens.
        entries: log-probabilities by token id for each token.
        num_top: number of likeliest tokens requested.
        texts: texts of the tokens, for their bytes.
        decode: function from a token id to its name.
    """

    def described(token: int, value: Logprob) -> dict[str, Any]:
        return {"token": decode(token), "logprob": value.logprob, "bytes": list(texts.raw(token))}

    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)
        top = [described(t, v) for t, v in ranked if v.rank <= num_top][:num_top]
        content.append({**described(token, entry[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry] | None) -> list[dict[str, Any] | None] | None:
    """Return vLLM's `prompt_logprobs`: for each prompt token, the log-probabilities by token id as a string.

    Args:
        entries: log-probabilities by token id for each prompt token; None for a token without
            log-probabilities.
    """
    if entries is None:
        return None
    return [None if entry is None else {str(t): asdict(value) for t, value in entry.items()} for entry in entries]


def usage(outputs: Sequence[RequestOutput], *, chunks: bool = False, moved: Collection[int] = ()) -> dict[str, object]:
    """Return OpenAI's `usage` object. Under `focus`, its counts are those of the prompt that shows the choice.

    Args:
        outputs: output of each prompt.
        chunks: whether to report the cached tokens of every chunk.
        moved: numbers of the documents of the only prompt that are stored after another prefix.
    """
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = sum(len(s.token_ids) for o in outputs for s in o.outputs)
    details: dict[str, object] = {"cached_tokens": sum(o.num_cached_tokens for o in outputs)}
    if moved := _shown(outputs, moved):
        details["other_prefix_documents"] = len(moved)
    if chunks:
        counts = [_chunk_counts(o, moved) for o in outputs]
        details["chunks"] = counts[0] if len(counts) == 1 else counts
    if any(o.focus for o in outputs):
        choices = [o.focus and _choice(o.focus) for o in outputs]
        details["focus"] = choices[0] if len(choices) == 1 else choices
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def _shown(outputs: Sequence[RequestOutput], numbers: Collection[int]) -> Collection[int]:
    """Return the numbers of the documents that the only prompt shows, of those given."""
    focus = outputs[0].focus if numbers else None
    return numbers if focus is None or focus.mode != "only" else set(numbers) & set(focus.shown)


def _chunk_counts(output: RequestOutput, moved: Collection[int]) -> list[dict[str, Any]]:
    """Return the token counts of each chunk.

    Where documents are left out, a chunk has the number of its document; the chunk of joined documents has all of theirs.
    """
    counts: list[dict[str, Any]] = [
        {"tokens": n, "cached_tokens": c} for n, c in zip(output.chunk_lens, output.num_cached_chunk_tokens)
    ]
    if output.joined is not None:
        return [{**count, "documents": [*output.joined]} for count in counts]
    numbers: Sequence[int] = range(len(counts))
    if output.focus is not None and output.focus.mode == "only" and output.focus.shown:
        numbers = output.focus.shown
        for number, count in zip(numbers, counts):
            count["document"] = number
    for number, count in zip(numbers, counts):
        if number in moved:
            count["other_prefix"] = True
    return counts


def _choice(focus: FocusOutput) -> dict[str, object]:
    """Return a choice among documents. A score that JSON has no number for is null."""
    scores = [score if score is not None and math.isfinite(score) else None for score in focus.scores]
    return {
        "mode": focus.mode,
        "score": focus.score,
        "documents": focus.documents,
        "shown": focus.shown,
        "scores": scores,
        "computed_tokens": focus.computed_tokens,
    }
