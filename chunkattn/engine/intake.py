"""`Intake`: checks messages against every limit, and turns them into requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from chunkattn.cache.slots import plan_slots
from chunkattn.config import EngineConfig
from chunkattn.engine.footprint import Footprint, footprint_of, slot_options
from chunkattn.engine.messages import EngineLimits, GenerateRequest, Message, PrecomputeRequest, ScoreRequest
from chunkattn.engine.request import Request
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import PREFIX_ID, ChunkLayout


class Intake:
    """Checker of messages. It depends on configuration and limits only, so each caller can have its own instance."""

    def __init__(self, config: EngineConfig, limits: EngineLimits) -> None:
        self.config, self.limits = config, limits
        calibration = config.calibration
        self.weighs, self.weighing = calibration.weighs, (calibration.chunk_temperature, calibration.chunk_scale)

    def check(self, message: Message) -> None:
        """Check a message against every limit.

        Raises:
            RequestError: the message is malformed; the error names the part, its size and the limit.
            CapacityError: the message can never fit this engine.
        """
        self._check_layout(message.layout)
        if isinstance(message, GenerateRequest):
            self._check_generate(message)
        elif isinstance(message, ScoreRequest):
            self._check_score(message)
            if message.backend is not None:
                self._check_backend(message, message.backend)
                return  # it needs no pages
        self._check_pages(message)

    def check_generates(self) -> None:
        """Check that the checkpoint is a language model.

        Raises:
            RequestError: the checkpoint is a sequence classifier.
        """
        if self.limits.num_labels is not None:
            raise RequestError(
                "this checkpoint is a sequence classifier and cannot generate text; it can score", param="prompt"
            )

    def prepare(self, message: Message, *, arrival: int) -> Request:
        """Return the request for a message that has been checked.

        Args:
            message: message with its chunks in the user's order.
            arrival: number of the request in order of arrival; seeds its random numbers if it has no seed. 0 for a request that
                does not run.
        """
        layout, index, order = message.layout, np.arange(len(message.layout)), [*range(message.layout.num_chunks)]
        scores = isinstance(message, ScoreRequest)
        # Under a window every item is a plain prompt, and stays one.
        apart = isinstance(message, ScoreRequest) and not message.share_prefix and self.limits.sliding_window is None
        # Scored items keep their order, so that the content of one item cannot move another.
        if layout.chunks_share_positions and layout.num_chunks > 1 and not scores:
            order = layout.canonical_order()
            index, layout = layout.reorder_index(order), layout.with_chunk_order(order)
        footprint = footprint_of(message, self.limits)
        plan = plan_slots(layout, self.limits.block_size, **slot_options(message, self.limits), apart=apart)
        return Request(
            message.request_id,
            layout,
            footprint,
            plan,
            index,
            order,
            arrival,
            message.priority,
            **self._options(message, footprint, arrival),
        )

    def _options(self, message: Message, footprint: Footprint, arrival: int) -> dict[str, Any]:
        """Return the arguments of `Request` that depend on the kind of message."""
        caches = self.config.enable_prefix_caching
        common = {"cache_salt": message.cache_salt, "max_tokens": 0, "seed": 0}
        if isinstance(message, PrecomputeRequest):
            return common | {"shares": caches, "precompute": message}
        if isinstance(message, ScoreRequest):
            return common | {"shares": caches and message.share_prefix, "score": message}
        params, seed = message.sampling, message.sampling.seed
        if seed is None and arrival:
            seed = int(np.random.SeedSequence([self.config.seed, arrival]).generate_state(1, np.uint64)[0])
        weighing = message.weighing or self.weighing
        reads = params.prompt_logprobs is not None
        return common | {
            "max_tokens": self._max_tokens(message, footprint),
            "seed": seed or 0,
            "shares": caches and not params.skip_reading_prefix_cache and not message.distinct,
            "weighing": weighing if self.weighs and any(message.layout.chunk_lens) else None,
            "distinct": message.distinct,
            "logprobs_from": (message.logprobs_from or 0) if reads else None,
            "sampling": params,
            "eos_token_ids": frozenset(message.eos_token_ids),
        }

    def max_tokens(self, message: GenerateRequest) -> int:
        """Return the number of tokens that a sample of a checked request may have.

        Args:
            message: request that has been checked.
        """
        return self._max_tokens(message, footprint_of(message, self.limits))

    def _max_tokens(self, message: GenerateRequest, footprint: Footprint) -> int:
        """Return the limit on generated tokens: the caller's limit, or as many as positions and pages allow."""
        room = self.limits.max_model_len - message.layout.next_position
        return message.sampling.max_tokens or max(min(footprint.most_tokens(self.limits.num_pages), room), 1)

    def _check_pages(self, message: Message) -> None:
        limits, tokens = self.limits, len(message.layout)
        footprint = footprint_of(message, limits)
        longest = self._max_tokens(message, footprint) if isinstance(message, GenerateRequest) else 0
        if isinstance(message, GenerateRequest) and message.sampling.min_tokens > longest:
            text = f"min_tokens {message.sampling.min_tokens} exceeds the {longest} that fit"
            raise RequestError(text, param="min_tokens")
        if (entries := footprint.pages_per_sample(longest)) > limits.max_table_pages:
            raise CapacityError(
                f"the prompt of {tokens} tokens, repeated chunks included, fills {entries} entries of a "
                f"page table, which has {limits.max_table_pages}; send less or raise kv_cache_memory_bytes",
                param="prompt",
            )
        if (pages := footprint.total_pages(longest)) > limits.num_pages:
            kind, param = "", "prompt"
            if isinstance(message, GenerateRequest):
                kind, param = " with its n and max_tokens", "max_tokens"
            raise CapacityError(
                f"the prompt of {tokens} tokens{kind} needs {pages} KV pages of {limits.block_size} "
                f"tokens, the pool has {limits.num_pages}; send less or raise kv_cache_memory_bytes",
                param="items" if isinstance(message, ScoreRequest) else param,
            )

    def _check_score(self, message: ScoreRequest) -> None:
        if bool(message.label_token_ids) == (self.limits.num_labels is not None):
            reason = "a language model needs label_token_ids, a sequence classifier takes none"
            raise RequestError(reason, param="label_token_ids")
        self._check_ids("label_token_ids", np.asarray(message.label_token_ids))
        first, prefix = int(min(message.rows, default=len(message.layout))), message.layout.prefix_len
        if message.share_prefix and first < prefix:
            raise RequestError(
                f"row {first} lies in the shared prefix of {prefix} tokens: cached tokens have no logits", param="rows"
            )

    def _check_backend(self, message: ScoreRequest, name: str) -> None:
        if reason := self.limits.backends.get(name, f"a request cannot name the attention backend {name!r}"):
            raise RequestError(reason, param="algorithm")
        tokens, limit = len(message.layout), self.config.max_multi_item_seq_len
        if tokens > limit:
            raise CapacityError(f"{name}: a pack of {tokens} tokens exceeds max_multi_item_seq_len {limit}", param="items")

    def _check_layout(self, layout: ChunkLayout) -> None:
        for segment in layout.segments:
            if segment.start == segment.end:
                continue
            name = "prompt" if layout.is_plain else segment.name
            self._check_ids(name, layout.part(segment), param="prompt")
            if segment.chunk_id >= 0 and segment.end - segment.start > self.config.max_chunk_len:
                raise CapacityError(
                    f" has {segment.end - segment.start} tokens, max_chunk_len is {self.config.max_chunk_len}",
                    param="prompt",
                    part=name,
                )
            last = int(layout.positions[segment.start : segment.end].max())
            if last >= self.limits.max_model_len:
                gap = self.config.chunk_position_gap if layout.num_chunks and segment.chunk_id != PREFIX_ID else 0
                raise CapacityError(
                    f" of {segment.end - segment.start} tokens reaches position {last}"
                    f"{f' after a chunk_position_gap of {gap}' if gap else ''}, max_model_len "
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

    def _check_generate(self, message: GenerateRequest) -> None:
        self.check_generates()
        params, layout = message.sampling, message.layout
        if message.weighing not in (None, (1.0, 1.0)) and not self.weighs:
            raise RequestError("this engine was built without chunk_temperature and chunk_scale", param="weighing")
        room = self.limits.max_model_len - layout.next_position
        if room < (0 if message.prompt_only else params.max_tokens or 1):
            wanted = f"max_tokens {params.max_tokens}" if params.max_tokens else "one more token"
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
