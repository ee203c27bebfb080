"""`Request` and `Sample`: a request inside the engine, and the samples that compute it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher

from chunkattn.adapter_salt import split
from chunkattn.cache.slots import plan_slots
from chunkattn.cache.trie import Block
from chunkattn.engine.grammars import TextMatcher
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import GenerateRequest, Message, PrecomputeRequest, ScoreRequest
from chunkattn.engine.states import KeptState, Track
from chunkattn.layout import PREFIX_ID, QUESTION_ID, Segment
from chunkattn.sampling_params import SamplingParams


class Request:
    """Request that the engine has accepted, with its tokens in the order in which the engine computes them.

    Args:
        message: checked message with its chunks in the user's order.
        limits: limits of the engine.
        arrival: number of the request in order of arrival; seeds its random numbers if it has no seed. 0 for a request that
            does not run.
        adapter: digest of the request's adapter; None for the base model.

    Attributes:
        request_id: id, unique among the engine's requests.
        layout: layout of the prompt, chunks in canonical order if the position strategy allows it.
        plan: slots of the layout.
        user_index: int64 `[T]`, for every token its token index in the user's order.
        chunk_order: for every chunk its number in the user's order.
        arrival: number in the order of arrival.
        priority: rank in the queue; lower goes first.
        max_tokens: limit on generated tokens per sample; 0 for scoring and precomputing.
        pages_per_sample: page table entries of one sample at its longest.
        total_pages: pages of all samples at their longest, when the cache is empty.
        shares: whether the request reads and feeds the cache.
        salt_key: only requests of equal keys share blocks. The key of a request with an adapter begins with its digest.
        adapter: digest of the adapter; None for the base model.
        seed: 64-bit seed of the request's random numbers.
        sampling: parameters of a generation request, else None.
        score: message of a scoring request, else None.
        precompute: message of a precompute request, else None.
        eos_token_ids: tokens of the model that end the text; a checkpoint may name others.
        weighing: chunk temperature and scale of the question's attention; None leaves it as it is.
        distinct: whether every prompt token must be computed, even in repeated chunks, for its log-probability.
        logprobs_from: token index from which prompt log-probabilities are read; None reads none.
        ranked: whether ranks and likeliest tokens are read with prompt log-probabilities.
        prompt_only: see `GenerateRequest`.
        computed: bool `[T]`, True for prompt tokens computed for this request; other tokens came from the cache or from a
            concurrent request.
        samples: samples of the request; one until the prompt is computed. Never empty before the request ends.
        spares: blocks held for the partial pages of samples still to be created.
        sources: kept states that the request's parts begin from, held while it runs or is pinned.
        kept_states: ids of the chunks whose states the cache holds, -1 for the prefix, once known of a precompute request; None
            before, and without recurrent layers.
        spare_tracks: tracks of samples still to be created, in a model with recurrent layers.
        heirs: places of the parts that begin at the end of a block, by the block, in such a model.
        grammar: grammar of the generated text, once it is compiled; None for a free text.
        root: private root of the trie, or None if the request shares the cache.
        finite_end: token index of the first token whose values are not finite; the request has failed there.
        added_at: arrival in seconds on the clock of `time.perf_counter`.
        admitted_at: time of the first admission on that clock; None before.
        first_token_at: time of the first token on that clock; None before.
        preemptions: number of times that the request was preempted.
        known_stats: number of compilations and of preemptions that the last `RequestStats` knew of.
        values: values read so far, by row; None once the output with all of them has been made.
    """

    def __init__(self, message: Message, limits: EngineLimits, *, arrival: int, adapter: str | None = None) -> None:
        layout, config = message.layout, limits.config
        self.request_id, self.salt_key = message.request_id, message.salt_key
        self.adapter = adapter
        if adapter is not None:
            self.salt_key = f"{adapter}:{split(message.salt_key)[1] or ''}"
        self.arrival, self.priority = arrival, message.priority
        self.user_index, self.chunk_order = np.arange(len(layout)), [*range(layout.num_chunks)]
        # Scored items keep their order, so that the content of one item cannot move another.
        if layout.chunks_share_positions and layout.num_chunks > 1 and not message.is_pack:
            self.chunk_order = layout.canonical_order()
            self.user_index, layout = layout.reorder_index(self.chunk_order), layout.with_chunk_order(self.chunk_order)
        options = limits.slot_options(message)
        self.layout, self.plan = layout, plan_slots(layout, limits.block_size, **options, apart=not message.shares)
        self.max_tokens, self.pages_per_sample, self.total_pages = limits.pages(message, self.plan.end)
        self.shares = config.enable_prefix_caching and message.shares and not message.distinct
        self.distinct = message.distinct
        sees_chunks = layout.question_len and any(layout.chunk_lens) and not message.is_pack
        self.weighing = limits.weighing if sees_chunks else None
        self.score = message if isinstance(message, ScoreRequest) else None
        self.precompute = message if isinstance(message, PrecomputeRequest) else None
        self.sampling: SamplingParams | None = None
        self.eos_token_ids: frozenset[int] = frozenset()
        self.logprobs_from: int | None = None
        self.seed, self.ranked, self.prompt_only = 0, True, False
        if isinstance(message, GenerateRequest):
            self._generate(message, message.sampling, config.seed)
            self.eos_token_ids = frozenset(token for token in message.eos_token_ids if 0 <= token < limits.vocab_size)
        self.computed = np.zeros(len(layout), bool)
        self.values: dict[int, Any] | None = {}
        self._keys: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.samples, self.spares = [Sample(self, 0)], list[Block]()
        self.sources, self.spare_tracks = list[KeptState](), list[Track]()
        self.heirs: dict[Block, list[int]] = {}
        self.kept_states: set[int] | None = None
        self.grammar: LLMatcher | None = None
        self.root: Block | None = None
        self.finite_end, self.preemptions, self.known_stats = sys.maxsize, 0, (0, 0)
        self.added_at = 0.0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None

    def _generate(self, message: GenerateRequest, params: SamplingParams, engine_seed: int) -> None:
        """Take what only a generation request has."""
        seed = params.seed
        if seed is None and self.arrival:
            seed = int(np.random.SeedSequence([engine_seed, self.arrival]).generate_state(1, np.uint64)[0])
        self.seed, self.sampling = (seed or 0) % 2**64, params
        self.shares &= not params.skip_reading_prefix_cache
        self.weighing = self.weighing and (message.weighing or self.weighing)
        self.logprobs_from = None if params.prompt_logprobs is None else message.logprobs_from or 0
        self.ranked = message.logprobs_from is None or bool(params.prompt_logprobs)
        self.prompt_only = message.prompt_only

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key of the queue, priority then arrival; the lowest goes first."""
        return (self.priority, self.arrival)

    @property
    def backend(self) -> str | None:
        """Return the attention backend that the request names, which uses no pages; None for the engine's."""
        return self.score.backend if self.score else None

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """Return the prompt's distinct token ids, int32, ascending."""
        return np.unique(self.layout.token_ids)

    @cached_property
    def next_position(self) -> int:
        """Return the position id of the first generated token."""
        return self.layout.next_position

    @cached_property
    def page_positions(self) -> np.ndarray:
        """Return the position id of the first slot of every page of an aligned prompt, int32; a page begins with a token."""
        first = np.arange(len(self.plan.page_len)) * self.plan.block_size
        return self.layout.positions[np.searchsorted(self.plan.slots, first)]

    @property
    def num_samples(self) -> int:
        """Return the number of samples of this request."""
        return self.sampling.n if self.sampling else 1

    @cached_property
    def logprob_rows(self) -> np.ndarray:
        """Return the ascending token indices that predict a prompt token whose log-probability is read."""
        if self.logprobs_from is None:
            return np.zeros(0, np.int64)
        rows = self.layout.known_rows
        return rows[rows >= self.logprobs_from - 1]

    @cached_property
    def repeats(self) -> frozenset[int]:
        """Return the places in `segments` of chunks that share the blocks of an earlier chunk."""
        repeated = frozenset() if self.distinct else self.layout.repeats
        return frozenset(place for place, (kind, _, _) in enumerate(self.segments) if kind in repeated)

    @cached_property
    def segments(self) -> list[Segment]:
        """Return the segments of the prompt that begin on a new page, in order. None is empty."""
        whole_pages = self.layout.prefix_len % self.plan.block_size == 0
        has_prefix = self.plan.aligned or (self.score and self.score.share_prefix and whole_pages)
        if not has_prefix:
            return [Segment(PREFIX_ID if self.precompute else QUESTION_ID, 0, len(self.layout))]
        prefix, *others = self.layout.segments
        if self.score and (state := self.score.state_len):
            kind, start, end = others.pop()
            others += [Segment(kind, start, start + state), Segment(kind, start + state, end)]
        elif self.score:  # no other request shares the items
            if self.plan.packed_chunks:
                others = [Segment(QUESTION_ID, self.layout.prefix_len, len(self.layout))]
            others = [Segment(QUESTION_ID, start, end) for _, start, end in others]
        return [s for s in (prefix, *others) if s.end > s.start]

    def is_state(self, number: int) -> bool:
        """Return whether a part is a question's beginning that other requests share (see `ScoreRequest.state_len`).

        Args:
            number: place of the part in `segments`.
        """
        return self.score is not None and self.score.state_len > 0 and number == len(self.segments) - 2

    @cached_property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end a text of `min_tokens` tokens."""
        if self.sampling is None:
            return frozenset()
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if self.sampling.ignore_eos else self.eos_token_ids)

    def key_of(self, sample: Sample, start: int, width: int) -> tuple[int, bytes]:
        """Return position and tokens of a block, cached for prompt blocks because admission may ask repeatedly.

        Args:
            sample: sample of the block.
            start: token index of the block's first token.
            width: number of tokens in the block.
        """
        if start + width > len(self.layout):
            later = start - len(self.layout)
            position = self.next_position + later if later >= 0 else int(self.layout.positions[start])
            return position, sample.tokens(start, start + width).tobytes()
        if (start, width) not in self._keys:
            key = int(self.layout.positions[start]), self.layout.token_ids[start : start + width].tobytes()
            self._keys[start, width] = key
        return self._keys[start, width]

    @property
    def forks(self) -> bool:
        """Return whether the other samples are still to be forked from the first."""
        return self.num_samples > 1 and len(self.samples) == 1 and not self.samples[0].output_ids and not self.samples[0].number


@dataclass(eq=False)
class Part:
    """Blocks of one part of a sample's prompt; the last part continues into the generated tokens.

    Attributes:
        start: token index of the first token.
        first: index of the first block in the sample's page table.
        parents: blocks that the first block's K/V depends on.
        blocks: blocks of the part, in order.
        cursor: number of blocks known to be complete from the start.
    """

    start: int
    first: int
    parents: tuple[Block | None, ...]
    blocks: list[Block] = field(default_factory=list)
    cursor: int = 0

    @property
    def complete(self) -> bool:
        """Return whether all blocks are complete, after advancing the cursor."""
        while self.cursor < len(self.blocks) and self.blocks[self.cursor].complete:
            self.cursor += 1
        return self.cursor == len(self.blocks)


def held_by(parts: list[Part]) -> list[Block]:
    """Return the blocks of parts, children before their parents."""
    return [block for part in reversed(parts) for block in reversed(part.blocks)]


@dataclass(eq=False)
class Sample:
    """Sample of a request: its output so far and, while it runs, its blocks. A request that generates no text has one sample.

    Token `i` of a sample is the layout's token for `i < len(layout)`, and a generated token after that.

    Attributes:
        request: request of the sample.
        number: number of the sample in the request.
        output_ids: generated tokens.
        parts: parts of the prompt with their blocks; empty while the sample waits.
        current: number of parts known to be complete from the start.
        pages: int32 page table; the first `num_pages` entries are in use.
        num_pages: number of page table entries in use.
        root: root of the trie, held by the sample.
        last_token_at: time of the last token in seconds on the clock of `time.perf_counter`.
        track: place in a model with recurrent layers, while the sample runs; None otherwise.
        matcher: state of the text in the request's grammar; None before the first token is drawn, and without a grammar.
    """

    request: Request
    number: int
    output_ids: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    current: int = 0
    pages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    num_pages: int = 0
    root: Block | None = None
    last_token_at: float = 0.0
    track: Track | None = None
    matcher: TextMatcher | None = None

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of a generation request."""
        assert self.request.sampling is not None
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens known so far: prompt and generated."""
        return len(self.request.layout) + len(self.output_ids)

    @property
    def held(self) -> list[Block]:
        """Return every block that the sample holds, children before their parents."""
        blocks = held_by(self.parts)
        return [*blocks, self.root] if self.root else blocks

    @property
    def num_computed(self) -> int:
        """Return the number of tokens from the start whose K/V, and whose states, are computed."""
        if self.track is not None:
            return self.track.done
        while self.current < len(self.parts) - 1 and self.parts[self.current].complete:
            self.current += 1
        if not self.parts:
            return 0
        part = self.parts[self.current]
        if part.complete:
            return part.start + sum(b.size for b in part.blocks[-1:]) + (len(part.blocks) - 1) * self.request.plan.block_size
        return part.start + part.cursor * self.request.plan.block_size + part.blocks[part.cursor].filled

    @property
    def num_planned(self) -> int:
        """Return `num_computed` once the steps planned so far are done."""
        if self.track is not None:
            return self.track.planned
        end = self.num_computed
        for part in self.parts[self.current :]:
            for index in range(part.cursor, len(part.blocks)):
                block = part.blocks[index]
                if block.planned < block.size:
                    return part.start + index * self.request.plan.block_size + block.planned
            if part.blocks:
                end = part.start + (len(part.blocks) - 1) * self.request.plan.block_size + part.blocks[-1].size
        return end

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Return the token ids of tokens `start ... end - 1`, int32 `[end - start]`."""
        prompt = self.request.layout.token_ids
        if end <= len(prompt):
            return prompt[start:end]
        generated = self.output_ids[max(start - len(prompt), 0) : end - len(prompt)]
        return np.concatenate([prompt[start:end], np.asarray(generated, np.int32)])

    def rows(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return position ids, slots and first visible slots of tokens `start ... end - 1`, int32 `[end - start]` each."""
        layout, plan, prompt = self.request.layout, self.request.plan, len(self.request.layout)
        if end <= prompt:
            return layout.positions[start:end], plan.slots[start:end], plan.row_start[start:end]
        later = np.arange(max(start - prompt, 0), end - prompt, dtype=np.int32)
        return (
            np.concatenate([layout.positions[start:end], layout.next_position + later]),
            np.concatenate([plan.slots[start:end], plan.end + later]),
            np.concatenate([plan.row_start[start:end], np.zeros_like(later)]),
        )
