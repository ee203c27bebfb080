"""The job of one call: the requests it sends, stage by stage, and the result that it makes of their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from chunkattn.engine.messages import EngineOutput, Message

T_co = TypeVar("T_co", covariant=True)


class Taken(NamedTuple):
    """Consequences of an engine output.

    Attributes:
        ended: the output was the last of its request.
        stop: a sample whose text has ended at a stop string: the engine must end it, too.
    """

    ended: bool
    stop: int | None = None


class Job(Protocol[T_co]):
    """A call of any kind, driven by `LLM` and `AsyncLLM` alike.

    The driver sends one stage, gives `take` every output of its requests, and goes on to the next stage when all of them
    have ended. After the last stage it returns `result`. A driver that fails unpins `pins`.

    Attributes:
        unit: name of what `total` and `done` count.
    """

    unit: str

    @property
    def total(self) -> int:
        """Number of prompts, items or documents."""
        ...

    @property
    def done(self) -> int:
        """Number of them that have ended."""
        ...

    @property
    def pins(self) -> Sequence[str]:
        """Ids of requests whose documents stay pinned."""
        ...

    def stages(self) -> Iterator[Sequence[Message]]:
        """Make the requests of one stage after the other.

        Raises:
            RequestError: a request exceeds a limit.
        """
        ...

    def take(self, output: EngineOutput) -> Taken:
        """Take one output of a request that has not failed."""
        ...

    def result(self) -> T_co:
        """Return the result of the call; every request has ended."""
        ...
