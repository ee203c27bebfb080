"""`unless_gone`: work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from chunkattn.web.errors import ApiError

T = TypeVar("T")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await work, and cancel it if the client disconnects.

    Args:
        request: the client's request, with its body read.
        work: awaitable that makes the answer.

    Raises:
        ApiError: 499, the client has left and the work is cancelled. No client reads this answer.
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
        if gone and here.cancelling() == 1:  # the watcher alone cancelled this task
            raise ApiError(499, "the client has left") from None
        raise
    finally:
        watcher.cancel()
        if gone:
            here.uncancel()
