"""A request inside the engine, and the sequences that compute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from chunkattn.cache.slots import SlotPlan
from chunkattn.cache.trie import Block
from chunkattn.config import SamplingParams
from chunkattn.engine.footprint import Footprint
from chunkattn.engine.messages import PrecomputeRequest, ScoreRequest
from chunkattn.layout import PREFIX_ID, QUESTION_ID, ChunkLayout


@dataclass(eq=False)
class Request:
    """An admitted request in the order the engine computes it.

    Attributes:
        layout: chunks in canonical order when the engine's strategy allows it.
        footprint: pages it needs.
        plan: slots of the layout.
        user_index: int64 `[T]`, for every token here its token index in the user's order.
        chunk_order: for every chunk here its number in the user's order.
        arrival: its place in the order of arrival.
        max_tokens: most tokens to generate; 0 for scoring and precomputing.
        seed: of the request's random numbers, 64 bits.
        shares: whether it reads and feeds the cache.
        cache_salt: whom it shares with.
        sampling: of a generation request, else None.
        score: of a scoring request, else None.
        precompute: of a request that fills the cache, else None.
        eos_token_ids: tokens that end the text.
        computed: bool `[T]`, prompt tokens this request has had computed; the rest came from the cache.
        sequences: its samples; one until the prompt is computed. Never empty before the request ends.
        spares: blocks held for the partial pages of the samples still to come.
        root: of the trie, when it is the request's own.
        added_at: on the clock of `time.perf_counter`, seconds.
    """

    request_id: str
    layout: ChunkLayout
    footprint: Footprint
    plan: SlotPlan
    user_index: np.ndarray
    chunk_order: list[int]
    arrival: int
    priority: int
    max_tokens: int
    seed: int
    shares: bool
    cache_salt: str | None = None
    sampling: SamplingParams | None = None
    score: ScoreRequest | None = None
    precompute: PrecomputeRequest | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sequences: list[Sequence] = field(default_factory=list)
    spares: list[Block] = field(default_factory=list)
    root: Block | None = None
    added_at: float = 0.0

    def __post_init__(self) -> None:
        self.computed = np.zeros(len(self.layout), bool)
        self._keys: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.sequences = [Sequence(self, 0)]

    @property
    def order(self) -> tuple[int, int]:
        """Whoever has less goes first: priority, then arrival."""
        return (self.priority, self.arrival)

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """int32, the prompt's distinct token ids."""
        return np.unique(self.layout.token_ids)

    @cached_property
    def next_position(self) -> int:
        """Position id of the first generated token."""
        return self.layout.next_position

    @property
    def samples(self) -> int:
        """Sequences this request ends up with."""
        return self.sampling.n if self.sampling else 1

    @property
    def distinct(self) -> bool:
        """Whether every prompt token must be computed, a repeated chunk's too: its log-probability is wanted."""
        return self.sampling is not None and self.sampling.prompt_logprobs is not None

    @cached_property
    def repeats(self) -> frozenset[int]:
        """Places in `parts` of chunks that share their blocks with one before them."""
        seen: set[tuple[int, bytes]] = set()
        repeats: set[int] = set()
        for number, (kind, start, end) in enumerate(self.parts):
            if kind >= 0 and not self.distinct:
                key = int(self.layout.positions[start]), self.layout.token_ids[start:end].tobytes()
                if key in seen:
                    repeats.add(number)
                seen.add(key)
        return frozenset(repeats)

    @property
    def pages_per_sample(self) -> int:
        """Pages of one sample at its longest."""
        return self.footprint.pages_per_sample(self.max_tokens)

    @property
    def total_pages(self) -> int:
        """Pages of all samples at their longest, whatever the cache holds."""
        return self.footprint.total_pages(self.max_tokens)

    @cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        """Chunk id and token range of every part that begins on a page of its own, in order."""
        if not self.plan.aligned:
            return [(PREFIX_ID if self.precompute else QUESTION_ID, 0, len(self.layout))]
        if self.score:  # items are nobody else's, and need no pages of their own
            parts = [(PREFIX_ID, 0, self.layout.prefix_len), (QUESTION_ID, self.layout.prefix_len, len(self.layout))]
            return [part for part in parts if part[2] > part[1]]
        return [(s.chunk_id, s.start, s.end) for s in self.layout.segments if s.end > s.start]

    def key_of(self, sequence: Sequence, start: int, width: int) -> tuple[int, bytes]:
        """Position and tokens of a block, remembered for the prompt: admission may ask again and again."""
        if start + width > len(self.layout):
            position = int(sequence.rows(start, start + 1)[0][0])
            return position, sequence.tokens(start, start + width).tobytes()
        if (start, width) not in self._keys:
            key = int(self.layout.positions[start]), self.layout.token_ids[start : start + width].tobytes()
            self._keys[start, width] = key
        return self._keys[start, width]

    @property
    def forks(self) -> bool:
        """Whether the further samples are still to be made of the first."""
        return (
            self.samples > 1 and len(self.sequences) == 1 and not self.sequences[0].output_ids and not self.sequences[0].sample
        )


