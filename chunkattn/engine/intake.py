"""From messages to requests: every limit checked, chunks put in the engine's order."""

from __future__ import annotations

import numpy as np

from chunkattn.cache.slots import plan_slots
from chunkattn.config import EngineConfig, SamplingParams
from chunkattn.engine.messages import EngineLimits, GenerateRequest, Message, PrecomputeRequest, ScoreRequest
from chunkattn.engine.request import Request
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import ChunkLayout


class Intake:
    """Makes requests of messages. Depends on configuration and limits alone, so callers have one of their own."""

    def __init__(self, config: EngineConfig, limits: EngineLimits) -> None:
        self.config, self.limits = config, limits

    def check(self, message: Message) -> None:
        """Check a message against every limit.

        Raises:
            RequestError: malformed; the error names the part, its size and the limit.
            CapacityError: it can never fit this engine.
        """
        self.prepare(message, arrival=0)

    def check_generates(self) -> None:
        """Check that the checkpoint is a language model.

        Raises:
            RequestError: it is a sequence classifier.
        """
        if self.limits.num_labels is not None:
            raise RequestError(
                "this checkpoint is a sequence classifier and cannot generate text; it can score", param="prompt"
            )

    def prepare(self, message: Message, *, arrival: int) -> Request:
        """The request of a message.

        Args:
            message: its chunks in the user's order.
            arrival: its place among all requests, which seeds its random numbers if it has no seed; 0 if it is not to run.

        Raises:
            RequestError: as `check`.
        """
        layout = message.layout
        self._check_layout(layout)
        if isinstance(message, ScoreRequest):
            request = self._score(message, arrival)
        elif isinstance(message, PrecomputeRequest):
            request = self._request(message, arrival, cache_salt=message.cache_salt, precompute=message)
        else:
            request = self._generate(message, arrival)
        if isinstance(message, ScoreRequest) and message.algorithm == "packed_dense":
            self._check_dense(message)
            return request  # it takes no pages
        if request.pages_per_sample > self.limits.max_table_pages:
            raise CapacityError(
                f"the prompt of {len(layout)} tokens, repeated chunks and all, fills {request.pages_per_sample} entries of a "
                f"page table, which has {self.limits.max_table_pages}; send less or raise kv_cache_memory_bytes",
                param="prompt",
            )
        if request.total_pages > self.limits.num_pages:
            what = " with its n and max_tokens" if request.sampling else ""
            raise CapacityError(
                f"the prompt of {len(layout)} tokens{what} needs {request.total_pages} KV pages of {self.limits.block_size} "
                f"tokens, the pool has {self.limits.num_pages}; send less or raise kv_cache_memory_bytes",
                param="items" if request.score else "max_tokens" if request.sampling else "prompt",
            )
        return request

    def _request(self, message: Message, arrival: int, **fields: object) -> Request:
        """A request whose chunks, when it has more than one, are in canonical order if positions allow."""
        layout, index, order = message.layout, np.arange(len(message.layout)), [*range(message.layout.num_chunks)]
        # Items of a scoring request stay where they are, so that one's content cannot move another.
        if self.config.position_strategy == "shared" and layout.num_chunks > 1 and not isinstance(message, ScoreRequest):
            order = layout.canonical_order()
            index, layout = layout.reorder_index(order), layout.with_chunk_order(order)
        # Without chunks there is nothing to share but the beginning; and a sliding window counts slots, so no holes.
        aligned = layout.num_chunks > 0 and (not isinstance(message, ScoreRequest) or message.share_prefix)
        defaults: dict = {"max_tokens": 0, "seed": 0, "shares": self.config.enable_prefix_caching}
        return Request(
            message.request_id,
            layout,
            plan_slots(layout, self.limits.block_size, aligned=aligned, packed_chunks=isinstance(message, ScoreRequest)),
            index,
            order,
            arrival,
            message.priority,
            **(defaults | fields),
        )

    def _score(self, message: ScoreRequest, arrival: int) -> Request:
        if bool(message.label_token_ids) == (self.limits.num_labels is not None):
            reason = "a language model needs label_token_ids, a sequence classifier takes none"
            raise RequestError(reason, param="label_token_ids")
        self._check_ids("label_token_ids", np.asarray(message.label_token_ids))
        first, prefix = int(min(message.rows, default=len(message.layout))), message.layout.prefix_len
        if message.share_prefix and first < prefix:
            raise RequestError(
                f"row {first} lies in the shared prefix of {prefix} tokens: cached tokens have no logits", param="rows"
            )
        shares = message.share_prefix and self.config.enable_prefix_caching
        return self._request(message, arrival, shares=shares, cache_salt=message.cache_salt, score=message)

    def _check_dense(self, message: ScoreRequest) -> None:
        if self.limits.dense_refusal:
            raise RequestError(self.limits.dense_refusal, param="algorithm")
        tokens, limit = len(message.layout), self.config.max_multi_item_seq_len
        if tokens > limit:
            raise CapacityError(
                f"a pack of {tokens} tokens under a dense mask exceeds max_multi_item_seq_len {limit}", param="items"
            )

    def _generate(self, message: GenerateRequest, arrival: int) -> Request:
        self.check_generates()
        params = message.sampling
        self._check_sampling(params, message.layout)
        seed = params.seed
        if seed is None and arrival:
            seed = int(np.random.SeedSequence([self.config.seed, arrival]).generate_state(1, np.uint64)[0])
        request = self._request(
            message,
            arrival,
            max_tokens=params.max_tokens or 1,
            seed=seed or 0,
            # Every prompt token has to be computed for its log-probability.
            shares=self.config.enable_prefix_caching
            and not params.skip_reading_prefix_cache
            and params.prompt_logprobs is None,
            cache_salt=message.cache_salt,
            sampling=params,
            eos_token_ids=frozenset(message.eos_token_ids),
        )
        request.max_tokens = params.max_tokens or self._most_tokens(request)
        if params.min_tokens > request.max_tokens:
            raise RequestError(f"min_tokens {params.min_tokens} exceeds the {request.max_tokens} that fit", param="min_tokens")
        return request

    def _most_tokens(self, request: Request) -> int:
        """What `max_tokens=None` resolves to: as many as positions and pages allow."""
        room = self.limits.num_pages - request.shared_pages + request.repeated_pages
        pages = room // request.samples + request.shared_pages
        slots = pages * self.limits.block_size - request.plan.end + 1  # the last token is never computed
        return max(min(slots, self.limits.max_model_len - request.layout.next_position), 1)

    def _check_layout(self, layout: ChunkLayout) -> None:
        for segment in layout.segments:
            if segment.start == segment.end:
                continue
            name = "prompt" if layout.is_plain else segment.name
            self._check_ids(name, layout.part(segment), param="prompt")
            if segment.chunk_id >= 0 and segment.end - segment.start > self.config.max_chunk_len:
                raise RequestError(
                    f" has {segment.end - segment.start} tokens, max_chunk_len is {self.config.max_chunk_len}",
                    param="prompt",
                    part=name,
                )
            last = int(layout.positions[segment.start : segment.end].max())
            if last >= self.limits.max_model_len:
                raise CapacityError(
                    f" of {segment.end - segment.start} tokens reaches position {last}, max_model_len "
                    f"{self.limits.max_model_len} allows {self.limits.max_model_len - 1}",
                    param="prompt",
                    part=name,
                )
        if layout.num_chunks and (window := self.limits.sliding_window) is not None:
            raise RequestError(
                f"this checkpoint attends within a sliding window of {window} tokens, which has no meaning across "
                "chunks that share positions; only plain prompts can be served",
                param="prompt",
            )

    def _check_ids(self, name: str, ids: np.ndarray, param: str | None = None) -> None:
        vocab = self.limits.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            bad = np.flatnonzero((ids < 0) | (ids >= vocab))
            text = f": token id {ids[bad[0]]} at index {bad[0]} is outside the vocabulary of {vocab}"
            raise RequestError(text, param=param or name, part=name)

    def _check_sampling(self, params: SamplingParams, layout: ChunkLayout) -> None:
        room = self.limits.max_model_len - layout.next_position
        if room < (params.max_tokens or 1):
            wanted = f"max_tokens {params.max_tokens}" if params.max_tokens else "even one token more"
            raise CapacityError(
                f"the prompt reaches position {layout.next_position - 1}; {wanted} would exceed max_model_len "
                f"{self.limits.max_model_len}; shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        for name in ("stop_token_ids", "logit_bias"):
            if given := [*getattr(params, name)]:
                self._check_ids(name, np.asarray(given, np.int64))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.limits.max_logprobs:
                raise RequestError(
                    f"{name} {getattr(params, name)} exceeds max_logprobs {self.limits.max_logprobs}", param=name
                )
        if params.n > self.config.max_num_seqs:
            raise CapacityError(f"n {params.n} exceeds max_num_seqs {self.config.max_num_seqs}", param="n")
