"""`EngineCore`: takes request messages, runs steps and returns outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import jax

from chunkattn.config import EngineConfig
from chunkattn.engine.adapters import LoadedAdapters
from chunkattn.engine.admission import Admission
from chunkattn.engine.ahead import Ahead
from chunkattn.engine.compile_clock import COMPILING
from chunkattn.engine.completion import Completion
from chunkattn.engine.decode_program import STEPS
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.isolation import Isolation
from chunkattn.engine.lifetimes import Lifetimes
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import CachedTokens, EngineOutput, Message, PrecomputeRequest, RequestFailed
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.readout import cached_tokens, request_stats, start_reading
from chunkattn.engine.request import Request
from chunkattn.engine.runner import Runner
from chunkattn.engine.runs import Run, Runs
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.shapes import Shapes
from chunkattn.engine.states import States
from chunkattn.engine.step import Span, Step, StepBuilder
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.engine.warmup import NotCompiledError, WarmUp

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.02
"""Seconds that an idle step waits at most for a grammar to be compiled, or for parts to be read from disk."""


class EngineCore:
    """Engine that admits requests, schedules and runs steps. It handles token ids only.

    Attributes:
        requests: requests added and not yet ended, by id.
        limits: sizes and limits of the engine.
        warm_ups: warm-up of the compiled programs.
        scheduler: scheduler of the requests; also counts waiting and running requests and holds the cache.
        runner: runner of the model; also counts the compiled programs.
        runs: planner of runs of decodes.
        metrics: Prometheus metrics of this engine.
        adapters: adapters that requests may name; None for an engine without.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        max_model_len: int,
        disk: DiskTier | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self.runner, self.config, self.adapters = runner, config, adapters
        self.meter = RateMeter(runner.row_flops, runner.pair_flops, runner.dtype)
        named = {name: backend for name, backend in runner.backends.items() if name is not None}
        self.limits = EngineLimits(
            num_pages=runner.pool.num_pages,
            block_size=runner.backend.spec.block_size,
            page_bytes=runner.pool.page_bytes,
            max_model_len=max_model_len,
            max_logprobs=runner.max_logprobs,
            vocab_size=runner.spec.vocab_size,
            rates=self.meter.rates,
            steps=StepSizes.of(runner.backend, config.max_num_batched_tokens, one_size=runner.invariance.one_size),
            longest_table=runner.backend.max_table_pages,
            num_labels=runner.spec.num_labels,
            backends={name: (backend.supports(backend.spec), backend.max_rows) for name, backend in named.items()},
            batch_invariant=runner.invariance.holds,
            items_on_pages=runner.invariance.own_pages,
            windowed=runner.backend.spec.windowed,
            recurrent=runner.states is not None,
            state_slots=0 if runner.states is None else runner.states.num_slots,
            state_bytes=0 if runner.states is None else runner.states.slot_bytes,
            most_samples=config.max_num_seqs if runner.states is None else runner.states.num_seats,
            config=config,
        )
        states = None if runner.states is None else States(runner.states.num_slots, runner.states.num_seats)
        self.scheduler = Scheduler(self.limits, adapters, states)
        if disk is not None:
            disk.states = states
        self.isolation = Isolation(self.scheduler)
        self.builder = StepBuilder(
            runner.backends,
            token_buckets=self.limits.steps.buckets,
            max_spans=self.scheduler.max_spans,
            max_table_pages=self.limits.max_table_pages,
            block_size=self.limits.block_size,
            weighs=config.calibration.weighs,
            adapters=0 if runner.slots is None else runner.slots.count,
            slot_of=None if adapters is None else adapters.slot_of,
            recurrence=None if runner.states is None else runner.states.recurrence,
        )
        most = min(config.num_scheduler_steps, STEPS) if runner.decodes and config.num_scheduler_steps > 1 else 0
        self.runs = Runs(self.scheduler, self.builder, runner, most, config.max_num_seqs)
        self.warm_ups = WarmUp(
            runner, self.builder, self.runs, self.meter, with_store=disk is not None, longest=config.warmup_tokens
        )
        self.metrics = EngineMetrics()
        self.lifetimes = Lifetimes(self.scheduler, self.metrics, disk)
        self.requests = self.lifetimes.requests
        self.ahead = Ahead(self.scheduler, self.builder)
        self.completion = Completion(runner, self.scheduler, self.lifetimes, self.ahead, self.runs, self.meter, self.metrics)
        self._admission = Admission(self.limits, self.scheduler, self.lifetimes, self.metrics, adapters)
        self._concerned: list[Request] = []  # requests that an exception in the step under way concerns

    @property
    def has_work(self) -> bool:
        """Return whether a request waits or runs, a pinned document must be recomputed, or outputs wait to be returned."""
        return bool(self.requests or self.scheduler.waiting or self.scheduler.running or self.lifetimes.outputs)

    # Requests

    def add(self, message: Message, *, checked: bool = False, arrived_at: float | None = None) -> None:
        """Queue a request.

        Args:
            message: request with its chunks in the user's order.
            checked: whether the caller has checked the message.
            arrived_at: arrival on the clock of `time.perf_counter`, if the message has waited for this call; None for now.

        Raises:
            RequestError: as `EngineLimits.check`, the request id is in use, the adapter is not loaded, or the text is to have a
                shape and the engine does not know its vocabulary.
        """
        self._admission.add(message, checked=checked, arrived_at=arrived_at)

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter that a request brings, unless its name is known; see `LoadedAdapters.load`."""
        self._admission.load_adapter(name, folder)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Unknown ids are ignored, since the request may just have finished."""
        if request_id in self.requests:
            self.lifetimes.end(self.requests[request_id], "aborted")

    def stop(self, request_id: str, sample: int) -> None:
        """End one sample early, for instance at a stop string.

        Args:
            request_id: id of the request; unknown ids are ignored.
            sample: number of the sample in the request.
        """
        request = self.requests.get(request_id)
        for candidate in list(request.samples) if request else []:
            if candidate.number == sample:
                self.lifetimes.finish(candidate)

    @property
    def shapes(self) -> Shapes:
        """Return the grammars of the requests."""
        return self.lifetimes.shapes

    # The cache

    @property
    def disk(self) -> DiskTier | None:
        """Return the K/V store; None without one, or once it is closed."""
        return self.lifetimes.disk

    def close_disk(self) -> None:
        """Write pending parts to the K/V store and close it. The engine continues without a store."""
        self._admission.close_disk()

    @property
    def pins(self) -> list[str]:
        """Return the ids of the precompute requests whose blocks are pinned, or are recomputed to be pinned."""
        return list(self.lifetimes.pins)

    def unpin(self, request_ids: Iterable[str]) -> None:
        """Let the cache evict the blocks that these precompute requests pinned. Unknown ids are ignored."""
        self.lifetimes.unpin(request_ids)

    def look_up(self, message: PrecomputeRequest, *, forget: bool = False, checked: bool = False) -> CachedTokens:
        """Return how many tokens of a prefix and its chunks are in memory.

        Args:
            message: prefix and chunks; nothing is computed.
            forget: whether to forget the chunks, or the prefix if there is no chunk, in memory and on disk. A block in memory
                is freed when its last user releases it. A prefix stays while the cache holds other chunks below it.
            checked: see `add`.

        Raises:
            RequestError: as `add`.
        """
        request = self._admission.request(message, checked=checked)
        self.scheduler.placement.mark_cached(request, forget=forget)
        if forget and self.disk is not None:
            self.disk.forget(request)
        return cached_tokens(request)

    @property
    def disk_is_behind(self) -> bool:
        """Return whether the last step computed a document for the K/V store and only documents are left to compute.

        Computing is faster than writing to the store, which refuses parts when it is behind. A driver waits for the store then.
        """
        return self.disk is not None and self.lifetimes.persisted and all(r.precompute for r in self.requests.values())

    def reset_prefix_cache(self) -> bool:
        """Unpin and evict everything cached. Return whether every page is free: False while requests run."""
        self.unpin(self.pins)
        self.scheduler.trie.evict_all()
        return self.scheduler.trie.num_free == self.limits.num_pages

    # Steps

    def step(self) -> list[EngineOutput]:
        """Run one step and return its outputs: often none, while prompts are being computed.

        An exception drops the KV pool, so all requests are recomputed. Each request of the failed step runs again alone. A
        request that fails alone ends with `RequestFailed`. On several hosts, an error of the devices is raised, and ends the
        engine on all of them.

        A request with a value that is not finite ends with `RequestFailed` as well, and the other requests keep their results.
        A step that draws no token is checked, and its values are read, while the device computes the next step.
        """
        began, compiled, spans = time.perf_counter(), self.runner.compiles.total(), list[Span]()
        before = self.completion.pending
        self._concerned, self.lifetimes.persisted = [], False
        read = 0 if self.adapters is None else self.adapters.num_read
        try:
            self._admission.take_compiled()
            self._admission.take_read()
            planned, run = self.ahead.take(), None
            if planned is None:
                self._place()
                run = None if self.isolation.has_suspects else self.runs.take()
            spans = planned.spans if planned else run.spans if run else self._schedule()
            self._concerned = [span.sample.request for span in spans]
            if self.adapters is not None and self.adapters.num_read > read:
                began = time.perf_counter()  # the rates of steps count no reading of files
            if run is not None:
                self._decode(run, began)
            elif spans:
                self._compute(planned or self.builder.build(spans), began, compiled)
            else:
                self.completion.complete_pending()
                self.meter.finish()  # the device is idle
            if (new := self.runner.compiles.total() - compiled) and spans:
                logger.info("a step compiled or loaded %d programs, in %.1f s", new, time.perf_counter() - began)
            checked = len(before[0].spans) if before else 0
            self.isolation.step_done(self.lifetimes.is_alive, checked if self.completion.pending else max(checked, len(spans)))
        except Exception as error:
            if self._ends_hosts(error):
                raise
            self._blame(error, spans)
        except BaseException:  # an interrupt fails no request, but may lose the donated pool
            self._recover([])
            raise
        return self.lifetimes.take_outputs()

    def _place(self) -> None:
        """Place waiting requests, in the room of those that the step on the device ends."""
        pending = self.completion.pending
        if pending is not None and self.scheduler.waiting and pending[0].ends_scores:
            self.completion.complete_pending()
            self.meter.finish()
        self._admission.place(self._concerned)
        self.lifetimes.finish_precomputed()

    def _schedule(self) -> list[Span]:
        """Plan a step. Return its spans; empty if there is nothing to compute."""
        self._concerned = []
        spans = self.scheduler.plan(self._rows_beside_decodes)
        if not spans and self.completion.pending is None:
            self._admission.take_compiled(_IDLE_WAIT_S)  # avoids a busy loop while grammars are compiled
            self._admission.take_read(_IDLE_WAIT_S)  # or parts are read from disk
        return spans

    def _rows_beside_decodes(self) -> int:
        return self.meter.rows_within(self.config.max_decode_gap_s)

    def _compute(self, step: Step, began: float, compiled: int) -> None:
        """Compute a step, and complete it if it draws tokens; any other is completed when the next step is on the device.

        Steps of a backend that a request names, and of requests that run alone, are completed at once, too.

        Args:
            step: the step.
            began: time at which the host began, in seconds on the clock of `time.perf_counter`.
            compiled: number of programs compiled then.
        """
        completion, before = self.completion, self.completion.pending
        self.runs.slow_down()
        self.metrics.host_time.observe(time.perf_counter() - began)
        self.meter.add(began, len(step.arrays.token_ids), step.area)
        hidden, finite = self.runner.forward(step.arrays)
        self.scheduler.fills.sent(step.spans)
        reading = start_reading(self.runner, step, hidden, finite, self.shapes.grammars)
        completion.complete_pending()
        self.metrics.count_step(step)
        if step.samples or step.arrays.backend is not None or (step.is_read and self.isolation.has_suspects):
            completion.complete(step, reading, partial(self._plan_ahead, step))
        else:
            completion.pending = step, reading
        # The time of a step counts when its results have arrived, without compilation, on the engine's backend.
        if self.runner.compiles.total() > compiled or step.arrays.backend is not None:
            self.meter.forget()
        elif completion.pending is None:
            self.meter.finish()
            self.runs.note(step, time.perf_counter() - began)
        elif before is not None and before[0].is_read:
            self.meter.finish((len(step.arrays.token_ids), step.area))
        self.metrics.steps.inc()
        self.metrics.step_time.observe(time.perf_counter() - began)

    def _plan_ahead(self, step: Step) -> None:
        """Plan the step after one that the device computes, if that can be foreseen."""
        if not self.isolation.has_suspects and not self.runs.expects():
            self.ahead.plan(step, self._rows_beside_decodes, self.lifetimes.is_alive)

    def _decode(self, run: Run, began: float) -> None:
        """Wait for a run of decodes, and complete it. The next run is planned meanwhile.

        Args:
            run: the run; it may be on the device already.
            began: time at which the host began, in seconds on the clock of `time.perf_counter`.
        """
        if run.decoded is None:
            self.runs.send(run)
        host = time.perf_counter() - began
        self.completion.complete_pending()
        self.runs.follow(run)
        result = self.runs.read(run)
        counts = self.completion.complete_run(run, result)
        if run.is_timed:
            self.meter.record(result.number, run.size * result.number, result.seconds)
        if result.number:
            self.metrics.count_run(run.size, counts, result.number, time.perf_counter() - began, host)

    # Failed steps

    def _ends_hosts(self, error: Exception) -> bool:
        """Return whether an error leaves the hosts of the model apart: the devices failed, perhaps on one host alone."""
        return self.runner.tell is not None and isinstance(error, jax.errors.JaxRuntimeError)

    def _blame(self, error: Exception, spans: list[Span]) -> None:
        """Recover from an exception, and fail every request that failed alone.

        Args:
            error: the exception.
            spans: tokens that the step computes.
        """
        lifetimes = self.lifetimes
        if self.completion.reading is not None:  # the step before failed
            spans = self.completion.reading
            self._concerned = [span.sample.request for span in spans]
        logger.exception("a step of %d requests failed", len(self._concerned))
        self.metrics.failed_steps.inc()
        answered = {output.request_id for output in lifetimes.outputs}
        concerned = [r for r in dict.fromkeys(self._concerned) if lifetimes.is_alive(r) or r.request_id not in answered]
        failed = self.isolation.blame(concerned or lifetimes.all, spans)
        self._recover(failed)
        by_name, reason = {r.request_id: r for r in failed}, f"{type(error).__name__}: {error}"
        kept = [output for output in lifetimes.outputs if output.request_id not in by_name]
        lifetimes.outputs = kept + [RequestFailed(n, reason, stats=request_stats(by_name[n])) for n in sorted(by_name)]

    def _recover(self, failed: Iterable[Request]) -> None:
        """Drop the donated pool and the failed requests, and restart all other requests on a fresh pool."""
        COMPILING.settle()
        self.meter.forget()
        self.ahead.forget()
        self.runs.forget()
        self.completion.forget()
        self.lifetimes.restart(failed)
        self.isolation.restart(failed)
        self.runner.reset()

    # Warm-up and metrics

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Do every part of the warm-up that is left; see `WarmUp.run`. An interrupt may lose the donated pool."""
        try:
            return self.warm_ups.run(progress)
        except BaseException:
            self._recover([])
            raise

    def warm_beside(self) -> bool:
        """Compile the next program beside requests. Return whether programs are left. An exception ends the warm-up alone."""
        try:
            with COMPILING.compiling():
                return self.warm_ups.advance()
        except Exception as error:
            if self._ends_hosts(error):
                raise
            logger.exception("a program cannot be compiled ahead; the other programs are compiled when requests need them")
            if not isinstance(error, NotCompiledError):  # the donated pool may be lost
                self._recover([])
            return False

    def metrics_text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return self.metrics.text(self.scheduler, self.warm_ups, self.runner.compiles, self.disk.counts if self.disk else {})
