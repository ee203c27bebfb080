"""What the routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from chunkattn.server.document_store import Documents
from chunkattn.server.errors import ApiError
from chunkattn.server.keys import Caller, Keys, Shares
from chunkattn.server.middleware import HttpMetrics
from chunkattn.server.options import ServerConfig
from chunkattn.server.texts import TokenTexts

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

T = TypeVar("T")

DEMO_NAME = "chunkattn-demo"


@dataclass
class ServerState:
    """One server's engine and options.

    Attributes:
        draining: SIGTERM has come; what runs may end, nothing new begins.
        started: seconds since the epoch.
    """

    llm: AsyncLLM
    config: ServerConfig
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def keys(self) -> Keys:
        """The API keys."""
        return Keys(self.config.api_key, self.config.api_key_file)

    @cached_property
    def shares(self) -> Shares:
        """Places in the queue that each API key holds."""
        return Shares(max(1, int(self.config.max_queue_share * self.llm.config.max_queued_requests)))

    @cached_property
    def documents(self) -> Documents:
        """Those that clients have asked to keep."""
        return Documents(self.llm, self.config)

    @cached_property
    def texts(self) -> TokenTexts:
        """Of the model's tokens; the engine has been started."""
        frontend = self.llm.frontend
        return TokenTexts(frontend.tokenizer, frontend.parser.encode.leading_ids)

    @cached_property
    def model_name(self) -> str:
        """The model's name in answers; of a local folder only the last part of its path."""
        model = self.llm.config.model
        if model is not None and (folder := Path(model).expanduser()).is_dir():
            model = folder.resolve().name
        return self.config.served_model_name or model or DEMO_NAME

    @property
    def most_prompts(self) -> int:
        """In one request; each takes a place in the engine's queue."""
        return min(self.config.max_prompts_per_request, self.shares.most)

    def check_model(self, name: str | None) -> None:
        """Check the model a request names, if it names one.

        Raises:
            ApiError: 404, it is another.
        """
        if name is not None and name != self.model_name:
            text = f"the model {name!r} is not served here; it is {self.model_name!r}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def check_priority(self, priority: int, default: int = 0) -> None:
        """Check a client's priority.

        Raises:
            ApiError: 400, it is neither the default nor within `priority_range`.
        """
        most = self.config.priority_range
        if priority != default and abs(priority) > most:
            allowed = f"priority must be between {-most} and {most}" if most else f"priority cannot be set (it is {default})"
            text = f"{allowed}, got {priority}; the server's option priority_range is {most}"
            raise ApiError(400, text, param="priority", code="invalid_value")

    def check_answer_values(self, values: int, less: str, param: str) -> None:
        """Check the numbers that an answer would hold, before any work.

        Args:
            values: numbers of scores or log-probabilities.
            less: what a client may ask for less of.
            param: the field to change.

        Raises:
            ApiError: 400, there are more than `max_answer_values`.
        """
        if values > (most := self.config.max_answer_values):
            text = f"the answer would hold {values} numbers, max_answer_values is {most}; ask for fewer {less}"
            raise ApiError(400, text, param=param, code="invalid_value")

    @property
    def readiness(self) -> str:
        """`"starting"`, `"ready"`, `"degraded"` (the engine is being started again) or `"draining"`."""
        if self.draining:
            return "draining"
        return {"starting": "starting", "ready": "ready"}.get(self.llm.state, "degraded")

    def check_ready(self) -> None:
        """Check that new work is taken.

        Raises:
            ApiError: 503, it is not.
        """
        if (state := self.readiness) != "ready":
            raise ApiError(503, f"the server is {state}; try again", code=f"server_{state}", **{"Retry-After": "1"})


async def get_state(request: Request) -> ServerState:  # async, or it would run in a thread
    """The server's state."""
    return request.app.state.server


State = Annotated[ServerState, Depends(get_state)]


async def get_caller(request: Request) -> Caller:
    """Return the client of the request."""
    return request.state.caller


CallerOf = Annotated[Caller, Depends(get_caller)]


def new_id(kind: str) -> str:
    """An id as OpenAI's: the kind of answer, and 32 digits."""
    return f"{kind}-{token_hex(16)}"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await work for as long as the client does.

    Raises:
        ApiError: 499, the client has left; the work has been cancelled. Nobody will read it.
    """
    here, gone = asyncio.current_task(), False
    assert here is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        here.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and here.cancelling() == 1:  # by nobody else
            raise ApiError(499, "the client has left") from None
        raise
    finally:
        watcher.cancel()
        if gone:
            here.uncancel()


class EventStream(StreamingResponse):
    """Server-sent events. A client that leaves cancels what makes them at once, not at the next garbage collection.

    Args:
        events: made of `source`.
        source: has begun already, so it has to be closed even if `events` never begins.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncGenerator[Any, None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._source = events, source

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._source), aclosing(self._events):
            await super().stream_response(send)


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What several generators yield, with their numbers, as it comes. The first error ends all of them."""
    if len(streams) == 1:  # needs no task for each value
        async with aclosing(streams[0]):
            async for value in streams[0]:
                yield 0, value
        return
    pending: dict[asyncio.Task[T], int] = {}
    try:
        pending = {_next(stream): number for number, stream in enumerate(streams)}
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = pending.pop(task)
                try:
                    value = task.result()
                except StopAsyncIteration:
                    continue
                yield number, value
                pending[_next(streams[number])] = number
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next(stream: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    async def step() -> T:
        return await anext(stream)

    return asyncio.create_task(step())
