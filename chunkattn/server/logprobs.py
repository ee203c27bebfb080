"""Log-probabilities in the formats of OpenAI's two APIs and of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from chunkattn.outputs import Logprob
from chunkattn.server.texts import TokenTexts

Entry = dict[int, Logprob] | None


def legacy(
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
    values, tops = [], []
    for token, entry in zip(token_ids, entries, strict=True):
        values.append(None if entry is None else entry[token].logprob)
        tops.append(None if entry is None else _by_text(token, entry, num_top, decode))
    return {
        "tokens": [decode(t) for t in token_ids],
        "token_logprobs": values,
        "top_logprobs": tops if num_top else None,
        "text_offset": list(offsets),
    }


def _by_text(token: int, entry: dict[int, Logprob], num_top: int, decode: Callable[[int], str]) -> dict[str, float]:
    """Return the log-probabilities by text. Tokens of equal text (bytes of a character) share the likeliest token's entry."""
    found: dict[str, float] = {}
    for other, value in sorted(entry.items(), key=lambda pair: pair[1].rank):
        if value.rank <= num_top or other == token:
            found.setdefault(decode(other), value.logprob)
    return found


def chat(
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


def prompt(entries: Sequence[Entry] | None) -> list[dict[str, Any] | None] | None:
    """Return vLLM's `prompt_logprobs`: for each prompt token, the log-probabilities by token id as a string.

    Args:
        entries: log-probabilities by token id for each prompt token; None for a token without
            log-probabilities.
    """
    if entries is None:
        return None
    return [None if entry is None else {str(t): asdict(value) for t, value in entry.items()} for entry in entries]
