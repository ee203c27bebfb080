"""`EngineLimits`: the sizes of an engine, and the checks of every size of a request against them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from chunkattn.backends.recurrence import BLOCK
from chunkattn.cache.slots import num_slots
from chunkattn.config import EngineConfig
from chunkattn.engine.messages import GenerateRequest, Message, ScoreRequest, StepRates
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import PREFIX_ID, ChunkLayout, Names, Segment
from chunkattn.parsers.token_lists import TokenLists

ITEMS = Names("query", "items", "items", "item")
"""Names of the parts of `LLM.score`."""
_NO_STATE = "{} runs attention alone, and this model has recurrent layers; take another algorithm, or auto"
_ONE_CHUNK = """a question behind {} {}s that are not empty has no state in this model's recurrent layers, which allow 1; \
send 1, choose it by focus=1 (mode "only"), join them by chunk_mode="joined", or send a plain prompt"""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes and limits of an engine, sent once when it starts.

    Attributes:
        num_pages: pages of the KV pool.
        block_size: tokens per page.
        page_bytes: bytes of one page over all layers and KV heads, whatever device holds them.
        max_model_len: limit on the highest position id + 1.
        max_logprobs: limit on the log-probabilities per token.
        vocab_size: number of token ids.
        rates: cost model of the engine's steps, as known at the start.
        steps: sizes of the engine's steps.
        longest_table: page table entries that the attention backend supports.
        num_labels: classes of a sequence classifier, None for a language model.
        backends: attention backends that a request may name, each with the reason why it cannot serve this model, or None, and
            with its maximum number of rows of a step.
        batch_invariant: whether the bits of a result depend on its request alone.
        items_on_pages: whether every scored item begins on a page of its own.
        windowed: whether a layer has a sliding window. Every part of a prompt with chunks or items begins on a page then.
        recurrent: whether a layer is recurrent, with the same effect. No question can follow several chunks then, and requests
            name no backend.
        state_slots: states of recurrent layers that the engine holds, of running samples and kept ones; 0 without such layers.
        state_bytes: bytes of one of them over all layers and heads, whatever device holds them.
        most_samples: limit on running samples; None for `max_num_seqs`.
        config: options of the engine, which hold the other limits.
    """

    num_pages: int
    block_size: int
    page_bytes: int
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    rates: StepRates
    steps: StepSizes
    longest_table: int = 1 << 31
    num_labels: int | None = None
    backends: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    batch_invariant: bool = False
    items_on_pages: bool = False
    windowed: bool = False
    recurrent: bool = False
    state_slots: int = 0
    state_bytes: int = 0
    most_samples: int | None = None
    config: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.recurrent:
            refused = {name: (reason or _NO_STATE.format(name), rows) for name, (reason, rows) in self.backends.items()}
            object.__setattr__(self, "backends", refused)

    @property
    def kv_tokens(self) -> int:
        """Return the number of slots of the KV pool."""
        return self.num_pages * self.block_size

    @property
    def cut_size(self) -> int:
        """Return the tokens to whose multiples a shared beginning of a part may be cut, with the same bits behind it."""
        return math.lcm(self.block_size, BLOCK) if self.recurrent else self.block_size

    @property
    def max_request_tokens(self) -> int:
        """Return the maximum number of tokens of one request, bounded by the pool and by a page table."""
        return min(self.num_pages, self.max_table_pages) * self.block_size

    @property
    def max_table_pages(self) -> int:
        """Return the limit on page table entries. It may exceed `num_pages`: a repeated chunk repeats its pages."""
        return min(max(1 << (self.num_pages - 1).bit_length(), 32), self.longest_table)

    @cached_property
    def weighing(self) -> tuple[float, float] | None:
        """Return chunk temperature and scale of the engine's questions; None for an engine without both."""
        calibration = self.config.calibration
        return (calibration.chunk_temperature, calibration.chunk_scale) if calibration.weighs else None

    # Whole calls

    def check_count(self, count: int, what: str, param: str) -> None:
        """Check the number of items or documents of a call, before any of them is tokenized.

        Args:
            count: number of items or documents.
            what: description of them for the error.
            param: argument that the error names.

        Raises:
            RequestError: `count` exceeds `max_items_per_request`.
        """
        if count > (most := self.config.max_items_per_request):
            raise RequestError(f"{count} {what} exceed max_items_per_request {most}", param=param)

    def check_tokens(self, tokens: int, what: str, param: str) -> None:
        """Check the number of tokens that a call makes the engine compute.

        Args:
            tokens: number of tokens.
            what: description of the tokens for the error.
            param: argument that the error names.

        Raises:
            CapacityError: `tokens` exceeds `max_tokens_per_call`.
        """
        if tokens > (most := self.config.max_tokens_per_call):
            text = f"{what} are {tokens} tokens, max_tokens_per_call is {most}; split the call"
            raise CapacityError(text, param=param)

    def check_generates(self) -> None:
        """Check that the checkpoint is a language model.

        Raises:
            RequestError: the checkpoint is a sequence classifier.
        """
        if self.num_labels is not None:
            raise RequestError(
                "this checkpoint is a sequence classifier and cannot generate text; it can score", param="prompt"
            )

    # Parts that are not laid out yet

    def check_items(
        self, prefix: Sequence[int], items: Sequence[Sequence[int]], names: Names, *, gap: int = 0, chunks: bool = False
    ) -> None:
        """Check a prefix and items, each of which forms a sequence with the prefix alone.

        Args:
            prefix: token ids before every item.
            items: token ids of each item.
            names: the caller's names of prefix and items.
            gap: positions left free between prefix and item.
            chunks: whether the items are chunks, which begin on pages of their own.

        Raises:
            RequestError: a token id is outside the vocabulary.
            CapacityError: the prefix, or an item behind it, can never fit.
        """
        whole = "prefix" if chunks else names.prefix
        self.check_ids(prefix, names.prefix, whole, placed=False)  # the call may have put ids of its own before them
        if isinstance(items, TokenLists):
            checked: list[Any] = [items.flat]
            lens = items.lens
        else:
            checked, lens = [ids for ids in items if isinstance(ids, np.ndarray)], [*map(len, items)]
            listed = (ids for ids in items if not isinstance(ids, np.ndarray))
            checked.append(np.fromiter(chain.from_iterable(listed), np.int64))
        known = all(not len(ids) or (ids.min() >= 0 and ids.max() < self.vocab_size) for ids in checked)
        for number, ids in enumerate(() if known else items):
            self.check_ids(ids, names.chunks, names.of(number), placed=chunks)
        bounds = {"max_model_len": self.max_model_len, "the KV pool": self.max_request_tokens}
        limit = min(bounds, key=bounds.__getitem__)
        if len(prefix) > bounds[limit]:
            text = f" has {len(prefix)} tokens, {limit} allows {bounds[limit]}"
            raise CapacityError(text, param=names.prefix, part=whole)
        limit, room = self.room_behind(len(prefix), gap=gap, chunks=chunks)
        if max(lens, default=0) > max(room, 0):
            number = next(n for n, size in enumerate(lens) if size > max(room, 0))
            text = f" has {lens[number]} tokens, {limit} is {room}"
            if limit != "max_chunk_len":
                text = f" has {lens[number]} tokens, {limit} leaves room for {max(room, 0)} behind the {whole}"
            raise CapacityError(text, param=names.chunks, part=names.of(number))

    def room_behind(self, prefix: int, *, gap: int = 0, chunks: bool = False) -> tuple[str, int]:
        """Return the tightest limit on one item behind a prefix, and the tokens that it allows; below 0 without room.

        Args:
            prefix: tokens of the prefix.
            gap: see `check_items`.
            chunks: see `check_items`.
        """
        slots = prefix + -prefix % self.block_size if chunks else prefix
        rooms = {
            "max_chunk_len": self.config.max_chunk_len,
            "max_model_len": self.max_model_len - prefix - gap,
            "the KV pool": self.max_request_tokens - slots,
        }
        limit = min(rooms, key=rooms.__getitem__)
        return limit, rooms[limit]

    def check_ids(self, ids: Sequence[int] | np.ndarray, param: str, part: str | None = None, *, placed: bool = True) -> None:
        """Check token ids against the vocabulary.

        Args:
            ids: token ids.
            param: argument that holds the ids.
            part: name of the ids; None takes `param`.
            placed: whether the error tells the index of the id.

        Raises:
            RequestError: an id is outside the vocabulary; the error names the first.
        """
        if not len(ids):
            return
        low, high = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
        if low < 0 or high >= self.vocab_size:
            index = next(n for n, token in enumerate(ids) if not 0 <= token < self.vocab_size)
            place = f" at index {index}" if placed else ""
            text = f": token id {ids[index]}{place} is outside the vocabulary of {self.vocab_size}"
            raise RequestError(text, param=param, part=part or param)

    # Requests

    def check(self, message: Message, names: Names | None = None) -> None:
        """Check a request against every limit.

        Args:
            message: request with its chunks in the user's order.
            names: the caller's names of the request's parts; None for those of `generate` or `score`.

        Raises:
            RequestError: the request is malformed; the error names the part, its size and the limit.
            CapacityError: the request can never fit this engine.
        """
        names = names or (ITEMS if isinstance(message, ScoreRequest) else Names())
        self.check_layout(message.layout, names)
        self._check_state(message.layout, names)
        if isinstance(message, GenerateRequest):
            self._check_generate(message, names)
        elif isinstance(message, ScoreRequest):
            self._check_score(message)
            if message.backend is not None:
                self._check_backend(message, message.backend)
                return  # it needs no pages
        self._check_pages(message, names)

    def slot_options(self, message: Message) -> dict[str, Any]:
        """Return the arguments `aligned`, `packed_chunks` and `state_len` of `plan_slots` for a request.

        Parts begin on new pages, so that their pages can be shared. A plain prompt shares its beginning only and needs no
        alignment. Scored items share only the prefix, if `share_prefix`; they begin on pages where `items_on_pages` or
        `windowed` or `recurrent` is set. With `recurrent`, so does an item that is a question behind a prefix: it has the bits
        of an item of a pack then.
        """
        layout = message.layout
        chunked = layout.num_chunks > 0
        follows = chunked or (layout.prefix_len > 0 and layout.question_len > 0 and not message.shares)
        on_pages = message.is_pack and (self.items_on_pages or (self.windowed and chunked) or (self.recurrent and follows))
        return {
            "aligned": on_pages or (chunked and message.shares) or message.state_len > 0,
            "packed_chunks": message.is_pack and not on_pages,
            "state_len": message.state_len,
        }

    def pages(self, message: Message, end: int) -> tuple[int, int, int]:
        """Return what a request may take when the cache is empty.

        Args:
            message: request.
            end: slots of the prompt, including unused slots at the ends of pages.

        Returns:
            Limit on generated tokens per sample: the caller's limit, or as many as positions, pages and `most_tokens` allow;
            page table entries of one sample at its longest; pages of all samples at their longest.
        """
        layout, size = message.layout, self.block_size
        full, repeated, samples, longest = end // size, 0, 1, 0  # all samples share the full pages of the prompt
        # Log-probabilities need every prompt token computed, including the tokens of a repeated chunk.
        if not message.is_pack and not message.distinct:
            repeated = sum(-(-layout.chunk_lens[number] // size) for number in layout.repeats)
        if isinstance(message, GenerateRequest):
            samples = message.sampling.n
            most = ((self.num_pages - full + repeated) // samples + full) * size - end + 1
            room = self.max_model_len - layout.next_position
            longest = message.sampling.max_tokens or max(min(most, room, message.most_tokens or room), 1)
        entries = -(-(end + max(longest - 1, 0)) // size)  # the last generated token is never computed
        return longest, entries, full - repeated + samples * (entries - full)

    def max_tokens(self, message: GenerateRequest) -> int:
        """Return the number of tokens that a sample of a checked request may have.

        Args:
            message: request that has been checked.
        """
        return self.pages(message, num_slots(message.layout, self.block_size, **self.slot_options(message)))[0]

    def check_layout(self, layout: ChunkLayout, names: Names) -> None:
        """Check the token ids, the length and the positions of every part.

        Args:
            layout: layout with its chunks in the caller's order.
            names: the caller's names of the parts.

        Raises:
            RequestError: a token id is outside the vocabulary.
            CapacityError: a part is too long.
        """
        ids, longest = layout.token_ids, max(layout.chunk_lens, default=0)
        known = not len(ids) or (ids.min() >= 0 and ids.max() < self.vocab_size)
        if not known or longest > self.config.max_chunk_len or layout.max_position >= self.max_model_len:
            for segment in layout.segments:
                self._check_segment(layout, segment, names.part(layout, segment), names.param(segment))

    def _check_state(self, layout: ChunkLayout, names: Names) -> None:
        """Check that a question has one state to continue from. Chunks without a question, such as items, have the prefix's."""
        filled = sum(map(bool, layout.chunk_lens))
        if self.recurrent and layout.question_len and filled > 1:
            raise RequestError(_ONE_CHUNK.format(filled, names.chunk), param=names.chunks)

    def _check_segment(self, layout: ChunkLayout, segment: Segment, part: str, param: str) -> None:
        self.check_ids(layout.part(segment), param, part)
        tokens, longest = segment.end - segment.start, self.config.max_chunk_len
        if segment.chunk_id >= 0 and tokens > longest:
            raise CapacityError(f" has {tokens} tokens, max_chunk_len is {longest}", param=param, part=part)
        last = int(layout.positions[segment.start : segment.end].max(initial=-1))
        if last >= self.max_model_len:
            gap = self.config.calibration.chunk_position_gap if layout.num_chunks and segment.chunk_id != PREFIX_ID else 0
            raise CapacityError(
                f" of {tokens} tokens reaches position {last}{f' after a chunk_position_gap of {gap}' if gap else ''}, "
                f"max_model_len {self.max_model_len} allows {self.max_model_len - 1}",
                param=param,
                part=part,
            )

    def _check_generate(self, message: GenerateRequest, names: Names) -> None:
        self.check_generates()
        params, layout, config = message.sampling, message.layout, self.config
        if message.weighing not in (None, (1.0, 1.0)) and self.weighing is None:
            raise RequestError("this engine was built without chunk_temperature and chunk_scale", param="weighing")
        room = self.max_model_len - layout.next_position
        if room < (0 if message.prompt_only else params.max_tokens or 1):
            tokens = f"max_tokens {params.max_tokens}" if params.max_tokens else "one more token"
            raise CapacityError(
                f"the prompt reaches position {layout.next_position - 1}; {tokens} would exceed max_model_len "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens",
                param="max_tokens" if room > 0 else names.whole(layout),
            )
        for name in ("stop_token_ids", "logit_bias"):
            self.check_ids([*getattr(params, name)], name)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise RequestError(f"{name} {getattr(params, name)} exceeds max_logprobs {self.max_logprobs}", param=name)
        if params.n > config.max_num_seqs:
            raise CapacityError(f"n {params.n} exceeds max_num_seqs {config.max_num_seqs}", param="n")
        if self.most_samples is not None and params.n > self.most_samples:
            text = f"n {params.n} exceeds the {self.most_samples} samples that fit; raise state_cache_memory_bytes"
            raise CapacityError(text, param="n")

    def _check_score(self, message: ScoreRequest) -> None:
        if bool(message.label_token_ids) == (self.num_labels is not None or message.hidden):
            reason = "a language model needs label_token_ids, a sequence classifier takes none"
            raise RequestError(reason, param="label_token_ids")
        for ids in message.label_token_ids:
            self.check_ids(ids, "label_token_ids")
        if not message.hidden:
            self._check_row_labels(message)
        layout, state = message.layout, message.state_len
        if state and (not message.share_prefix or not 0 < state < layout.question_len):
            text = f"state_len {state} needs share_prefix and a question of more tokens, got {layout.question_len}"
            raise RequestError(text, param="state_len")
        shared = layout.question_start + state if state else layout.prefix_len
        first = int(np.min(message.rows, initial=len(layout)))
        if message.share_prefix and first < shared:
            text = f"row {first} lies in the {shared} tokens that other requests share: cached tokens have no logits"
            raise RequestError(text, param="rows")

    def _check_row_labels(self, message: ScoreRequest) -> None:
        lists, rows = len(message.label_token_ids), message.row_labels
        if not all(message.label_token_ids):
            raise RequestError("a list of label_token_ids is empty", param="label_token_ids")
        if rows is None:
            if lists > 1:
                text = f"{lists} lists of label_token_ids need row_labels, which tell the list of each row"
                raise RequestError(text, param="label_token_ids")
        elif len(rows) != len(message.rows) or rows.min(initial=0) < 0 or rows.max(initial=-1) >= lists:
            text = f"row_labels must name one of the {lists} lists of label_token_ids for each of the {len(message.rows)} rows"
            raise RequestError(text, param="label_token_ids")

    def _check_backend(self, message: ScoreRequest, name: str) -> None:
        reason, limit = self.backends.get(name, (f"a request cannot name the attention backend {name!r}", 0))
        if reason:
            raise RequestError(reason, param="algorithm")
        if len(message.layout) > limit:
            text = f"{name}: a pack of {len(message.layout)} tokens exceeds the limit of {limit} rows in a step"
            raise CapacityError(text, param="items")

    def _check_pages(self, message: Message, names: Names) -> None:
        layout = message.layout
        longest, entries, pages = self.pages(message, num_slots(layout, self.block_size, **self.slot_options(message)))
        generates = isinstance(message, GenerateRequest)
        if isinstance(message, GenerateRequest) and message.sampling.min_tokens > longest:
            text = f"min_tokens {message.sampling.min_tokens} exceeds the {longest} that fit"
            raise RequestError(text, param="min_tokens")
        if entries > self.max_table_pages:
            raise CapacityError(
                f"the prompt of {len(layout)} tokens, repeated chunks included, fills {entries} entries of a "
                f"page table, which has {self.max_table_pages}; send less or raise kv_cache_memory_bytes",
                param=names.whole(layout),
            )
        if pages > self.num_pages:
            raise CapacityError(
                f"the prompt of {len(layout)} tokens{' with its n and max_tokens' if generates else ''} needs {pages} KV "
                f"pages of {self.block_size} tokens, the pool has {self.num_pages}; send less or raise "
                "kv_cache_memory_bytes",
                param="max_tokens" if generates else names.whole(layout),
            )
