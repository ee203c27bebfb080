"""Numbers of tokens that the engine computes for a call, from lengths alone, without tokenization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def groups(lens: Sequence[int], most: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges `[first, last)` of consecutive entries that sum to at most `most` tokens; a longer entry stands alone.

    Args:
        lens: tokens of each entry.
        most: token limit of a range.
        unit: entries count as whole multiples of it.
    """
    first, tokens = 0, 0
    for index, length in enumerate(lens):
        size = -(-length // unit) * unit
        if index > first and tokens + size > most:
            yield first, index
            first, tokens = index, 0
        tokens += size
    if first < len(lens):
        yield first, len(lens)


def generation_tokens(prompt: int, samples: int, max_tokens: int) -> int:
    """Return the tokens of a prompt and all of its samples.

    Args:
        prompt: tokens of the prompt.
        samples: number of samples.
        max_tokens: token limit of a sample.
    """
    return prompt + samples * max_tokens


def precompute_tokens(prefix: int, documents: Sequence[int]) -> int:
    """Return the tokens of a prefix, computed once, and of the documents after it.

    Args:
        prefix: tokens of the prefix.
        documents: tokens of each document.
    """
    return prefix + sum(documents)


def score_tokens(
    query: int, items: Sequence[int], *, max_pack_tokens: int, max_multi_item_seq_len: int, block_size: int, unit: int = 1
) -> dict[str, int]:
    """Return the tokens that each scoring algorithm computes for one query, by the algorithm's name.

    Args:
        query: tokens of the query, including leading special tokens.
        items: tokens of each item.
        max_pack_tokens: token limit of a pack (see `chunkattn.scoring.QueryItems`).
        max_multi_item_seq_len: token limit of a pack of `packed_dense` (see `chunkattn.scoring.QueryItems`).
        block_size: tokens of a KV page. If an item is empty, `prefill_extend` computes the query's last page again.
        unit: see `groups`.
    """
    own = sum(items)

    def packed(most: int) -> int:
        return own + query * sum(1 for _ in groups(items, most - query, unit))

    again = (query - 1) % block_size + 1 if query and not all(items) else 0
    return {
        "serial": own + query * len(items),
        "packed_segment": packed(max_pack_tokens),
        "prefill_extend": own + query + again if items else 0,
        "packed_dense": packed(max_multi_item_seq_len),
    }
