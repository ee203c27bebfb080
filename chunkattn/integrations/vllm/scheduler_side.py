"""Scheduler's side of the connector: decides what is loaded, saved, evicted and refused."""

from __future__ import annotations

import hmac
import json
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from chunkattn.integrations.vllm.metrics import ConnectorStats
from chunkattn.integrations.vllm.options import ConnectorOptions
from chunkattn.integrations.vllm.requests import PARAMS_KEY, adapter_key
from chunkattn.integrations.vllm.step import Load, Save, StepWork
from chunkattn.integrations.vllm.store_index import StoreIndex
from chunkattn.integrations.vllm.transfers import RequestRefused, StoredSegment, Transfer, parse_transfer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


class SchedulerSide:
    """State of all requests with a transfer, and the index of the store.

    vLLM calls these methods in the engine core. An exception there ends the engine for all clients, so a bad request is marked
    as refused instead. A refused request claims an asynchronous load, so vLLM neither computes it nor keeps its blocks in the
    prefix cache. The workers report this load as failed, and vLLM ends the request with finish reason "error".

    Args:
        options: options of the connector.
        block_size: tokens per block.
        bytes_per_token: K/V bytes of one token over all layers and ranks.
        get_block_ids: function from a request id to its blocks.
    """

    def __init__(
        self, options: ConnectorOptions, block_size: int, bytes_per_token: int, get_block_ids: Callable[[str], list[int]]
    ) -> None:
        self.index = StoreIndex(options.max_store_bytes)
        self.stats = ConnectorStats()
        self._gap = options.chunk_position_gap
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token
        self._get_block_ids = get_block_ids
        self._secret = secrets.token_bytes(32)
        self._transfers: dict[str, Transfer] = {}
        self._refused: set[str] = set()
        self._unsaved: dict[str, Transfer] = {}
        self._producers: Counter[str] = Counter()
        self._next = StepWork()

    def add(self, request: Request) -> None:
        """Read a new request's parameters, and give it the block hashes of its K/V."""
        try:
            transfer = self._parse(request)
        except RequestRefused as refusal:
            self._refuse(request, refusal)
            return
        if transfer is None:
            return
        self._transfers[request.request_id] = transfer
        if transfer.saves:
            self._unsaved[request.request_id] = transfer
            self._producers.update(segment.key for segment in transfer.saves)
        if transfer.layout is not None:
            # vLLM would drop the answer of `match` under this flag, and compute the prompt as a plain one.
            request.skip_reading_prefix_cache = False
            # The cache keeps no log-probabilities: no request finds the blocks of a question that is read.
            nonce = (secrets.token_hex(16),) if transfer.reads else ()
            self._salt_block_hashes(request, request.cache_salt, *transfer.layout, *nonce)

    def match(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond the first `num_computed`, and whether the load is asynchronous.

        The number is None if vLLM must ask again in the next step.
        """
        request_id = request.request_id
        if request_id in self._refused:
            return self._false_claim(request, num_computed), True
        transfer = self._transfers.get(request_id)
        if transfer is None or num_computed >= transfer.load_end:
            return 0, False
        missing = {segment.key for segment in transfer.segments_after(num_computed) if segment.key not in self.index}
        if any(self._producers[key] for key in missing):
            self.stats.count(waits=1)
            return None, False
        if missing:
            self._refuse(request, RequestRefused("missing", "the store does not hold all segments: save them again"))
            return self._false_claim(request, num_computed), True
        return transfer.load_end - num_computed, False

    def allocated(self, request: Request, block_ids: list[int], num_external: int) -> None:
        """Plan the load of a request that got its blocks."""
        request_id = request.request_id
        for segment in reversed(self._transfers.get(request_id, Transfer()).loads):
            self.index.touch(segment.key)  # The prefix comes last: it serves the most requests.
        if num_external <= 0:
            return
        if request_id in self._refused:
            self._next.failed_loads.append(request_id)
        elif transfer := self._transfers.get(request_id):
            start, end = transfer.load_end - num_external, transfer.load_end
            segments = tuple(transfer.segments_after(start))
            self._next.loads.append(Load(block_ids[: -(-end // self._block_size)], start, end, segments))
            self.stats.count(
                loads=1,
                loaded_segments=len(segments),
                hit_segments=sum(segment.key not in transfer.computed for segment in segments),
                loaded_bytes=num_external * self._bytes_per_token,
            )

    def build_step(self, output: SchedulerOutput) -> StepWork:
        """Return the work of the step that vLLM has scheduled."""
        scheduled = output.num_scheduled_tokens
        work, self._next = self._next, StepWork()
        if self._unsaved:
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens))
            for request_id in scheduled.keys() & self._unsaved.keys():
                if computed[request_id] + scheduled[request_id] >= self._unsaved[request_id].save_end:
                    self._save(request_id, work)
        evicted = self.index.evict()
        self.stats.count(evicted_segments=len(evicted), evicted_bytes=sum(num_bytes for _, num_bytes in evicted))
        work.evicted += [key for key, _ in evicted]
        for save in work.saves:  # what one step saves may exceed the store
            save.segments = tuple(segment for segment in save.segments if segment.key in self.index)
        return work

    def finish(self, request_id: str) -> None:
        """Forget a request that ended or was aborted."""
        self._transfers.pop(request_id, None)
        self._refused.discard(request_id)
        self._end_production(request_id)

    def reset(self) -> None:
        """Drop all stored K/V."""
        self._next.evicted += self.index.clear()
        self.stats.gauge("stored_segments", 0)
        self.stats.gauge("stored_bytes", 0)

    def take_stats(self) -> ConnectorStats | None:
        """Return the statistics since the last call, None if nothing happened."""
        if (taken := self.stats.take()) is not None:
            taken.gauge("stored_segments", len(self.index))
            taken.gauge("stored_bytes", self.index.num_bytes)
        return taken

    def _parse(self, request: Request) -> Transfer | None:
        params = request.kv_transfer_params
        if not isinstance(params, dict) or PARAMS_KEY not in params:
            return None
        token_ids = request.prompt_token_ids
        if token_ids is None or request.prompt_embeds is not None or request.mm_features:
            raise RequestRefused("unsupported", "prompts of a chunked prompt must be token ids alone")
        if not isinstance(request.cache_salt, str | None):
            raise RequestRefused("malformed", "cache_salt must be a string")
        sampling = request.sampling_params
        if sampling is None or request.resumable:
            raise RequestRefused("unsupported", "pooling and resumable requests cannot be chunked prompts")
        adapter = adapter_key(request.lora_request)
        transfer = parse_transfer(params[PARAMS_KEY], token_ids, gap=self._gap, cache_salt=request.cache_salt, adapter=adapter)
        asked = sampling.prompt_logprobs is not None or sampling.prompt_logprob_token_ids is not None
        if transfer.loads and asked and not transfer.reads:
            raise RequestRefused("unsupported", "a loaded prompt has no prompt_logprobs")
        return transfer

    def _refuse(self, request: Request, refusal: RequestRefused) -> None:
        request_id = request.request_id
        logger.warning("Refused request %s: %s", request_id, refusal)
        self.stats.count(**{f"refused_{refusal.reason}": 1})
        self._end_production(request_id)
        self._transfers.pop(request_id, None)
        self._refused.add(request_id)
        # vLLM would drop the claim of `match` under this flag, and compute the prompt.
        request.skip_reading_prefix_cache = False

    def _false_claim(self, request: Request, num_computed: int) -> int:
        """Return the tokens that a refused request claims, at least one. They take one block of the cache at most."""
        return min(self._block_size, request.num_tokens - num_computed)

    def _salt_block_hashes(self, request: Request, *fields: Any) -> None:
        """Recompute a request's block hashes under a salt that no client can know.

        vLLM's hashes cover token ids and `cache_salt`. They do not cover the chunks and their positions, so a composed prompt's
        blocks would answer plain prompts, and a plain prompt's blocks composed ones.
        """
        message = json.dumps(fields).encode()
        request.cache_salt = f"{PARAMS_KEY}/{hmac.new(self._secret, message, 'sha256').hexdigest()}"
        request.block_hashes = []
        request.update_block_hashes()

    def _save(self, request_id: str, work: StepWork) -> None:
        added = []
        for segment in self._end_production(request_id):
            num_bytes = (segment.end - segment.start) * self._bytes_per_token
            if self.index.add(segment.key, num_bytes):
                added.append(segment)
                self.stats.count(saved_segments=1, saved_bytes=num_bytes)
        if added:
            num_blocks = -(-added[-1].end // self._block_size)
            work.saves.append(Save(self._get_block_ids(request_id)[:num_blocks], tuple(added)))

    def _end_production(self, request_id: str) -> tuple[StoredSegment, ...]:
        transfer = self._unsaved.pop(request_id, None)
        if transfer is None:
            return ()
        self._producers.subtract(segment.key for segment in transfer.saves)
        self._producers += Counter()  # drops zeros
        return transfer.saves
