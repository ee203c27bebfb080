"""`InflightRequests`: the requests of one caller that have not ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from chunkattn.engine.messages import EngineOutput, Message, PromptLogprobsOutput, RequestFailed, TokenOutput
from chunkattn.errors import DeadlineExceededError
from chunkattn.fair_threads import FairThreads
from chunkattn.request_record import CallRecord

P = ParamSpec("P")
T = TypeVar("T")

Take = Callable[[Any], bool]
"""Handler of one output of a request; returns True for the request's last output."""


class Sender(Protocol):
    """The engine's client as its callers' requests see it; see `EngineClient` for the methods."""

    @property
    def threads(self) -> FairThreads: ...  # noqa: D102
    @property
    def compiling_s(self) -> float: ...  # noqa: D102
    def hold(self, requests: InflightRequests, /) -> None: ...  # noqa: D102
    def release(self, requests: InflightRequests, /) -> None: ...  # noqa: D102
    def send_requests(self, owner: InflightRequests, requests: Sequence[Message], /) -> None: ...  # noqa: D102
    def forget(self, request_id: str, /) -> None: ...  # noqa: D102
    def abort(self, request_ids: Iterable[str], /) -> None: ...  # noqa: D102


class InflightRequests(AbstractContextManager["InflightRequests"]):
    """Requests that live and end together: one failure, the timeout or leaving the context aborts all of them.

    Outputs go to `take` as they arrive, on the event loop; the caller wakes up later. A slow caller therefore accumulates
    only the data that `take` keeps. The object is a context manager; leaving it aborts the requests still running.

    Args:
        client: the engine's client.
        timeout: seconds until the requests fail with `DeadlineExceededError`, even if the engine hangs; None sets no limit.
        record: record of what the requests cost and wait for; None keeps none.

    Attributes:
        done: whether all outputs have arrived. The requests can no longer fail then.
        aborted: whether `abort` has been called.
    """

    def __init__(self, client: Sender, timeout: float | None, record: CallRecord | None = None) -> None:
        self._client, self._record = client, record
        self._take: Take = lambda _: False
        self._outstanding: set[str] = set()
        self.done = self.aborted = self._quiet = False
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._expired: DeadlineExceededError | None = None
        self._timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._expire, timeout)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.release(self)
        self.abort()
        if self._timer is not None:
            self._timer.cancel()

    async def prepare(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a function in a thread, waiting at most until these requests fail. A caller that leaves ends the work early.

        Raises:
            DeadlineExceededError, EngineDeadError: the requests have failed meanwhile.
            Exception: any error of the function.
        """
        return await self.ask(self._client.threads.run(function, *args, **options))

    async def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Await an answer of the engine or of a thread, at most until these requests fail.

        Raises:
            DeadlineExceededError, EngineDeadError: the requests have failed meanwhile.
        """
        work = asyncio.ensure_future(question)

        def wake(done: asyncio.Future[T]) -> None:
            self._changed.set()
            if not done.cancelled():
                done.exception()  # mark the exception as retrieved: the caller may have left

        work.add_done_callback(wake)
        try:
            while not work.done():
                await self.wait()
        finally:
            work.cancel()
        return work.result()

    def send(self, requests: Sequence[Message], take: Take, *, quiet: bool = False) -> None:
        """Send requests and deliver their outputs to `take`. All earlier requests must have ended.

        Args:
            requests: the requests to run.
            take: see `Take`.
            quiet: wake the caller once all requests have ended, instead of at every output.

        Raises:
            DeadlineExceededError: the timeout has passed.
            EngineDeadError: the engine is not ready.
            RequestError: a value cannot be sent.
        """
        if error := self._error or self._expired:
            raise error
        self._take, self._quiet = take, quiet
        self._changed.clear()
        self._client.hold(self)
        if self._record is not None:
            self._record.begin(time.perf_counter())
            for request in requests:
                layout = request.layout
                self._record.add(request.request_id, len(layout), layout.question_start - layout.prefix_len)
        self._client.send_requests(self, requests)
        self._outstanding = {r.request_id for r in requests}
        self.done = not requests

    async def wait(self) -> None:
        """Wait for outputs.

        Raises:
            EngineError, CapacityError: a request has failed.
            EngineDeadError: the engine has died.
            DeadlineExceededError: the timeout has passed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    async def finish(self, requests: Sequence[Message], take: Take) -> None:
        """Send requests and wait until all have ended.

        Args:
            requests: the requests to run.
            take: see `Take`.

        Raises:
            ChunkAttnError: an error of `send` or `wait`.
        """
        self.send(requests, take, quiet=True)
        while not self.done:
            await self.wait()

    # Events from the client and the timer

    def receive(self, event: EngineOutput) -> None:
        """Handle one output of these requests."""
        if self._record is not None and not isinstance(event, PromptLogprobsOutput):
            self._record.take(event.request_id, event.stats, len(event.token_ids) if isinstance(event, TokenOutput) else 0)
        if isinstance(event, RequestFailed):
            self._client.forget(event.request_id)
            self._outstanding.discard(event.request_id)
            self.fail(event.error())
            return
        try:
            last = self._take(event)
        except Exception as error:  # a defect here must fail only this caller
            self.fail(error)
            return
        if last:
            self._client.forget(event.request_id)
            self._outstanding.discard(event.request_id)
            self.done = not self._outstanding
            if self.done:  # a caller slow to process its result must not block a place
                self._client.release(self)
        if self.done or not self._quiet:
            self._changed.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, unless already done."""
        if not self.done:
            self._error = error
            self.abort()

    def abort(self) -> None:
        """Abort the requests still running and wake the caller."""
        if self._record is not None:
            self._record.end_stage(0.0 if self.done else self._client.compiling_s)
        self.done = self.aborted = True
        self._client.abort(self._outstanding)
        self._outstanding = set()
        self._changed.set()

    def _expire(self, timeout: float) -> None:
        self._expired = DeadlineExceededError(f"not done within the timeout of {timeout:g} s; it has been aborted")
        self.fail(self._expired)
