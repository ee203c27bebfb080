"""`Ahead`: plans the next step while the device computes the present one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkattn.engine.request import Request, Sample
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.step import Step, StepBuilder

_UNKNOWN = 0
"""Placeholder for a token that the device has not drawn yet."""


@dataclass(frozen=True)
class _Planned:
    """A step that is planned before the tokens of the step before it are known.

    Attributes:
        step: the step.
        changes: `Scheduler.changes` when the step begins, if the foreseen ends are the only ones.
        lengths: number of generated tokens that each continuing sample then has.
        unknown: rows of tokens that were unknown, with the sample of each.
    """

    step: Step
    changes: int
    lengths: dict[Sample, int]
    unknown: list[tuple[int, Sample]]


class Ahead:
    """Planner of a step whose samples go on as foreseen: each gets one token, and ends only at its `max_tokens`.

    If anything else happens, such as a new request or the end of a text, the plan is dropped and the step planned anew. So the
    steps are those of planning afterwards, in the same order. A cached block may be evicted a step earlier, and a limit of rows
    comes from earlier measurements.

    Source: the asynchronous schedulers of SGLang and vLLM, which also prepare a step before the tokens of the last one are
    known.

    Args:
        scheduler: scheduler of the engine.
        builder: builder of steps.
    """

    def __init__(self, scheduler: Scheduler, builder: StepBuilder) -> None:
        self._scheduler, self._builder = scheduler, builder
        self._planned: _Planned | None = None

    def plan(self, step: Step, beside_decodes: Callable[[], int], is_alive: Callable[[Request], bool]) -> None:
        """Plan the step after one that the device computes.

        Args:
            step: the present step, which is not committed.
            beside_decodes: see `Scheduler.plan`.
            is_alive: returns whether a request has not ended.
        """
        scheduler, ending = self._scheduler, 0
        if scheduler.uncached or any(r.precompute for r in scheduler.running):
            return
        going: list[Sample] = []
        for _, sample, number in step.samples:
            request = sample.request
            if request.forks or number != sample.number:
                return
            if is_alive(request) and sample in request.samples:
                if len(sample.output_ids) + 1 < request.max_tokens:
                    going.append(sample)
                else:
                    ending += 1
        ending += sum(bool(s.request.score) and end == s.num_tokens and is_alive(s.request) for s, _, end, _ in step.spans)
        if ending and scheduler.waiting:  # the requests that wait will take their room
            return
        lengths = {sample: len(sample.output_ids) + 1 for sample in going}
        try:
            for sample in going:
                sample.output_ids.append(_UNKNOWN)
            if spans := scheduler.plan_ahead(beside_decodes):
                following = self._builder.build(spans)
                unknown = [
                    (rows.stop - 1, span.sample)
                    for span, rows in following.rows()
                    if span.sample in lengths and span.end == span.sample.num_tokens
                ]
                self._planned = _Planned(following, scheduler.changes + ending, lengths, unknown)
        finally:
            for sample, length in lengths.items():
                del sample.output_ids[length - 1 :]

    def take(self) -> Step | None:
        """Return the planned step if everything went as foreseen; otherwise drop it."""
        if (planned := self._planned) is None:
            return None
        if planned.changes != self._scheduler.changes or any(
            len(sample.output_ids) != length for sample, length in planned.lengths.items()
        ):
            self.drop()
            return None
        for row, sample in planned.unknown:
            planned.step.arrays.token_ids[row] = sample.output_ids[-1]
        self._planned = None
        return planned.step

    def drop(self) -> None:
        """Drop the planned step, if there is one."""
        if self._planned is not None:
            self._planned = None
            self._scheduler.unplan()

    def forget(self) -> None:
        """Forget the planned step, after the scheduler has restarted."""
        self._planned = None
