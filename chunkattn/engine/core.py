"""`EngineCore`: takes request messages, runs steps and returns outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import jax
import numpy as np

from chunkattn.adapter_salt import split
from chunkattn.config import EngineConfig
from chunkattn.engine.adapters import LoadedAdapters, LostAdapterError
from chunkattn.engine.ahead import Ahead
from chunkattn.engine.compile_clock import COMPILING
from chunkattn.engine.decode_program import STEPS
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.isolation import Isolation, not_finite, stuck
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import (
    CachedTokens,
    EngineOutput,
    Message,
    PrecomputeRequest,
    PrecomputeResult,
    RequestFailed,
)
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.readout import (
    StepResult,
    accept_tokens,
    cached_tokens,
    collect,
    request_stats,
    split_at_stops,
    start_reading,
)
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.row_reader import Reading
from chunkattn.engine.runner import Runner
from chunkattn.engine.runs import Run, Runs
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.states import States
from chunkattn.engine.step import SampleRow, Span, Step, StepBuilder
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.engine.warmup import NotCompiledError, WarmUp
from chunkattn.errors import RequestError

logger = logging.getLogger(__name__)

_DISK_WAIT_S = 0.02
"""Seconds that an idle step waits at most for parts to be read from disk."""


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
        self.runner, self.config, self.disk, self.adapters = runner, config, disk, adapters
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
        self.requests: dict[str, Request] = {}
        self.metrics = EngineMetrics()
        self._ahead = Ahead(self.scheduler, self.builder)
        self._planning_error: Exception | None = None
        self._pins: dict[str, Request] = {}
        self._outputs: list[EngineOutput] = []  # of the step under way; an interrupt leaves them to the next step
        self._concerned: list[Request] = []  # requests that an exception in the step under way concerns
        self._unchecked: tuple[Step, Reading[StepResult]] | None = None  # step that may still run on the device
        self._checking: list[Span] | None = None  # spans of that step while its values are read
        self._arrivals = 0
        self._persisted = False  # by the last step

    @property
    def has_work(self) -> bool:
        """Return whether a request waits or runs, a pinned document must be recomputed, or outputs wait to be returned."""
        return bool(self.requests or self.scheduler.waiting or self.scheduler.running or self._outputs)

    # Requests

    def add(self, message: Message, *, checked: bool = False, arrived_at: float | None = None) -> None:
        """Queue a request.

        Args:
            message: request with its chunks in the user's order.
            checked: whether the caller has checked the message.
            arrived_at: arrival on the clock of `time.perf_counter`, if the message has waited for this call; None for now.

        Raises:
            RequestError: as `EngineLimits.check`, the request id is in use, or the adapter is not loaded.
        """
        if message.request_id in self.requests or message.request_id in self._pins:
            raise RequestError(f"request_id {message.request_id!r} is already in use", param="request_id")
        if not checked:
            self.limits.check(message)
        request = self._request(message, self._arrivals + 1)
        self._arrivals += 1
        request.added_at = time.perf_counter() if arrived_at is None else arrived_at
        self.requests[request.request_id] = request
        if self.disk is None or not self.disk.read_ahead(request, self.scheduler.placement.look_up):
            self.scheduler.add(request)

    def _request(self, message: Message, arrival: int) -> Request:
        """Return the request of a message, with its adapter."""
        if self.adapters is None and split(message.salt_key)[0] is not None:
            raise RequestError("this engine has no adapters; build it with lora_modules or enable_lora", param="model")
        adapter = None if self.adapters is None else self.adapters.digest(message.salt_key)
        return Request(message, self.limits, arrival=arrival, adapter=adapter)

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter that a request brings, unless its name is known; see `LoadedAdapters.load`."""
        if self.adapters is None:
            raise RequestError("this engine has no adapters; build it with enable_lora", param="lora_request")
        self.adapters.load(name, Path(folder), self.scheduler.holders())

    def abort(self, request_id: str) -> None:
        """End a request and free its pages. Unknown ids are ignored, since the request may just have finished."""
        if request_id in self.requests:
            self._end(self.requests[request_id], "aborted")

    def stop(self, request_id: str, sample: int) -> None:
        """End one sample early, for instance at a stop string.

        Args:
            request_id: id of the request; unknown ids are ignored.
            sample: number of the sample in the request.
        """
        request = self.requests.get(request_id)
        for candidate in list(request.samples) if request else []:
            if candidate.number == sample:
                self._finish(candidate)

    def _finish(self, sample: Sample) -> None:
        if len(sample.request.samples) == 1:
            self._end(sample.request, "finished")
        else:
            self.scheduler.finish(sample)

    def _end(self, request: Request, outcome: str) -> None:
        """End a request, for every outcome except a failed step, and free everything but cached and pinned blocks."""
        if request.request_id not in self._pins:
            self.scheduler.remove(request)
        if self.disk is not None:
            self.disk.drop(request)
        self.requests.pop(request.request_id, None)
        self.metrics.count_end(request, outcome)

    # The cache

    @property
    def pins(self) -> list[str]:
        """Return the ids of the precompute requests whose blocks are pinned, or are recomputed to be pinned."""
        return list(self._pins)

    def unpin(self, request_ids: Iterable[str]) -> None:
        """Let the cache evict the blocks that these precompute requests pinned. Unknown ids are ignored."""
        for request_id in request_ids:
            if request := self._pins.pop(request_id, None):
                self.scheduler.remove(request)

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
        if not checked:
            self.limits.check(message)
        request = self._request(message, 0)
        self.scheduler.placement.mark_cached(request, forget=forget)
        if forget and self.disk is not None:
            self.disk.forget(request)
        return cached_tokens(request)

    @property
    def disk_is_behind(self) -> bool:
        """Return whether the last step computed a document for the K/V store and only documents are left to compute.

        Computing is faster than writing to the store, which refuses parts when it is behind. A driver waits for the store then.
        """
        return self.disk is not None and self._persisted and all(r.precompute for r in self.requests.values())

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
        before, self._checking = self._unchecked, None
        self._concerned, self._persisted = [], False
        read = 0 if self.adapters is None else self.adapters.num_read
        try:
            self._take_read()
            planned, run = self._ahead.take(), None
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
                self._check_last()
                self.meter.finish()  # the device is idle
            if (new := self.runner.compiles.total() - compiled) and spans:
                logger.info("a step compiled or loaded %d programs, in %.1f s", new, time.perf_counter() - began)
            checked = [] if before is None else before[0].spans
            self.isolation.step_done(self._is_alive, max(len(checked), len(spans) if self._unchecked is None else 0))
        except Exception as error:
            if self._ends_hosts(error):
                raise
            self._blame(error, spans if self._checking is None else self._checking)
        except BaseException:  # an interrupt fails no request, but may lose the donated pool
            self._recover([])
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _compute(self, step: Step, began: float, compiled: int) -> None:
        """Compute a step and conclude it.

        Args:
            step: the step.
            began: time at which the host began, in seconds on the clock of `time.perf_counter`.
            compiled: number of programs compiled then.
        """
        self.runs.slow_down()
        self.metrics.host_time.observe(time.perf_counter() - began)
        self.meter.add(began, len(step.arrays.token_ids), step.area)
        hidden, finite = self.runner.forward(step.arrays)
        self.scheduler.sent(step.spans)
        reading, before = start_reading(self.runner, step, hidden, finite), self._unchecked
        self._check_last()
        self.metrics.count_step(step)
        self._conclude(step, reading)
        # The time of a step counts when its results have arrived, without compilation, on the engine's backend.
        if self.runner.compiles.total() > compiled or step.arrays.backend is not None:
            self.meter.forget()
        elif self._unchecked is None:
            self.meter.finish()
            self.runs.note(step, time.perf_counter() - began)
        elif before is not None and before[0].is_read:
            self.meter.finish((len(step.arrays.token_ids), step.area))
        self.metrics.steps.inc()
        self.metrics.step_time.observe(time.perf_counter() - began)

    def _schedule(self) -> list[Span]:
        """Plan a step. Return its spans; empty if there is nothing to compute."""
        self._concerned = []
        spans = self.scheduler.plan(self._rows_beside_decodes)
        if not spans and self._unchecked is None:
            self._take_read(_DISK_WAIT_S)  # avoids a busy loop while parts are read from disk
        return spans

    def _place(self) -> None:
        """Place waiting requests, and end those that can never be placed."""
        if self._unchecked is not None and self.scheduler.waiting and self._unchecked[0].ends_scores:
            self._check_last()  # the requests that wait take the room of those that end
            self.meter.finish()
        self._admit()
        while request := self.scheduler.stuck:
            lacks_states = self.scheduler.placement.lacks_states
            self._end(request, "failed")
            self._outputs.append(stuck(request, lacks_states=lacks_states))
            self._admit()
        self._finish_precomputed()

    def _rows_beside_decodes(self) -> int:
        return self.meter.rows_within(self.config.max_decode_gap_s)

    def _plan_ahead(self, step: Step) -> None:
        """Plan the step after one that the device computes, if that can be foreseen.

        An error waits for the end of the readout, whose programs the hosts of the model run together.
        """
        if self.isolation.has_suspects or self.runs.expects():
            return
        try:
            self._ahead.plan(step, self._rows_beside_decodes, self._is_alive)
        except Exception as error:
            self._planning_error = error

    def _check_last(self) -> None:
        """Read, check and commit the step before this one, unless that has been done."""
        if self._unchecked is None:
            return
        (step, reading), self._unchecked = self._unchecked, None
        concerned, self._checking = self._concerned, step.spans
        self._concerned = [span.sample.request for span in step.spans]
        self._finish_step(step, reading, late=True)
        self._concerned, self._checking = concerned, None

    def _conclude(self, step: Step, reading: Reading[StepResult]) -> None:
        """Finish a step that draws tokens, and leave any other until the next step is on the device.

        Steps of a backend that a request names, and of requests that run alone, are finished at once, too.

        Args:
            step: step that has been dispatched.
            reading: its readouts.
        """
        at_once = step.samples or step.arrays.backend is not None or (step.is_read and self.isolation.has_suspects)
        if not at_once:
            self._unchecked = step, reading
            return
        self.runner.while_waiting = partial(self._plan_ahead, step)
        self._finish_step(step, reading)

    def _finish_step(self, step: Step, reading: Reading[StepResult], *, late: bool = False) -> None:
        """Wait for the values of a step, hand them to its requests, and end the requests that are complete.

        Args:
            step: oldest step that is not committed.
            reading: its readouts.
            late: whether requests may have been aborted since the step was sent.
        """
        result = reading.finish(self.runner.fetch(reading.arrays))
        if (error := self._planning_error) is not None:
            raise error
        taken = self._commit(step, result.finite)
        for span, rows in step.rows() if late else ():
            if not self._is_alive(span.sample.request):
                taken[rows] = False
        self._outputs += collect(step, result, taken, self.meter)
        drawn = [(row, *token) for row, token in zip(step.samples, result.tokens, strict=True) if taken[row[0]]]
        self._fork([row for row, _, _ in drawn])
        self._finish_scored(step, taken)
        for row, token, logprobs in drawn:
            if ended := accept_tokens(row, (token,), logprobs, self._outputs, self.metrics):
                self._finish(ended)
        self._finish_precomputed()

    def _commit(self, step: Step, finite: np.ndarray) -> np.ndarray:
        """Fail the requests with a row that is not finite, and mark the tokens of the step as computed.

        Args:
            step: oldest step that is not committed.
            finite: bool `[T]`, False for rows with a value that is not finite.

        Returns:
            bool `[T]`, whether the values of a row count.
        """
        failed = step.not_finite(finite)
        self._fail(failed)
        complete = self.scheduler.commit()
        if failed or not complete:  # some tokens are computed again
            self._ahead.drop()
        self._discard(failed)
        if self.disk is not None:
            self.disk.save(step.spans)
        return np.ones(len(finite), bool) if complete and not failed else step.computed_rows(self._is_alive)

    def _fail(self, failed: Mapping[Request, tuple[int, int]]) -> None:
        """End requests with a token whose values are not finite.

        Args:
            failed: for each request index and id of its first such token.
        """
        for request, (index, token_id) in failed.items():
            request.finite_end = min(request.finite_end, index)
            if self._is_alive(request):
                self._drop_pin(request)
                self._end(request, "failed")
                self.metrics.non_finite.inc()
                self._outputs.append(not_finite(request, token_id, self.runner.dtype))

    def _discard(self, failed: Iterable[Request]) -> None:
        """Forget what failed requests computed, in memory and on disk."""
        for request in failed:
            self.scheduler.placement.discard(request, [*self.scheduler.running, *self.scheduler.pinned])
            if self.disk is not None:
                self.disk.discard(request)

    def _decode(self, run: Run, began: float) -> None:
        """Wait for a run of decodes, and hand its tokens to their requests. The next run is planned meanwhile.

        Args:
            run: the run; it may be on the device already.
            began: time at which the host began, in seconds on the clock of `time.perf_counter`.
        """
        if run.decoded is None:
            self.runs.send(run)
        host = time.perf_counter() - began
        self._check_last()
        self.runs.follow(run)
        result = self.runs.read(run)
        failed = run.failed(result)
        kept = [row for row, tokens in enumerate(result.tokens) if tokens and run.rows[row].is_current]
        self.runs.commit(run, result, [row for row in kept if run.rows[row].sample.request not in failed], self.disk)
        for row in sorted(kept, key=lambda row: len(result.tokens[row])):  # in the order of their ends
            sample, tokens = run.rows[row].sample, tuple(result.tokens[row])
            if sample.request in failed:  # the last decode fails for all of its samples
                tokens = tokens[: result.number - 1]
            logprobs = None if sample.params.logprobs is None else result.logprobs_of(row, sample.params.logprobs)
            for part, values in split_at_stops(sample, tokens, logprobs):
                if ended := accept_tokens((row, sample, sample.number), part, values, self._outputs, self.metrics):
                    self._finish(ended)
        self._fail(failed)
        self._discard(failed)
        if run.is_timed:
            self.meter.record(result.number, run.size * result.number, result.seconds)
        if result.number:
            counts = [len(result.tokens[row]) for row in kept]
            self.metrics.count_run(run.size, counts, result.number, time.perf_counter() - began, host)

    def _finish_scored(self, step: Step, taken: np.ndarray) -> None:
        """End the scoring requests whose last token is computed.

        Args:
            step: the step.
            taken: bool `[T]`, whether the values of a row count.
        """
        for (sample, _, end, _), rows in step.rows():
            if sample.request.score and end == sample.num_tokens and taken[rows.stop - 1]:
                self._finish(sample)

    def _ends_hosts(self, error: Exception) -> bool:
        """Return whether an error leaves the hosts of the model apart: the devices failed, perhaps on one host alone."""
        return self.runner.tell is not None and isinstance(error, jax.errors.JaxRuntimeError)

    def _blame(self, error: Exception, spans: list[Span]) -> None:
        """Recover from an exception, and fail every request that failed alone.

        Args:
            error: the exception.
            spans: tokens that the step computes.
        """
        logger.exception("a step of %d requests failed", len(self._concerned))
        self.metrics.failed_steps.inc()
        answered = {output.request_id for output in self._outputs}
        concerned = [r for r in dict.fromkeys(self._concerned) if self._is_alive(r) or r.request_id not in answered]
        failed = self.isolation.blame(concerned or [*self.requests.values(), *self._pins.values()], spans)
        self._recover(failed)
        by_name, reason = {r.request_id: r for r in failed}, f"{type(error).__name__}: {error}"
        self._outputs = [output for output in self._outputs if output.request_id not in by_name]
        self._outputs += [RequestFailed(name, reason, stats=request_stats(by_name[name])) for name in sorted(by_name)]

    def _is_alive(self, request: Request) -> bool:
        name = request.request_id
        return self.requests.get(name) is request or self._pins.get(name) is request

    def _admit(self) -> None:
        """Place the waiting requests that fit, and fetch their parts from disk."""
        while request := self._next_admitted():
            self._concerned.append(request)
            if request.admitted_at is None:
                request.admitted_at = time.perf_counter()
                self.metrics.queue_time.observe(request.admitted_at - request.added_at)
            if self.disk is not None:
                self.disk.load(request)

    def _next_admitted(self) -> Request | None:
        """Place the next waiting request and return it; None if it has to wait. A request that has lost its adapter fails."""
        while True:
            try:
                return self.scheduler.admit()
            except LostAdapterError as error:
                request = error.request
                self._drop_pin(request)
                self._end(request, "failed")
                stats = request_stats(request)
                self._outputs.append(RequestFailed(request.request_id, str(error), "lora_request", stats=stats))

    def _take_read(self, timeout: float = 0.0) -> None:
        """Queue the requests whose parts have been read from disk."""
        for request in self.disk.take_read(timeout) if self.disk is not None else ():
            self.scheduler.add(request)

    def close_disk(self) -> None:
        """Write pending parts to the KV store and close it. The engine continues without a store."""
        if self.disk is not None:
            disk, self.disk = self.disk, None
            for request in disk.close():
                self.scheduler.add(request)

    def _fork(self, rows: list[SampleRow]) -> None:
        """Split the requests whose prompts are complete into their samples, before the first tokens are accepted."""
        copies = []
        for request in dict.fromkeys(sample.request for _, sample, number in rows if number != sample.number):
            copies += self.scheduler.placement.fork(request)
        if copies:
            self.runner.pool.copy_pages(copies)
        if self.runner.states is not None and (tracks := self.scheduler.take_forked()):
            self.runner.states.copy(tracks)

    def _finish_precomputed(self) -> None:
        """Answer the precompute requests whose blocks are all complete, including blocks that other requests computed."""
        for request in [r for r in self.scheduler.running if r.precompute]:
            if request.samples[0].num_computed < len(request.layout):
                continue
            if request.request_id in self._pins:  # recomputed after a failure
                self.scheduler.pin(request)
                continue
            self.scheduler.placement.note_states(request, request.samples[0].parts)
            cached = cached_tokens(request)
            self.metrics.count_cached(cached, request.layout)
            self._outputs.append(PrecomputeResult(request.request_id, cached, request_stats(request)))
            self._persisted |= request.precompute is not None and request.precompute.persist
            if request.precompute and request.precompute.pin:
                self._pins[request.request_id] = request
                self.scheduler.pin(request)
            self._end(request, "finished")

    def _drop_pin(self, request: Request) -> None:
        """Stop pinning the blocks of a request that has failed; otherwise it would be recomputed and fail forever."""
        if self._pins.pop(request.request_id, None):
            logger.warning("precomputed documents of request %s are no longer pinned", request.request_id)

    def _recover(self, failed: Iterable[Request]) -> None:
        """Drop the donated pool and the failed requests, and restart all other requests on a fresh pool."""
        COMPILING.settle()
        self.meter.forget()
        self._ahead.forget()
        self.runs.forget()
        self.runner.while_waiting = self._unchecked = self._planning_error = None
        for request in failed:
            if self.disk is not None:
                self.disk.drop(request)
            self._drop_pin(request)
            if self.requests.pop(request.request_id, None):
                self.metrics.count_end(request, "failed")
        reading = self.disk.reading if self.disk is not None else frozenset()
        self.scheduler.restart([*(r for r in self.requests.values() if r not in reading), *self._pins.values()])
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
