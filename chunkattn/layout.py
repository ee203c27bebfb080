"""`ChunkLayout`: one prompt as prefix, chunks and question.

All layers of the system pass this value. A *token index* is the place in the logical sequence prefix + chunks + question; a
*position id* is the position that RoPE sees. The cache maps tokens to KV slots.
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


def digest_of(ids: Sequence[int] | np.ndarray) -> bytes:
    """Return a hash of token ids, 16 bytes."""
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).digest()


class Segment(NamedTuple):
    """Part of a layout: its chunk id and token index range `[start, end)`."""

    chunk_id: int
    start: int
    end: int

    @property
    def name(self) -> str:
        """Return `"prefix"`, `"chunk 3"` or `"question"`, for messages and tables."""
        return {PREFIX_ID: "prefix", QUESTION_ID: "question"}.get(self.chunk_id, f"chunk {self.chunk_id}")


class Names(NamedTuple):
    """Names that a caller has for the parts of a call, for errors. The defaults are those of a prompt.

    Attributes:
        prefix: argument that holds the prefix or the query.
        chunks: argument that holds the chunks, documents or items.
        question: argument that holds the question.
        chunk: noun of a chunk, which its number follows.
        listed: names of the chunks, instead of noun and number.
        last: noun of the part behind the chunks.
    """

    prefix: str = "prompt"
    chunks: str = "prompt"
    question: str = "prompt"
    chunk: str = "chunk"
    listed: Sequence[str] = ()
    last: str = "question"

    def of(self, number: int) -> str:
        """Return the name of a chunk.

        Args:
            number: number of the chunk in the caller's order.
        """
        return self.listed[number] if self.listed else f"{self.chunk} {number}"

    def part(self, layout: ChunkLayout, segment: Segment) -> str:
        """Return the name of a part.

        Args:
            layout: layout with its chunks in the caller's order.
            segment: part of the layout.
        """
        if segment.chunk_id >= 0:
            return self.of(segment.chunk_id)
        if layout.is_plain:
            return "prompt"
        return self.last if segment.chunk_id == QUESTION_ID else segment.name

    def param(self, segment: Segment) -> str:
        """Return the argument that holds a part.

        Args:
            segment: part of a layout.
        """
        return {PREFIX_ID: self.prefix, QUESTION_ID: self.question}.get(segment.chunk_id, self.chunks)

    def whole(self, layout: ChunkLayout) -> str:
        """Return the argument that a caller shortens to make a whole prompt fit.

        Args:
            layout: layout of the prompt.
        """
        if layout.num_chunks:
            return self.chunks
        return self.question if layout.question_len else self.prefix


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Prompt of prefix, chunks and question, token by token.

    A plain prompt is a question without prefix and chunks. A scoring pack has a prefix (the query), chunks (the items) and
    no question.

    Attributes:
        token_ids: int32 `[T]`, the logical sequence.
        positions: int32 `[T]`, position ids (see `chunkattn.rope.positions`).
        prefix_len: tokens of the prefix.
        chunk_lens: tokens of every chunk, including empty chunks.
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
        """Return the number of chunks, including empty chunks."""
        return len(self.chunk_lens)

    @property
    def is_plain(self) -> bool:
        """Return whether the prompt is ordinary: one part with causal attention."""
        return self.prefix_len == 0 and not self.chunk_lens

    @property
    def question_start(self) -> int:
        """Return the token index of the question's first token."""
        return len(self) - self.question_len

    @property
    def next_position(self) -> int:
        """Return the position id of the first generated token, one after the question's last position."""
        return int(self.positions[-1]) + 1

    @property
    def max_position(self) -> int:
        """Return the highest position id, or -1 without tokens."""
        return int(self.positions.max(initial=-1))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return prefix, chunks and question in order, including empty parts."""
        ids = (PREFIX_ID, *range(self.num_chunks), QUESTION_ID)
        ends = np.cumsum((self.prefix_len, *self.chunk_lens, self.question_len)).tolist()
        return tuple(Segment(i, start, end) for i, start, end in zip(ids, [0, *ends], ends, strict=False))

    @cached_property
    def chunk_ids(self) -> np.ndarray:
        """Return the chunk id of every token: int32 `[T]`."""
        ids = np.asarray([s.chunk_id for s in self.segments], np.int32)
        return np.repeat(ids, [s.end - s.start for s in self.segments])

    @cached_property
    def row_start(self) -> np.ndarray:
        """Return the first token index that each token may attend to beyond the prefix: int32 `[T]`.

        It is the chunk's start for a token of a chunk, and 0 (no restriction) for other tokens. Token `i` sees token `k` iff
        `k <= i and (k < prefix_len or k >= row_start[i])`.
        """
        starts = np.asarray([s.start if s.chunk_id >= 0 else 0 for s in self.segments], np.int32)
        return np.repeat(starts, [s.end - s.start for s in self.segments])

    @cached_property
    def chunks_share_positions(self) -> bool:
        """Return whether all chunks begin at one position id, so that their order has no meaning."""
        return len({int(self.positions[s.start]) for s in self.segments[1:-1] if s.end > s.start}) <= 1

    @cached_property
    def repeats(self) -> frozenset[int]:
        """Return the numbers of the chunks that equal an earlier chunk at the same position. Empty chunks do not count."""
        seen: set[tuple[int, bytes]] = set()
        repeated = set()
        for chunk, start, end in self.segments[1:-1]:
            if start < end:
                key = int(self.positions[start]), self.token_ids[start:end].tobytes()
                if key in seen:
                    repeated.add(chunk)
                seen.add(key)
        return frozenset(repeated)

    @cached_property
    def chunk_digests(self) -> tuple[bytes, ...]:
        """Return a hash of the token ids of every chunk, 16 bytes each."""
        return tuple(digest_of(self.part(s)) for s in self.segments[1:-1])

    @cached_property
    def known_rows(self) -> np.ndarray:
        """Return the ascending indices of tokens whose next token is in the same part: the rows that predict a prompt token."""
        return np.flatnonzero(self.chunk_ids[1:] == self.chunk_ids[:-1])

    def part(self, segment: Segment) -> np.ndarray:
        """Return the token ids of one part: int32 `[end - start]`.

        Args:
            segment: one of `segments`.
        """
        return self.token_ids[segment.start : segment.end]

    def visible(self) -> np.ndarray:
        """Return the dense visibility mask, bool `[T, T]`. The size is O(T^2): for pictures and tests."""
        i, k = np.arange(len(self))[:, None], np.arange(len(self))[None]
        return (k <= i) & ((k < self.prefix_len) | (k >= self.row_start[:, None]))

    def with_chunk_order(self, order: Sequence[int]) -> ChunkLayout:
        """Return the layout with chunk `order[j]` in place `j`. Position ids move with their tokens.

        Args:
            order: permutation of the chunk numbers.

        Raises:
            ValueError: `order` is not a permutation of the chunks.
        """
        index = self.reorder_index(order)
        return replace(
            self,
            token_ids=self.token_ids[index],
            positions=self.positions[index],
            chunk_lens=tuple(self.chunk_lens[c] for c in order),
        )

    def reorder_index(self, order: Sequence[int]) -> np.ndarray:
        """Return for every token of `with_chunk_order(order)` its token index here: int64 `[T]`.

        Args:
            order: permutation of the chunk numbers.

        Raises:
            ValueError: `order` is not a permutation of the chunks.
        """
        if sorted(order) != list(range(self.num_chunks)):
            raise ValueError(f"order must be a permutation of {self.num_chunks} chunks, got {list(order)}")
        places = [0, *(c + 1 for c in order), self.num_chunks + 1]
        return np.concatenate([np.arange(self.segments[p].start, self.segments[p].end) for p in places])

    def canonical_order(self) -> list[int]:
        """Return the chunk numbers, sorted by a hash of their token ids.

        Attention over chunks is a set operation, so any fixed order gives the same answer. This order makes the answer equal
        to the bit for every order of the caller.
        """
        return sorted(range(self.num_chunks), key=self.chunk_digests.__getitem__)
