"""Calls as flows: generators that yield what they ask of the engine, and return their result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from chunkattn.engine.messages import EngineOutput, Message, PrecomputeRequest, RequestFailed
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from chunkattn.engine.core import EngineCore

E = TypeVar("E")
Q = TypeVar("Q")
M = TypeVar("M", bound=Message)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

StopSample = Callable[[str, int], None]
"""Ends a sample early, given the id of its request and its number."""

STAGE_STEPS = 4
"""Tokens of one stage, in steps' worth: other requests wait for at most this much of a long job at a time."""
STAGE_LAYOUT = 1 << 20
"""Tokens of the layouts of one stage, shared parts counted in every request: a layout takes 8 bytes per token."""


@dataclass(eq=False)
class Ask:
    """Stage of requests to run. The flow goes on with `answer` when all of them have ended.

    Attributes:
        requests: the requests.
        on_output: handles an output and returns whether it was the last of its request; None for requests of one output each.
    """

    requests: Sequence[Message]
    on_output: Callable[[EngineOutput, StopSample], bool] | None = None
    _outputs: dict[str, EngineOutput] = field(default_factory=dict)

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Process one output of a request that has not failed, and return whether the output was the last of its request.

        Args:
            output: output of the engine.
            stop: called for a sample whose text ended at a stop string, which the engine then must end, too.
        """
        if self.on_output is not None:
            return self.on_output(output, stop)
        self._outputs[output.request_id] = output
        return True

    @property
    def pins(self) -> list[str]:
        """Return the ids of the requests that pin what they compute."""
        return [request.request_id for request in self.requests if isinstance(request, PrecomputeRequest) and request.pin]

    @property
    def answer(self) -> list[EngineOutput]:
        """Return the output of each request, in order; nothing with `on_output`."""
        return [] if self.on_output else [self._outputs[request.request_id] for request in self.requests]


@dataclass(frozen=True, eq=False)
class LookUp:
    """Requests to look up in the cache; nothing is computed. The flow goes on with the `CachedTokens` of each.

    Attributes:
        requests: the requests.
        forget: whether the engine forgets what the requests name.
    """

    requests: Sequence[PrecomputeRequest]
    forget: bool = False
    pins: ClassVar[Sequence[str]] = ()


@dataclass(frozen=True, eq=False)
class CheckShape:
    """Shape of a text, which is compiled before the requests that have it run. The flow goes on if the shape is accepted.

    Attributes:
        shape: the shape.
        vocabulary: vocabulary of the model.
    """

    shape: StructuredOutputsParams
    vocabulary: Vocabulary
    pins: ClassVar[Sequence[str]] = ()


Question = Ask | LookUp | CheckShape
Flow = Generator[Question, Any, T]
"""Call on its way: it is sent the answer to each question that it yields, and returns the result of the call."""


class Job(Protocol[T_co]):
    """Call whose arguments have been checked; `LLM.run` and `AsyncLLM.run` drive its flow.

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

    def flow(self) -> Flow[T_co]:
        """Return the flow of the call, once.

        Raises:
            RequestError: a request exceeds a limit.
        """
        ...


class JobsInTurn(Generic[E, T]):
    """Job that runs other jobs one after another.

    Args:
        jobs: jobs of one unit, in order.
        finish: makes the result of the job from theirs.
        tokens: tokens of all jobs, cached or not.
    """

    def __init__(self, jobs: Sequence[Job[E]], finish: Callable[[list[E]], T], tokens: int = 0) -> None:
        self._jobs, self._finish, self.tokens = jobs, finish, tokens
        self.unit, self.total = jobs[0].unit, sum(job.total for job in jobs)

    @property
    def done(self) -> int:
        """Return the number of things that have ended."""
        return sum(job.done for job in self._jobs)

    def flow(self) -> Flow[T]:
        """Run the jobs, and return what `finish` makes of their results."""
        results: list[E] = []
        for job in self._jobs:
            results += [(yield from job.flow())]
        return self._finish(results)


class Returned(NamedTuple, Generic[T]):
    """End of a flow: `StopIteration` cannot cross the future of a thread.

    Attributes:
        value: what the flow returned.
    """

    value: T


