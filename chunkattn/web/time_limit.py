"""`time_limit` and `unless_gone`: work for a client, which ends when the client leaves or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from chunkattn.web.errors import ApiError

T = TypeVar("T")


class TimeLimitError(ApiError):
    """A request took longer than its time limit."""


class ClientLeftError(ApiError):
    """The client left before the end of its answer."""


@asynccontextmanager
async def time_limit(receive: Receive, seconds: float | None) -> AsyncIterator[None]:
    """Cancel the body of a `with` statement after some time, or when the client leaves.

    Args:
        receive: ASGI channel of the client, whose request has been read.
        seconds: time limit in seconds; None waits for the client alone.

    Raises:
        TimeLimitError: 504, the time is over.
        ClientLeftError: 499, the client has left. No client reads this answer.
    """
    left = False

    async def watch_client() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        limit.reschedule(0)  # ends the request without a task of its own for it

    try:
        async with asyncio.timeout(seconds) as limit:
            leaving = asyncio.create_task(watch_client())
            try:
                yield
            finally:
                leaving.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        if left:
            raise ClientLeftError(499, "the client has left", code="client_closed_request") from None
        text = f"the request took longer than request_timeout_s {seconds:g} of the gateway"
        raise TimeLimitError(504, text, code="timeout") from None


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await work, and cancel it if the client leaves.

    Args:
        request: the client's request, with its body read.
        work: awaitable that makes the answer.

    Raises:
        ClientLeftError: the client has left.
    """
    async with time_limit(request.receive, None):
        return await work