@dataclass(eq=False)
class Part:
    """A sequence's blocks of one part of the prompt; the last part goes on into the generated tokens.

    Attributes:
        start: token index of the first token.
        first: place of the first block in the sequence's page table.
        parents: what its first block depends on.
        blocks: in order.
        cursor: blocks before this one are complete.
    """

    start: int
    first: int
    parents: tuple[Block | None, ...]
    blocks: list[Block] = field(default_factory=list)
    cursor: int = 0

    @property
    def complete(self) -> bool:
        """Whether all its blocks are, moving the cursor on."""
        while self.cursor < len(self.blocks) and self.blocks[self.cursor].complete:
            self.cursor += 1
        return self.cursor == len(self.blocks)


def held_by(parts: list[Part]) -> list[Block]:
    """The blocks of parts, children before their parents."""
    return [block for part in reversed(parts) for block in reversed(part.blocks)]


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its output so far and, while it runs, its blocks.

    Token `i` of a sequence is the layout's for `i < len(layout)`, then the generated ones.

    Attributes:
        parts: empty while it waits.
        current: parts before this one are complete.
        pages: int32, its page table; the first `num_pages` entries are in use.
        root: of the trie, which it holds.
        last_token_at: see `Request.added_at`.
    """

    request: Request
    sample: int
    output_ids: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    current: int = 0
    pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    num_pages: int = 0
    root: Block | None = None
    last_token_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.request.layout) + len(self.output_ids)

    @property
    def held(self) -> list[Block]:
        """Every block it holds, children before their parents."""
        blocks = held_by(self.parts)
        return [*blocks, self.root] if self.root else blocks

    @property
    def num_computed(self) -> int:
        """Tokens at the beginning whose K/V is there."""
        while self.current < len(self.parts) - 1 and self.parts[self.current].complete:
            self.current += 1
        if not self.parts:
            return 0
        part = self.parts[self.current]
        if part.complete:
            return part.start + sum(b.size for b in part.blocks[-1:]) + (len(part.blocks) - 1) * self.request.plan.block_size
        return part.start + part.cursor * self.request.plan.block_size + part.blocks[part.cursor].filled

    def tokens(self, start: int, end: int) -> np.ndarray:
        """int32 token ids `[end - start]`."""
        prompt = self.request.layout.token_ids
        if end <= len(prompt):
            return prompt[start:end]
        generated = self.output_ids[max(start - len(prompt), 0) : end - len(prompt)]
        return np.concatenate([prompt[start:end], np.asarray(generated, np.int32)])

    def rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position ids, slots and first visible slots of tokens `start ... end - 1`, int32 each."""
        layout, plan, prompt = self.request.layout, self.request.plan, len(self.request.layout)
        if end <= prompt:
            return layout.positions[start:end], plan.slots[start:end], plan.row_start[start:end]
        later = np.arange(max(start - prompt, 0), end - prompt, dtype=np.int32)
        return (
            np.concatenate([layout.positions[start:end], layout.next_position + later]),
            np.concatenate([plan.slots[start:end], plan.end + later]),
            np.concatenate([plan.row_start[start:end], np.zeros_like(later)]),
        )
