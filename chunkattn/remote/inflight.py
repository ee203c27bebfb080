"""`Call`: the requests one caller waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from chunkattn.engine.messages import EngineOutput, Message, RequestFailed
from chunkattn.errors import CapacityError, DeadlineExceededError, EngineError

if TYPE_CHECKING:
    from chunkattn.remote.client import EngineClient

P = ParamSpec("P")
T = TypeVar("T")

Take = Callable[[Any], bool]
"""Takes one output of a request; True when it was the last."""


class Call:
    """Requests that live and end together: when one fails, the caller leaves or time is up, all are aborted.

    Outputs go to `take` as they arrive, on the event loop; the caller wakes up when it gets to it. So nothing piles up
    behind a slow caller but what `take` keeps. A context manager: leaving it aborts what has not ended.

    Args:
        timeout: seconds until it fails with `DeadlineExceededError`, whatever the engine does.

    Attributes:
        done: no output will come any more. It cannot fail then.
    """

    def __init__(self, client: EngineClient, timeout: float | None) -> None:
        self._client = client
        self._take: Take = lambda _: False
        self._outstanding: set[str] = set()
        self.done = self._quiet = False
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._expired: DeadlineExceededError | None = None
        self._timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._expire, timeout)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.release(self)
        self.abort()
        if self._timer is not None:
            self._timer.cancel()

    async def prepare(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a function in a thread, waiting for it no longer than this call lives.

        Raises:
            DeadlineExceededError, EngineDeadError: this call has failed meanwhile.
            Exception: whatever the function raises.
        """
        work = asyncio.ensure_future(asyncio.to_thread(function, *args, **options))

        def wake(done: asyncio.Future[T]) -> None:
            self._changed.set()
            if not done.cancelled():
                done.exception()  # retrieved, for perhaps nobody else does

        work.add_done_callback(wake)
        try:
            while not work.done():
                await self.wait()
        finally:
            work.cancel()
        return work.result()

    def send(self, requests: Sequence[Message], take: Take, *, quiet: bool = False) -> None:
        """Send the requests; their outputs go to `take`. May be called again when all before have ended.

        Args:
            requests: whatever is to run.
            take: see `Take`.
            quiet: wake the caller when all have ended, not at every output.

        Raises:
            DeadlineExceededError: time is up.
            EngineDeadError: the engine is not ready.
            RequestError: a value cannot be sent.
        """
        if error := self._error or self._expired:
            raise error
        self._take, self._quiet = take, quiet
        self._changed.clear()
        self._client.hold(self)
        self._client.send_requests(self, requests)
        self._outstanding = {r.request_id for r in requests}
        self.done = not requests

    async def wait(self) -> None:
        """Wait for outputs.

        Raises:
            EngineError, CapacityError: a request has failed.
            EngineDeadError: the engine has died.
            DeadlineExceededError: time is up.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    async def finish(self, requests: Sequence[Message], take: Take) -> None:
        """Send the requests and wait until all have ended.

        Raises:
            ChunkAttnError: as `send` and `wait`.
        """
        self.send(requests, take, quiet=True)
        while not self.done:
            await self.wait()

    # What the client and timers tell it

    def receive(self, event: EngineOutput) -> None:
        """An output of one of its requests."""
        if isinstance(event, RequestFailed):
            self._client.forget(event.request_id)
            self._outstanding.discard(event.request_id)
            if event.param:
                self.fail(CapacityError(event.reason, param=event.param))
            else:
                self.fail(EngineError(f"request {event.request_id} failed in a step: {event.reason}"))
            return
        try:
            last = self._take(event)
        except Exception as error:  # a defect of ours, and this caller's alone
            self.fail(error)
            return
        if last:
            self._client.forget(event.request_id)
            self._outstanding.discard(event.request_id)
            self.done = not self._outstanding
            if self.done:  # a caller that takes its time with the result keeps nobody out
                self._client.release(self)
        if self.done or not self._quiet:
            self._changed.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it is done."""
        if not self.done:
            self._error = error
            self.abort()

    def abort(self) -> None:
        """Abort what has not ended, and wake the caller."""
        self.done = True
        self._client.abort(self._outstanding)
        self._outstanding = set()
        self._changed.set()

    def _expire(self, timeout: float) -> None:
        self._expired = DeadlineExceededError(f"not done within the timeout of {timeout:g} s; it has been aborted")
        self.fail(self._expired)
