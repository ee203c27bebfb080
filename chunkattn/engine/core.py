"""`EngineCore`: messages in, outputs out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import jax
import numpy as np
from prometheus_client import Counter, generate_latest

from chunkattn.cache.trie import BlockTrie
from chunkattn.config import EngineConfig
from chunkattn.engine.batch import BatchBuilder, StepBatch
from chunkattn.engine.intake import Intake
from chunkattn.engine.messages import (
    CachedTokens,
    EngineLimits,
    EngineOutput,
    Message,
    PrecomputeResult,
    RequestFailed,
    TokenLogprobs,
    TokenOutput,
)
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.offload import DiskTier
from chunkattn.engine.readout import RowCollector
from chunkattn.engine.request import Request, Sequence
from chunkattn.engine.runner import Runner
from chunkattn.engine.scheduler import Scheduler, Span
from chunkattn.errors import RequestError

logger = logging.getLogger(__name__)


class EngineCore:
    """Admits requests, schedules and runs steps. Knows token ids, never text.

    Attributes:
        requests: added and not yet ended, by id.
        limits: what it can hold.
        scheduler: for its counts of waiting and running requests, and the cache.
        runner: for its counts of compiled programs.
        metrics: of this engine.
    """

    def __init__(self, runner: Runner, config: EngineConfig, max_model_len: int, disk: DiskTier | None = None) -> None:
        self.runner, self.config, self.disk = runner, config, disk
        self.limits = EngineLimits(
            num_pages=runner.num_pages,
            block_size=config.block_size,
            page_bytes=runner.page_bytes,
            max_model_len=max_model_len,
            max_logprobs=runner.max_logprobs,
            vocab_size=runner.spec.vocab_size,
            sliding_window=runner.spec.sliding_window,
        )
        self.intake = Intake(config, self.limits)
        self.scheduler = Scheduler(
            BlockTrie(runner.num_pages),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self.batches = BatchBuilder(
            runner.backend,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_spans=self.scheduler.max_spans,
            num_pages=runner.num_pages,
            block_size=config.block_size,
        )
        self.requests: dict[str, Request] = {}
        self.metrics = EngineMetrics()
        self._readouts: dict[str, RowCollector] = {}
        self._arrivals = 0
        self._follow_totals()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    # Requests

    def check(self, message: Message) -> None:
        """Check a request against every limit, without admitting it (see `Intake.check`)."""
        self.intake.check(message)

    def add(self, message: Message) -> None:
        """Queue a request.

        Raises:
            RequestError: as `check`, or its id is in use.
        """
        if message.request_id in self.requests or message.request_id in self.pins:
            raise RequestError(f"request_id {message.request_id!r} is already in use", param="request_id")
        self._arrivals += 1
        request = self.intake.prepare(message, arrival=self._arrivals)
        request.added_at = time.perf_counter()
        self.requests[request.request_id] = request
        params = request.sampling
        if request.score is not None:
            self._readouts[request.request_id] = RowCollector(len(request.score.rows))
        elif params is not None and params.prompt_logprobs is not None and (wanted := len(request.layout.known_rows)):
            self._readouts[request.request_id] = RowCollector(wanted)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages; unknown ids are ignored, for it may just have finished."""
        if request_id in self.requests:
            self._end(self.requests[request_id], "aborted")

    def stop(self, request_id: str, sample: int) -> None:
        """End one sample early, for instance at a stop string."""
        request = self.requests.get(request_id)
        for sequence in list(request.sequences) if request else []:
            if sequence.sample == sample:
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if len(sequence.request.sequences) == 1:
            self._end(sequence.request, "finished")
        else:
            self.scheduler.finish(sequence)

    def _end(self, request: Request, outcome: str) -> None:
        """The one way out for every request: nothing of it stays behind but what the cache keeps."""
        self.scheduler.remove(request)
        self.requests.pop(request.request_id, None)
        self._readouts.pop(request.request_id, None)
        self.metrics.requests.labels(outcome).inc()
        self.metrics.end_to_end.observe(time.perf_counter() - request.added_at)

    # The cache

    @property
    def pins(self) -> list[str]:
        """Ids of the precompute requests whose blocks are pinned."""
        return [r.request_id for r in self.scheduler.pinned]

    def unpin(self, request_ids: Iterable[str]) -> None:
        """Let the cache evict what these precompute requests pinned; unknown ids are ignored."""
        wanted = set(request_ids)
        for request in [r for r in self.scheduler.pinned if r.request_id in wanted]:
            self.scheduler.remove(request)

    def reset_prefix_cache(self) -> bool:
        """Unpin and forget everything cached. Returns whether every page is free: False while requests run."""
        self.unpin(self.pins)
        self.scheduler.trie.evict_all()
        return self.scheduler.trie.pool.num_free == self.limits.num_pages

    # Steps

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it produced: often nothing, while prompts are being computed."""
        began = time.perf_counter()
        for request in self.scheduler.admit():
            if not request.computed.any() and not request.sequences[0].output_ids:
                self.metrics.queue_time.observe(began - request.added_at)
            if self.disk is not None:
                self.disk.load(request)
        outputs = [*self._fail_stuck(), *self._finish_precomputed()]
        spans = self.scheduler.plan()
        if not spans:
            return outputs
        try:
            outputs += self._run(spans, began)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(spans))
            self.metrics.failed_steps.inc()
            outputs += self._recover({s.sequence.request.request_id for s in spans}, error)
        except BaseException:  # an interrupt: nobody's fault, but the donated pool is just as lost
            self._recover(set(), None)
            raise
        return outputs

    def _run(self, spans: list[Span], began: float) -> list[EngineOutput]:
        batch = self.batches.build(spans)
        self.metrics.host_time.observe(time.perf_counter() - began)
        hidden = self.runner.forward(batch)
        tokens, logprobs = self.runner.sample(hidden, batch.samples)
        outputs = self._collect(hidden, batch)
        self._count(spans, batch)
        self.scheduler.commit(spans)
        if self.disk is not None:
            self.disk.save(spans)
        for span in spans:
            if span.sequence.request.score and span.end == span.sequence.num_tokens:
                self._finish(span.sequence)
        self._fork(batch)
        for row, token, logprob in zip(batch.samples, tokens, logprobs, strict=True):
            outputs.append(self._accept(row.sequence.request, row.sample, token, logprob))
        self.metrics.steps.inc()
        self.metrics.step_time.observe(time.perf_counter() - began)
        return [*outputs, *self._finish_precomputed()]

    def _fork(self, batch: StepBatch) -> None:
        """Prompts just completed split into their samples before the first tokens are taken."""
        copies = []
        for request in dict.fromkeys(r.sequence.request for r in batch.samples if r.sample != r.sequence.sample):
            copies += self.scheduler.placement.fork(request)
        self.runner.copy_pages(copies)

    def _accept(self, request: Request, sample: int, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Append a sampled token and end its sequence when it is the last."""
        params, now = request.sampling, time.perf_counter()
        assert params is not None
        sequence = next(s for s in request.sequences if s.sample == sample)
        sequence.output_ids.append(token)
        cached = None
        if len(sequence.output_ids) == 1:
            cached = _cached_tokens(request)
            if sample == 0:
                self.metrics.first_token.observe(now - request.added_at)
                self.metrics.count_cached(cached, _prompt_tokens(request))
        else:
            self.metrics.inter_token.observe(now - sequence.last_token_at)
        sequence.last_token_at = now
        finish_reason, stop_reason = None, None
        if len(sequence.output_ids) > params.min_tokens:
            if token in params.stop_token_ids:
                finish_reason, stop_reason = "stop", token
            elif token in request.eos_token_ids and not params.ignore_eos:
                finish_reason = "stop"
        if finish_reason is None and len(sequence.output_ids) >= request.max_tokens:
            finish_reason = "length"
        if finish_reason:
            self._finish(sequence)
        return TokenOutput(request.request_id, sample, token, logprobs, finish_reason, stop_reason, cached)

    def _finish_precomputed(self) -> list[EngineOutput]:
        """Answer the precompute requests whose blocks are all there, whoever computed them."""
        outputs: list[EngineOutput] = []
        for request in [r for r in self.scheduler.running if r.precompute]:
            if request.sequences[0].num_computed < len(request.layout):
                continue
            if request.precompute and request.precompute.pin:
                self.scheduler.pin(request)
            if request.request_id not in self.requests:  # pinned before, computed again after a failure
                continue
            cached = _cached_tokens(request)
            self.metrics.count_cached(cached, _prompt_tokens(request))
            outputs.append(PrecomputeResult(request.request_id, cached))
            if request in self.scheduler.pinned:
                del self.requests[request.request_id]
            else:
                self._end(request, "finished")
        return outputs

    def _fail_stuck(self) -> list[EngineOutput]:
        """Fail who could not even be placed alone: pinned pages leave too few."""
        outputs: list[EngineOutput] = []
        while request := self.scheduler.stuck:
            held = self.limits.num_pages - self.scheduler.trie.num_available
            reason = (
                f"the prompt of {len(request.layout)} tokens needs up to {request.total_pages} KV pages; of "
                f"{self.limits.num_pages} in the pool {held} are pinned; unpin documents or raise kv_cache_memory_bytes"
            )
            self._end(request, "failed")
            outputs.append(RequestFailed(request.request_id, reason, "prompt"))
            self.scheduler.admit()
        return outputs

    def _collect(self, hidden: jax.Array, batch: StepBatch) -> list[EngineOutput]:
        """Read the rows asked about; requests whose last row this was are answered."""
        outputs: list[EngineOutput] = []
        if batch.scores:
            scored = [r.request.score for r in batch.scores]
            values = self.runner.label_logprobs(hidden, [r.row for r in batch.scores], [s.label_token_ids for s in scored if s])
            for (_, request, place), value in zip(batch.scores, values, strict=True):
                if collector := self._note(request, place, value):
                    outputs.append(collector.score_result(request))
        if batch.prompt_logprobs:
            targets = [int(r.request.layout.token_ids[r.place]) for r in batch.prompt_logprobs]
            read = self.runner.token_logprobs(hidden, [r.row for r in batch.prompt_logprobs], targets)
            for i, (_, request, place) in enumerate(batch.prompt_logprobs):
                row = (read.target[i], read.rank[i], read.top_ids[i], read.top[i])
                if collector := self._note(request, int(request.user_index[place]), row):
                    outputs.append(collector.prompt_output(request))
        return outputs

    def _note(self, request: Request, index: int, row: object) -> RowCollector | None:
        """Note a row; returns the request's collector, no longer kept here, when this was its last."""
        collector = self._readouts.get(request.request_id)
        if collector is None:  # answered before its sequence had to start over
            return None
        collector.rows[index] = row
        return self._readouts.pop(request.request_id) if len(collector.rows) == collector.wanted else None

    def _recover(self, failed: set[str], error: Exception | None) -> list[EngineOutput]:
        """The step's donated pool is lost: fail the requests in it, start the others over on a fresh pool."""
        outputs: list[EngineOutput] = []
        for request in [self.requests[i] for i in sorted(failed) if i in self.requests]:
            self._end(request, "failed")
            outputs.append(RequestFailed(request.request_id, f"{type(error).__name__}: {error}"))
        self.scheduler.restart()
        self.runner.reset()
        return outputs

    # Before and beside the steps

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every step variant and the common readouts, so that no request waits for it.

        Args:
            progress: called with the number of programs done and in all.

        Returns:
            Seconds it took.
        """
        began = time.perf_counter()
        sizes = self.batches.variants
        for done, (rows, width) in enumerate(sizes):
            if progress:
                progress(done, len(sizes))
            hidden = self.runner.forward(self.batches.empty(rows, width))
            if width == sizes[0][1]:
                self.runner.warm_readouts(hidden, sampling=done == 0)
            hidden.block_until_ready()
        if progress:
            progress(len(sizes), len(sizes))
        seconds = time.perf_counter() - began
        logger.info("warm-up: %d step variants in %.1f s", len(sizes), seconds)
        return seconds

    def metrics_text(self) -> str:
        """The metrics in Prometheus' text format."""
        self._update_totals()
        return generate_latest(self.metrics.registry).decode()

    def _count(self, spans: list[Span], batch: StepBatch) -> None:
        rows = batch.num_rows
        decodes = sum(len(s.sequence.output_ids) > 0 and s.end - s.start == 1 for s in spans)
        scored = sum(s.end - s.start for s in spans if s.sequence.request.score)
        for kind, count in (("decode", decodes), ("score", scored), ("prefill", rows - decodes - scored)):
            self.metrics.tokens.labels(kind).inc(count)
        self.metrics.padding.inc(len(batch.token_ids) - rows)

    def _follow_totals(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        totals = [
            metrics.follow(metrics.evictions, lambda: scheduler.trie.evictions),
            metrics.follow(metrics.preemptions, lambda: scheduler.preemptions),
        ]
        labelled: list[tuple[Counter, dict[str, int], Iterable[str]]] = [
            (metrics.compiles, self.runner.compiles, ("step", "copy", "gather", "sample", "read", "pages"))
        ]
        if self.disk is not None:
            labelled.append((metrics.store, self.disk.counts, tuple(self.disk.counts)))
        for counter, counts, names in labelled:
            totals += [metrics.follow(counter.labels(name), partial(counts.__getitem__, name)) for name in names]
        trie = scheduler.trie

        def update() -> None:
            for follow in totals:
                follow()
            pinned = len({b for r in scheduler.pinned for s in r.sequences for b in s.held if b.page >= 0})
            held = self.limits.num_pages - trie.num_available
            for state, pages in (("free", trie.pool.num_free), ("cached", trie.num_cached), ("used", held - pinned)):
                metrics.pages.labels(state).set(pages)
            metrics.pages.labels("pinned").set(pinned)
            metrics.queue.labels("waiting").set(len(scheduler.waiting))
            metrics.queue.labels("running").set(len(scheduler.running))

        self._update_totals = update


def _by_part(request: Request, tokens: np.ndarray) -> CachedTokens:
    """Counts of a bool `[T]` over the parts, chunks in the user's order."""
    layout = request.layout
    counts = [int(tokens[s.start : s.end].sum()) for s in layout.segments]
    chunks = [0] * layout.num_chunks
    for place, number in enumerate(request.chunk_order):
        chunks[number] = counts[1 + place]
    return CachedTokens(counts[0], tuple(chunks), counts[-1])


def _cached_tokens(request: Request) -> CachedTokens:
    return _by_part(request, ~request.computed)


def _prompt_tokens(request: Request) -> CachedTokens:
    return _by_part(request, np.ones(len(request.layout), bool))