def advance(flow: Generator[Q, Any, T], answer: Any = None) -> Q | Returned[T]:
    """Run a flow up to its next question or its end.

    Args:
        flow: flow of a call, or another generator of questions.
        answer: answer to the question before; None at the beginning.
    """
    try:
        return flow.send(answer)
    except StopIteration as end:
        return Returned(end.value)


def drive(flow: Generator[Q, Any, T], answer: Callable[[Q], Any]) -> T:
    """Run a flow and return its result.

    Args:
        flow: flow of a call, or another generator of questions.
        answer: function that answers a question.
    """
    known = None
    while True:
        try:
            question = flow.send(known)
        except StopIteration as end:
            result: T = end.value
            return result
        known = answer(question)


def answer(core: EngineCore, question: Question, on_step: Callable[[], object] = lambda: None) -> list[Any]:
    """Return the answer of an engine in this process to a question.

    Args:
        core: the engine, which no other thread uses meanwhile.
        question: question of a flow.
        on_step: called after every step.

    Raises:
        CapacityError: a request does not fit beside pinned documents.
        EngineError: a step failed. No request of the question is left in the engine.
        RequestError: a shape is refused.
    """
    if isinstance(question, CheckShape):
        core.shapes.know(question.vocabulary).compile(question.shape)
        return []
    if isinstance(question, LookUp):
        return [core.look_up(request, forget=question.forget, checked=True) for request in question.requests]
    names = {request.request_id for request in question.requests}
    try:
        for request in question.requests:
            core.add(request, checked=True)
        while core.has_work:
            for output in core.step():
                if output.request_id in names:
                    if isinstance(output, RequestFailed):
                        raise output.error()
                    question.take(output, core.stop)
            on_step()
            if core.disk is not None and core.disk_is_behind:
                core.disk.catch_up()
    finally:
        for name in names:
            core.abort(name)
    return question.answer


def together(
    flows: Sequence[Flow[T]], most: int | None = None, size: Callable[[Any], int] = lambda request: len(request.layout)
) -> Flow[list[T]]:
    """Run flows at once: the first stages of all as one stage, then the second ones, and so on.

    Args:
        flows: flows that look up nothing, and whose requests have one output each.
        most: limit on the tokens of a stage, above which it is divided; None for no limit.
        size: function that returns the tokens of a request.
    """
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(flows)))
    while answers:
        asked: dict[int, Ask] = {}
        for number, answer in answers.items():
            try:
                question = flows[number].send(answer)
            except StopIteration as end:
                results[number] = end.value
                continue
            assert isinstance(question, Ask)
            asked[number] = question
        requests = [request for question in asked.values() for request in question.requests]
        outputs: list[EngineOutput] = []
        for stage in bounded(requests, (most, size)):
            outputs += yield Ask(stage)
        left = iter(outputs)
        answers = {number: list(islice(left, len(question.requests))) for number, question in asked.items()}
    return [results[number] for number in range(len(flows))]


def bounded(entries: Iterable[E], *bounds: tuple[int | None, Callable[[E], int]]) -> Iterator[list[E]]:
    """Yield consecutive entries in lists; an entry that exceeds a bound stands alone.

    Args:
        entries: the entries, which are taken one by one.
        *bounds: limits on the sums of a list, each with the function that returns the size of an entry; None for no limit.
    """
    taken: list[E] = []
    sums = [0] * len(bounds)
    for entry in entries:
        sizes = [size(entry) for _, size in bounds]
        if taken and any(most is not None and total + size > most for total, size, (most, _) in zip(sums, sizes, bounds)):
            yield taken
            taken, sums = [], [0] * len(bounds)
        taken.append(entry)
        sums = [total + size for total, size in zip(sums, sizes)]
    if taken:
        yield taken


def stages(
    requests: Iterable[M], most: int, size: Callable[[M], int], *bounds: tuple[int | None, Callable[[M], int]]
) -> Iterator[list[M]]:
    """Yield requests, which are made one by one, in stages of bounded size.

    Args:
        requests: the requests.
        most: limit on the tokens of a stage that are computed; a single request may exceed it.
        size: function that returns these tokens of a request.
        *bounds: further bounds, see `bounded`.
    """
    return bounded(requests, (most, size), (STAGE_LAYOUT, lambda request: len(request.layout)), *bounds)
