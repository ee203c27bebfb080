"""`Ahead`: plans the next step while the device computes the present one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkattn.engine.request import Request, Sample
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.step import Step, StepBuilder

_UNKNOWN = 0
"""Token that stands for one that the device has still to draw."""


@dataclass(frozen=True)
class _Planned:
    """A step that is planned before the tokens of the step before it are known.

    Attributes:
        step: the step.
        changes: `Scheduler.changes` at the time when it begins, if nothing unforeseen happens.
        unknown: rows of tokens that were unknown, with the sample of each.
    """

    step: Step
    changes: int
    unknown: list[tuple[int, Sample]]


class Ahead:
    """Planner of a step whose samples go on as foreseen: each gets one token, and ends only at its `max_tokens`.

    If anything else happens, such as a new request or the end of a text, the plan is dropped and the step planned anew. So
    steps are the same as without planning ahead, and so are their order and their bits.

    Source: the asynchronous schedulers of SGLang and vLLM, which also run a step before the tokens of the last one are known.

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
        scheduler = self._scheduler
        if scheduler.uncached or any(r.precompute for r in scheduler.running):
            return
        going, ending = list[Sample](), 0
        for _, sample, number in step.samples:
            request = sample.request
            if request.forks or number != sample.number:
                return
            if not is_alive(request) or sample not in request.samples:
                continue
            if len(sample.output_ids) + 1 >= request.max_tokens:
                ending += 1
            else:
                going.append(sample)
        ending += sum(bool(s.request.score) and end == s.num_tokens and is_alive(s.request) for s, _, end in step.spans)
        if ending and scheduler.waiting:  # they get the room
            return
        for sample in going:
            sample.output_ids.append(_UNKNOWN)
        try:
            spans = scheduler.plan(beside_decodes) if scheduler.can_grow() else []
            if not spans:
                return
            following, waiting = self._builder.build(spans), set(going)
            unknown = [
                (rows.stop - 1, span.sample)
                for span, rows in following.rows()
                if span.sample in waiting and span.end == span.sample.num_tokens
            ]
            self._planned = _Planned(following, scheduler.changes + ending, unknown)
        finally:
            for sample in going:
                sample.output_ids.pop()

    def take(self) -> Step | None:
        """Return the planned step if everything went as foreseen; otherwise drop it."""
        planned, self._planned = self._planned, None
        if planned is None:
            return None
        if planned.changes != self._scheduler.changes:
            self._scheduler.unplan()
            return None
        for row, sample in planned.unknown:
            planned.step.arrays.token_ids[row] = sample.output_ids[-1]
        return planned.step

    def drop(self) -> None:
        """Forget the planned step, after the scheduler has forgotten it."""
        self._planned = None
