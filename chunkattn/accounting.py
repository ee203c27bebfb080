"""Tokens that a call makes the engine compute, from lengths alone: nothing is tokenized or laid out here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def groups(lens: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield neighbours `[first, last)` of together at most `most` tokens; a longer one stands alone."""
    first, tokens = 0, 0
    for index, size in enumerate(lens):
        if index > first and tokens + size > most:
            yield first, index
            first, tokens = index, 0
        tokens += size
    if first < len(lens):
        yield first, len(lens)


def generation_tokens(prompt: int, samples: int, max_tokens: int) -> int:
    """Return the tokens of one prompt and all of its samples."""
    return prompt + samples * max_tokens


def precompute_tokens(prefix: int, documents: Sequence[int]) -> int:
    """Return the tokens of a prefix, computed once, and the documents behind it."""
    return prefix + sum(documents)


def score_tokens(
    query: int, items: Sequence[int], *, max_pack_tokens: int, max_dense_tokens: int, block_size: int
) -> dict[str, int]:
    """Return the tokens that each scoring algorithm computes for one query, by name.

    Args:
        query: tokens of the query, leading special tokens included.
        items: tokens of every item.
        max_pack_tokens: see `chunkattn.scoring.QueryItems`.
        max_dense_tokens: see `chunkattn.scoring.QueryItems`.
        block_size: tokens of a KV page; for empty items `prefill_extend` computes the query's last page again.
    """
    own = sum(items)

    def packed(most: int) -> int:
        return own + query * sum(1 for _ in groups(items, most - query))

    again = (query - 1) % block_size + 1 if query and not all(items) else 0
    return {
        "serial": own + query * len(items),
        "packed_segment": packed(max_pack_tokens),
        "prefill_extend": own + query + again if items else 0,
        "packed_dense": packed(max_dense_tokens),
    }
