"""`retried`: repeats what replicas cannot take while they start or stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

NOT_BEGUN = frozenset({"server_starting", "server_degraded", "server_draining"})
"""Codes of a server that refuses a request before any work."""
_FIRST_S, _LONGEST_S = 0.1, 1.0
"""Shortest and longest pause between two tries in seconds."""


def error_code(body: Any) -> str | None:
    """Return the error code of a decoded answer; None if it has none."""
    error = body.get("error") if isinstance(body, Mapping) else None
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, str) else None


def is_passing(status: int, body: Any) -> bool:
    """Return whether an answer is the refusal of a server whose engine starts or stops."""
    return status == 503 and error_code(body) in NOT_BEGUN | {"engine_not_ready"}


def pause_s(number: int) -> float:
    """Return the pause in seconds before a try is repeated.

    Args:
        number: number of the repetition; the first is 0.
    """
    return min(_FIRST_S * 2.0 ** min(number, 10), _LONGEST_S)


async def retried(call: Callable[[], Awaitable[T]], is_final: Callable[[T], bool], timeout_s: float) -> T:
    """Return the first final result of a call, or its last result.

    Args:
        call: the call.
        is_final: whether a result needs no further try.
        timeout_s: time in seconds after which no try begins.
    """
    until, number = time.monotonic() + timeout_s, 0
    while not is_final(result := await call()) and time.monotonic() + pause_s(number) < until:
        await asyncio.sleep(pause_s(number))
        number += 1
    return result
