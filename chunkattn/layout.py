"""`ChunkLayout`: one prompt as prefix, chunks and question.

This is the value that flows down through the whole system. It speaks in *token
indices* (place in the logical sequence prefix + chunks + question) and carries
the *position ids* RoPE sees; KV slots are the cache's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

PREFIX_ID = -1
"""Chunk id of prefix tokens."""
QUESTION_ID = -2
"""Chunk id of question tokens and of every generated token."""


class Segment(NamedTuple):
    """One part of a layout: its chunk id and token index range `[start, end)`."""

    chunk_id: int
    start: int
    end: int

    @property
    def name(self) -> str:
        """`"prefix"`, `"chunk 3"` or `"question"`, for messages and tables."""
        return {PREFIX_ID: "prefix", QUESTION_ID: "question"}.get(self.chunk_id, f"chunk {self.chunk_id}")


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """A prompt of three kinds of parts, token by token.

    A plain prompt is all question: no prefix, no chunks. A scoring pack has a
    prefix (the query), chunks (the items) and no question.

    Attributes:
        token_ids: int32 `[T]`, the logical sequence.
        positions: int32 `[T]`, position ids (see `chunkattn.rope.positions`).
        prefix_len: tokens of the prefix.
        chunk_lens: tokens of every chunk, empty ones included.
        question_len: tokens of the question.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    prefix_len: int
    chunk_lens: tuple[int, ...]
    question_len: int

    def __post_init__(self) -> None:
        total = self.prefix_len + sum(self.chunk_lens) + self.question_len
        for name in ("token_ids", "positions"):
            array = getattr(self, name)
            if array.shape != (total,) or array.dtype != np.int32:
                raise ValueError(f"{name} must be int32 [{total}], got {array.dtype} {list(array.shape)}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_chunks(self) -> int:
        """Number of chunks, empty ones included."""
        return len(self.chunk_lens)

    @property
    def is_plain(self) -> bool:
        """Whether this is an ordinary prompt: one part, causal attention."""
        return self.prefix_len == 0 and not self.chunk_lens

    @property
    def question_start(self) -> int:
        """Token index of the question's first token."""
        return len(self) - self.question_len

    @property
    def next_position(self) -> int:
        """Position id of the first generated token: one past the question's last."""
        return int(self.positions[-1]) + 1

    @property
    def max_position(self) -> int:
        """Highest position id, -1 when there is no token."""
        return int(self.positions.max(initial=-1))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Prefix, every chunk and the question, in order; empty ones included."""
        ids = (PREFIX_ID, *range(self.num_chunks), QUESTION_ID)
        ends = np.cumsum((self.prefix_len, *self.chunk_lens, self.question_len)).tolist()
        return tuple(Segment(i, start, end) for i, start, end in zip(ids, [0, *ends], ends, strict=False))

    @cached_property
    def chunk_ids(self) -> np.ndarray:
        """int32 `[T]`: the chunk id of every token."""
        ids = np.asarray([s.chunk_id for s in self.segments], np.int32)
        return np.repeat(ids, [s.end - s.start for s in self.segments])

    @cached_property
    def row_start(self) -> np.ndarray:
        """int32 `[T]`: first token index a row sees beyond the prefix.

        A token sees `k` iff `k <= i and (k < prefix_len or k >= row_start[i])`:
        its own chunk's start for a chunk token, 0 for prefix and question.
        """
        starts = np.asarray([s.start if s.chunk_id >= 0 else 0 for s in self.segments], np.int32)
        return np.repeat(starts, [s.end - s.start for s in self.segments])

    @cached_property
    def known_rows(self) -> np.ndarray:
        """Ascending token indices whose next token is in the same part: rows that predict a prompt token."""
        return np.flatnonzero(self.chunk_ids[1:] == self.chunk_ids[:-1])

    def part(self, segment: Segment) -> np.ndarray:
        """Token ids of one part: int32 `[end - start]`."""
        return self.token_ids[segment.start : segment.end]

    def visible(self) -> np.ndarray:
        """The dense visibility mask, bool `[T, T]`. O(T^2): for pictures and tests."""
        i, k = np.arange(len(self))[:, None], np.arange(len(self))[None]
        return (k <= i) & ((k < self.prefix_len) | (k >= self.row_start[:, None]))

    def with_chunk_order(self, order: Sequence[int]) -> ChunkLayout:
        """The same layout with chunk `order[j]` in place `j`; position ids travel with their tokens."""
        index = self.reorder_index(order)
        return replace(
            self,
            token_ids=self.token_ids[index],
            positions=self.positions[index],
            chunk_lens=tuple(self.chunk_lens[c] for c in order),
        )

    def reorder_index(self, order: Sequence[int]) -> np.ndarray:
        """int64 `[T]`: for every token of `with_chunk_order(order)`, its token index here."""
        if sorted(order) != list(range(self.num_chunks)):
            raise ValueError(f"order must be a permutation of {self.num_chunks} chunks, got {list(order)}")
        places = [0, *(c + 1 for c in order), self.num_chunks + 1]
        return np.concatenate([np.arange(self.segments[p].start, self.segments[p].end) for p in places])

    def canonical_order(self) -> list[int]:
        """Chunk numbers in the order of a hash of their token ids.

        Attention over chunks is a set operation, so any fixed order gives the same
        answer; this one makes it the same to the bit whatever order the user gave.
        """
        keys = [hashlib.blake2b(self.part(s).tobytes(), digest_size=16).digest() for s in self.segments[1:-1]]
        return sorted(range(self.num_chunks), key=keys.__getitem__)
