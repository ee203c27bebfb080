"""A request inside the engine, and the sequences that compute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from chunkattn.cache.slots import SlotPlan, plan_slots
from chunkattn.config import SamplingParams
from chunkattn.engine.messages import GenerateRequest, ScoreRequest
from chunkattn.layout import ChunkLayout


@dataclass(eq=False)
class Request:
    """An admitted request in the order the engine computes it.

    Attributes:
        layout: chunks in canonical order when `order` says so.
        plan: slots of the layout.
        user_index: int64 `[T]`, for every token here its token index in the user's order.
        max_tokens: most tokens to generate; 0 for scoring.
        seed: of the request's random numbers, 64 bits.
        sampling: of a generation request, else None.
        score: of a scoring request, else None.
        eos_token_ids: tokens that end the text.
        sequences: its samples, once it runs; one until the prompt is computed.
        spare_pages: held for the samples still to come.
    """

    request_id: str
    layout: ChunkLayout
    plan: SlotPlan
    user_index: np.ndarray
    max_tokens: int
    seed: int
    sampling: SamplingParams | None = None
    score: ScoreRequest | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sequences: list[Sequence] = field(default_factory=list)
    spare_pages: list[int] = field(default_factory=list)

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """int32, the prompt's distinct token ids."""
        return np.unique(self.layout.token_ids)

    @property
    def samples(self) -> int:
        """Sequences this request ends up with."""
        return self.sampling.n if self.sampling else 1

    @property
    def shared_pages(self) -> int:
        """Full pages of the prompt, which all samples share."""
        return self.plan.end // self.plan.block_size

    @property
    def pages_per_sample(self) -> int:
        """Pages of one sample at its longest; the last token generated is never computed."""
        return self.plan.pages_for(max(self.max_tokens - 1, 0))

    @property
    def total_pages(self) -> int:
        """Pages of all samples at their longest."""
        return self.shared_pages + self.samples * (self.pages_per_sample - self.shared_pages)


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its output so far, its pages, how much of it is computed.

    Token `i` of a sequence is the layout's for `i < len(layout)`, then the generated ones.
    """

    request: Request
    sample: int
    pages: list[int]
    num_computed: int = 0
    output_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.request.layout) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> np.ndarray:
        """int32 token ids `[end - start]`."""
        prompt = self.request.layout.token_ids
        generated = self.output_ids[max(start - len(prompt), 0) : max(end - len(prompt), 0)]
        return np.concatenate([prompt[start:end], np.asarray(generated, np.int32)])

    def rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position ids, slots and first visible slots of tokens `start ... end - 1`, int32 each."""
        layout, plan, prompt = self.request.layout, self.request.plan, len(self.request.layout)
        later = np.arange(max(start - prompt, 0), max(end - prompt, 0), dtype=np.int32)
        return (
            np.concatenate([layout.positions[start:end], layout.next_position + later]),
            np.concatenate([plan.slots[start:end], plan.end + later]),
            np.concatenate([plan.row_start[start:end], np.zeros_like(later)]),
        )


def prepare_generate(message: GenerateRequest, *, block_size: int, canonical: bool, seed: int) -> Request:
    """A generation request, its chunks in canonical order when `canonical`."""
    layout, index = message.layout, np.arange(len(message.layout))
    if canonical and layout.num_chunks > 1:
        order = layout.canonical_order()
        index, layout = layout.reorder_index(order), layout.with_chunk_order(order)
    # Without chunks there is nothing to share but the beginning; and a sliding window counts slots, so no holes.
    return Request(
        request_id=message.request_id,
        layout=layout,
        plan=plan_slots(layout, block_size, aligned=layout.num_chunks > 0),
        user_index=index,
        max_tokens=message.sampling.max_tokens or 1,
        seed=seed,
        sampling=message.sampling,
        eos_token_ids=frozenset(message.eos_token_ids),
    )


def prepare_score(message: ScoreRequest, *, block_size: int) -> Request:
    """A scoring request. Items keep their order, so that one's content cannot move another, and are packed."""
    return Request(
        request_id=message.request_id,
        layout=message.layout,
        plan=plan_slots(message.layout, block_size, aligned=False),
        user_index=np.arange(len(message.layout)),
        max_tokens=0,
        seed=0,
        score=message,
    )
