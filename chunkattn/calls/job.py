"""`Job`: the requests of one call, sent stage by stage, and the result made from their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from chunkattn.engine.messages import CachedTokens, EngineOutput, Message, PrecomputeRequest

T_co = TypeVar("T_co", covariant=True)


StopSample = Callable[[str, int], None]
"""Ends a sample early, given the id of its request and its number."""

STAGE_STEPS = 4
"""Tokens of one stage, in steps' worth: other requests wait for at most this much of a long job at a time."""
STAGE_LAYOUT = 1 << 20
"""Tokens of the layouts of one stage, shared parts counted in every request: a layout takes 8 bytes per token."""


class Job(Protocol[T_co]):
    """Call of any kind, driven by `LLM` and `AsyncLLM` alike.

    The driver sends one stage, passes every output of its requests to `take`, and sends the next stage when all requests have
    ended. After the last stage it returns `result`. A driver that fails unpins `pins`.

    Attributes:
        unit: name of the things that `total` and `done` count.
    """

    unit: str

    @property
    def total(self) -> int:
        """Return the number of prompts, items or documents."""
        ...

    @property
    def done(self) -> int:
        """Return the number of prompts, items or documents that have ended."""
        ...

    @property
    def pins(self) -> Sequence[str]:
        """Return the ids of requests whose documents stay pinned."""
        ...

    def stages(self) -> Iterator[Sequence[Message]]:
        """Yield the stages in order, each a sequence of requests.

        Raises:
            RequestError: a request exceeds a limit.
        """
        ...

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Process one output of a request that has not failed, and return whether the output was the last of its request.

        Args:
            output: output of the engine.
            stop: called for a sample whose text ended at a stop string, which the engine then must end, too.
        """
        ...

    def result(self) -> T_co:
        """Return the result of the call, after every request has ended."""
        ...


class JobsInTurn:
    """Part of a job that runs other jobs one after another.

    Args:
        jobs: jobs without pins, in order.
    """

    pins: Sequence[str] = ()

    def __init__(self, jobs: Sequence[Job[Any]]) -> None:
        self._jobs, self._running = jobs, 0
        self.total = sum(job.total for job in jobs)

    @property
    def done(self) -> int:
        """Return the number of things that have ended."""
        return sum(job.done for job in self._jobs)

    def lookups(self) -> Iterator[Sequence[PrecomputeRequest]]:
        """Yield the look-ups of each job in turn."""
        for place, job in enumerate(self._jobs):
            if isinstance(job, AskingJob):
                self._running = place
                yield from job.lookups()

    def decide(self, asked: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Pass the cached tokens to the job that asked."""
        job = self._jobs[self._running]
        assert isinstance(job, AskingJob)
        job.decide(asked, cached)

    def stages(self) -> Iterator[Sequence[Message]]:
        """Yield the stages of each job in turn."""
        for place, job in enumerate(self._jobs):
            self._running = place
            yield from job.stages()

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Pass an output to the job that runs."""
        return self._jobs[self._running].take(output, stop)


@runtime_checkable
class AskingJob(Protocol):
    """Job whose stages may depend on what is cached.

    Before the first stage, the driver passes the engine's answer to each list of `lookups` to `decide`. A driver that asks
    nothing gets stages that are right, and may be slower.
    """

    def lookups(self) -> Iterator[Sequence[PrecomputeRequest]]:
        """Yield requests to look up in the cache; nothing is computed."""
        ...

    def decide(self, asked: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Process the cached tokens of each request."""
        ...
