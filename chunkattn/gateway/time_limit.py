"""`time_limit`: the time of one request at a gateway, which ends early if its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from chunkattn.web.errors import ApiError


class TimeLimitError(ApiError):
    """A request took longer than its time limit."""


class ClientLeftError(ApiError):
    """The client left before the end of its answer."""


@asynccontextmanager
async def time_limit(receive: Receive, seconds: float) -> AsyncIterator[None]:
    """Cancel the body of a `with` statement after some time, or when the client leaves.

    Args:
        receive: ASGI channel of the client, whose request has been read.
        seconds: time limit in seconds.

    Raises:
        TimeLimitError: the time is over.
        ClientLeftError: the client has left.
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
