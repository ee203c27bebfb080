"""Position strategies: which position id RoPE sees for every token of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from chunkattn.errors import ConfigError
from chunkattn.layout import ChunkLayout

TokenIds = Sequence[int] | np.ndarray
PositionStrategy = Callable[[int, Sequence[int], int], np.ndarray]
"""`(prefix_len, chunk_lens, question_len)` to int32 `[T]` position ids."""


def shared_positions(prefix_len: int, chunk_lens: Sequence[int], question_len: int) -> np.ndarray:
    """Every chunk starts right after the prefix; the question after the longest chunk.

    Position ids then bound the longest chunk, not the number of tokens.

    >>> shared_positions(2, [2, 3], 2).tolist()
    [0, 1, 2, 3, 2, 3, 4, 5, 6]
    """
    after = prefix_len + max(chunk_lens, default=0)
    parts = [np.arange(prefix_len), *(prefix_len + np.arange(n) for n in chunk_lens), after + np.arange(question_len)]
    return np.concatenate(parts).astype(np.int32)


def offset_positions(prefix_len: int, chunk_lens: Sequence[int], question_len: int) -> np.ndarray:
    """Position ids are the token indices, as in an ordinary prompt."""
    return np.arange(prefix_len + sum(chunk_lens) + question_len, dtype=np.int32)


STRATEGIES: dict[str, PositionStrategy] = {"shared": shared_positions, "offset": offset_positions}


def get_strategy(name: str) -> PositionStrategy:
    """The strategy called `name`.

    Raises:
        ConfigError: no strategy has that name.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"unknown position_strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def make_layout(prefix: TokenIds, chunks: Sequence[TokenIds], question: TokenIds, strategy: str = "shared") -> ChunkLayout:
    """A `ChunkLayout` from the token ids of its parts."""
    lens = tuple(len(c) for c in chunks)
    return ChunkLayout(
        token_ids=np.concatenate([np.asarray(p, np.int32) for p in (prefix, *chunks, question)]),
        positions=get_strategy(strategy)(len(prefix), lens, len(question)),
        prefix_len=len(prefix),
        chunk_lens=lens,
        question_len=len(question),
    )
