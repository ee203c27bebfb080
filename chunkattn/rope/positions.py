"""Position strategies: functions that assign RoPE's position ids to the tokens of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from chunkattn.errors import CapacityError, ConfigError
from chunkattn.layout import ChunkLayout

TokenIds = Sequence[int] | np.ndarray
PADDING = -1
"""Position id of a row that only fills a step."""
_MAX_POSITION = 2**31 - 1
PositionStrategy = Callable[[int, Sequence[int], int, int], np.ndarray]
"""Function from `(prefix_len, chunk_lens, question_len, gap)` to int32 `[T]` position ids."""


def shared_positions(prefix_len: int, chunk_lens: Sequence[int], question_len: int, gap: int = 0) -> np.ndarray:
    """Return position ids: every chunk starts `gap` positions after the prefix, and the question after the longest chunk.

    The highest position then depends on the longest chunk instead of the number of tokens.

    Args:
        prefix_len: tokens of the prefix.
        chunk_lens: tokens of each chunk.
        question_len: tokens of the question.
        gap: positions left free between prefix and chunks. A prompt without chunks has no gap.

    Returns:
        int32 `[T]` position ids.

    Raises:
        CapacityError: a position exceeds int32.

    >>> shared_positions(2, [2, 3], 2).tolist()
    [0, 1, 2, 3, 2, 3, 4, 5, 6]
    >>> shared_positions(2, [2, 3], 2, gap=10).tolist()
    [0, 1, 12, 13, 12, 13, 14, 15, 16]
    """
    first = prefix_len + (gap if len(chunk_lens) else 0)
    after = first + max(chunk_lens, default=0)
    if after + question_len > _MAX_POSITION + 1:
        raise CapacityError(f"positions up to {after + question_len - 1} exceed int32; chunk_position_gap is {gap}")
    lens = np.asarray(chunk_lens, np.int64)
    in_chunks = first + np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    return np.concatenate([np.arange(prefix_len), in_chunks, after + np.arange(question_len)]).astype(np.int32)


def offset_positions(prefix_len: int, chunk_lens: Sequence[int], question_len: int, gap: int = 0) -> np.ndarray:
    """Return the token indices as positions, as in an ordinary prompt: int32 `[T]`.

    Args:
        prefix_len: tokens of the prefix.
        chunk_lens: tokens of each chunk.
        question_len: tokens of the question.
        gap: ignored; positions are consecutive.
    """
    return np.arange(prefix_len + sum(chunk_lens) + question_len, dtype=np.int32)


STRATEGIES: dict[str, PositionStrategy] = {"shared": shared_positions, "offset": offset_positions}


def get_strategy(name: str) -> PositionStrategy:
    """Return a strategy by name.

    Args:
        name: key in `STRATEGIES`.

    Raises:
        ConfigError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"unknown position_strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def make_layout(
    prefix: TokenIds, chunks: Sequence[TokenIds], question: TokenIds, strategy: str = "shared", gap: int = 0
) -> ChunkLayout:
    """Return the layout of a prompt's parts.

    Args:
        prefix: token ids of the prefix.
        chunks: token ids of each chunk.
        question: token ids of the question.
        strategy: name of the position strategy.
        gap: positions left free between prefix and chunks, under `shared` positions.

    Raises:
        ConfigError: the strategy is unknown.
        CapacityError: a position exceeds int32.
    """
    token_ids = np.concatenate([np.asarray(p, np.int32) for p in (prefix, *chunks, question)])
    return lay_out(token_ids, len(prefix), tuple(map(len, chunks)), len(question), strategy, gap)


def lay_out(
    token_ids: np.ndarray,
    prefix_len: int,
    chunk_lens: tuple[int, ...],
    question_len: int,
    strategy: str = "shared",
    gap: int = 0,
) -> ChunkLayout:
    """Return the layout of a prompt whose token ids are in one array.

    Args:
        token_ids: token ids of prefix, chunks and question in order, int32 `[T]`.
        prefix_len: tokens of the prefix.
        chunk_lens: tokens of each chunk.
        question_len: tokens of the question.
        strategy: see `make_layout`.
        gap: see `make_layout`.

    Raises:
        ConfigError: the strategy is unknown.
        CapacityError: a position exceeds int32.
    """
    positions = get_strategy(strategy)(prefix_len, chunk_lens, question_len, gap)
    return ChunkLayout(token_ids, positions, prefix_len, chunk_lens, question_len)
