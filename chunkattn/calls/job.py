"""`Job`: the requests of one call, sent stage by stage, and the result made from their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from chunkattn.engine.messages import CachedTokens, EngineOutput, Message, PrecomputeRequest

T_co = TypeVar("T_co", covariant=True)

StopSample = Callable[[str, int], None]
"""Function that ends a sample early, from the id of its request and its number there."""


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
        """Process one output of a request that has not failed.

        Args:
            output: output of the engine.
            stop: has the engine end a sample whose text ended at a stop string.

        Returns:
            Whether the output was the last of its request.
        """
        ...

    def result(self) -> T_co:
        """Return the result of the call, after every request has ended."""
        ...


@runtime_checkable
class AskingJob(Protocol):
    """Job whose stages depend on what is cached.

    Before the first stage of an undecided job, the driver passes the engine's answer to each list of `lookups` to `decide`. A
    driver that asks nothing gets stages that are right, and may be slower.
    """

    @property
    def is_undecided(self) -> bool:
        """Return whether `lookups` yields anything."""
        ...

    def lookups(self) -> Iterator[Sequence[PrecomputeRequest]]:
        """Yield requests to look up in the cache; nothing is computed."""
        ...

    def decide(self, asked: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Process the cached tokens of each request."""
        ...
