"""Server-sent events: the text of an event, heartbeats, and the response that closes its generators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Send

T = TypeVar("T")

HEARTBEAT = ": keep-alive\n\n"
"""Comment that clients skip. It keeps proxies from closing a silent stream."""

_LINE_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})
"""Characters that JSON leaves as they are, and that some clients take for the end of a line."""


def event_of(body: dict[str, Any]) -> str:
    """Return the event that carries a JSON object.

    Args:
        body: the object.
    """
    return f"data: {json.dumps(body, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"


class Timed(Generic[T]):
    """Reader of a generator that waits for each value for a limited time.

    Args:
        source: generator of values.
        seconds: time to wait for a value; None waits until it arrives.
    """

    def __init__(self, source: AsyncGenerator[T, None], seconds: float | None) -> None:
        self._source, self._seconds = source, seconds
        self._waiting: asyncio.Task[T] | None = None

    async def next(self) -> T | None:
        """Return the next value, or None if it has not arrived in time.

        Raises:
            StopAsyncIteration: the generator has ended.
            Exception: any error of the generator.
        """
        if self._seconds is None:
            return await anext(self._source)
        if self._waiting is None:
            self._waiting = _next(self._source)
        if not (await asyncio.wait({self._waiting}, timeout=self._seconds))[0]:
            return None
        arrived, self._waiting = self._waiting, None
        return arrived.result()

    async def aclose(self) -> None:
        """Close the generator; a value that is being waited for is lost."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
        await self._source.aclose()


class EventStream(StreamingResponse):
    """Response of server-sent events. A client's disconnection closes the generators at once, before garbage collection.

    Args:
        events: generator of event texts, made from `source`.
        source: reader of a generator that has begun already, so it must be closed even if `events` never begins.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], source: Timed[Any]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._source = events, source

    async def stream_response(self, send: Send) -> None:
        """Send all events, then close both generators."""
        async with aclosing(self._source), aclosing(self._events):
            await super().stream_response(send)


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the values of several generators as they arrive, each with its generator's index. The first error ends all.

    Args:
        streams: generators; all are closed at the end.
    """
    if len(streams) == 1:  # one generator needs no task per value
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
