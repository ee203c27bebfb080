"""`Completion`: reads the values of steps and of runs of decodes, and hands them to their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from chunkattn.engine.ahead import Ahead
from chunkattn.engine.isolation import not_finite
from chunkattn.engine.lifetimes import Lifetimes
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.readout import StepResult, accept_tokens, collect, split_at_stops
from chunkattn.engine.request import Request
from chunkattn.engine.row_reader import Reading
from chunkattn.engine.runner import Runner
from chunkattn.engine.runs import Run, RunResult, Runs
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.step import SampleRow, Span, Step
from chunkattn.structured_outputs import PARAM


class Completion:
    """Completes what the device computes, in order, and ends the requests that are complete.

    Args:
        runner: runner of the steps.
        scheduler: scheduler of the requests.
        lifetimes: requests that have not ended.
        ahead: planner of the step after one that the device computes.
        runs: planner of runs of decodes.
        meter: meter whose rates score results carry.
        metrics: metrics of the engine.

    Attributes:
        pending: step that may still run on the device, with its readouts; None for none.
        reading: spans of that step while its values are read.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        lifetimes: Lifetimes,
        ahead: Ahead,
        runs: Runs,
        meter: RateMeter,
        metrics: EngineMetrics,
    ) -> None:
        self._runner, self._scheduler, self._lifetimes = runner, scheduler, lifetimes
        self._ahead, self._runs, self._meter, self._metrics = ahead, runs, meter, metrics
        self._planning_error: Exception | None = None
        self.forget()

    def forget(self) -> None:
        """Forget the step on the device, whose values are lost."""
        self.pending: tuple[Step, Reading[StepResult]] | None = None
        self.reading: list[Span] | None = None
        self._planning_error = self._runner.while_waiting = None

    # Steps

    def complete(self, step: Step, reading: Reading[StepResult], meanwhile: Callable[[], None]) -> None:
        """Complete a step now.

        Args:
            step: step that has been sent.
            reading: its readouts.
            meanwhile: called while the device computes. An error of it waits for the end of the readout, whose programs the
                hosts of the model run together.
        """

        def call() -> None:
            try:
                meanwhile()
            except Exception as error:
                self._planning_error = error

        self._runner.while_waiting = call
        self._finish(step, reading)

    def complete_pending(self) -> None:
        """Read, check and commit the step before the latest one, unless that has been done."""
        if self.pending is None:
            return
        (step, reading), self.pending = self.pending, None
        self.reading = step.spans
        self._finish(step, reading, late=True)
        self.reading = None

    def _finish(self, step: Step, reading: Reading[StepResult], *, late: bool = False) -> None:
        """Wait for the values of a step, hand them to its requests, and end the requests that are complete.

        Args:
            step: oldest step that is not committed.
            reading: its readouts.
            late: whether requests may have been aborted since the step was sent.
        """
        result, lifetimes = reading.finish(self._runner.fetch(reading.arrays)), self._lifetimes
        if (error := self._planning_error) is not None:
            raise error
        taken = self._commit(step, result.finite)
        for span, rows in step.rows() if late else ():
            if not lifetimes.is_alive(span.sample.request):
                taken[rows] = False
        lifetimes.outputs += collect(step, result, taken, self._meter)
        drawn = [(row, *token) for row, token in zip(step.samples, result.tokens, strict=True) if taken[row[0]]]
        self._fork([row for row, _, _ in drawn])
        for (sample, _, end, _), rows in step.rows():
            if sample.request.score and end == sample.num_tokens and taken[rows.stop - 1]:
                lifetimes.finish(sample)
        for row, token, logprobs in drawn:
            request, matcher = row[1].request, row[1].matcher
            if matcher is not None and lifetimes.is_alive(request) and (reason := matcher.error):
                lifetimes.refuse_shape(request, f"{PARAM}: {reason}")
            if request.grammar is not None and not lifetimes.is_alive(request):
                continue
            if ended := accept_tokens(row, (token,), logprobs, lifetimes.outputs, self._metrics):
                lifetimes.finish(ended)
        lifetimes.finish_precomputed()

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
        complete = self._scheduler.fills.commit()
        if failed or not complete:  # some tokens are computed again
            self._ahead.drop()
        self._discard(failed)
        if self._lifetimes.disk is not None:
            self._lifetimes.disk.save(step.spans)
        return np.ones(len(finite), bool) if complete and not failed else step.computed_rows(self._lifetimes.is_alive)

    def _fork(self, rows: list[SampleRow]) -> None:
        """Split the requests whose prompts are complete into their samples, before the first tokens are accepted."""
        copies = []
        for request in dict.fromkeys(sample.request for _, sample, number in rows if number != sample.number):
            copies += self._scheduler.placement.fork(request)
        if copies:
            self._runner.pool.copy_pages(copies)
        if self._runner.states is not None and (tracks := self._scheduler.take_forked()):
            self._runner.states.copy(tracks)

    # Runs

    def complete_run(self, run: Run, result: RunResult) -> list[int]:
        """Mark the decodes of a run as computed, and hand its tokens to their requests.

        Args:
            run: the run.
            result: its values.

        Returns:
            Number of tokens of each row that counts.
        """
        failed, lifetimes = run.failed(result), self._lifetimes
        kept = [row for row, tokens in enumerate(result.tokens) if tokens and run.rows[row].is_current]
        finite = [row for row in kept if run.rows[row].sample.request not in failed]
        self._runs.commit(run, result, finite, lifetimes.disk)
        for row in sorted(kept, key=lambda row: len(result.tokens[row])):  # in the order of their ends
            sample, tokens = run.rows[row].sample, tuple(result.tokens[row])
            if sample.request in failed:  # the last decode fails for all of its samples
                tokens = tokens[: result.number - 1]
            logprobs = None if sample.params.logprobs is None else result.logprobs_of(row, sample.params.logprobs)
            for part, values in split_at_stops(sample, tokens, logprobs):
                if ended := accept_tokens((row, sample, sample.number), part, values, lifetimes.outputs, self._metrics):
                    lifetimes.finish(ended)
        self._fail(failed)
        self._discard(failed)
        return [len(result.tokens[row]) for row in kept]

    # Values that are not finite

    def _fail(self, failed: Mapping[Request, tuple[int, int]]) -> None:
        """End requests with a token whose values are not finite.

        Args:
            failed: for each request index and id of its first such token.
        """
        for request, (index, token_id) in failed.items():
            request.finite_end = min(request.finite_end, index)
            if self._lifetimes.is_alive(request):
                self._lifetimes.fail(request, not_finite(request, token_id, self._runner.dtype))
                self._metrics.non_finite.inc()

    def _discard(self, failed: Iterable[Request]) -> None:
        """Forget what failed requests computed, in memory and on disk."""
        for request in failed:
            self._scheduler.placement.discard(request, [*self._scheduler.running, *self._scheduler.pinned])
            if self._lifetimes.disk is not None:
                self._lifetimes.disk.discard(request)
