"""One run at one rate: requests are sent at scheduled times, and no request waits for the answer to another."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

OK, UNANSWERED = "200", "unanswered"
_TICK_S = 0.02
"""Interval at which the delay of the client's event loop is sampled."""


@dataclass(slots=True)
class Record:
    """One request as the client saw it. Times are seconds of the client's clock.

    Attributes:
        due: scheduled time of arrival.
        sent: time at which the client began to send.
        ended: time of the end of the answer; infinite without one.
        tokens: times of the events of a stream that carried text.
        status: HTTP status, or the kind of failure.
        message: text of an error.
        prompt_tokens: tokens of the prompt, where the server tells them.
        completion_tokens: generated tokens, where the server tells them.
    """

    due: float
    sent: float = math.nan
    ended: float = math.inf
    tokens: list[float] = field(default_factory=list)
    status: str = UNANSWERED
    message: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


Ask = Callable[[bytes, Record], Awaitable[None]]
"""Sends one body and writes status, tokens and message of the answer into the record."""


@dataclass
class LoadRun:
    """Observations of one rate.

    Attributes:
        scheduled: number of scheduled requests.
        began: time of the start, to which the schedule is relative.
        ended: time at which the last answer came or the wait for answers ended.
        records: requests that were sent, by time of arrival.
        in_flight: requests without an answer at the last arrival.
        is_full: whether the limit on requests in flight ended the arrivals.
        loop_lag_s: longest delay of the client's event loop.
    """

    scheduled: int
    began: float
    ended: float = math.nan
    records: list[Record] = field(default_factory=list)
    in_flight: int = 0
    is_full: bool = False
    loop_lag_s: float = 0.0


def poisson(rate: float, seconds: float, seed: int | None, most: int | None = None) -> list[float]:
    """Return arrival times of a Poisson process in seconds after the start.

    Args:
        rate: mean number of arrivals per second.
        seconds: length of the process; later arrivals are left out.
        seed: seed of the random gaps. The same seed at another rate gives the same times, scaled.
        most: limit on the number of arrivals; None for no limit.
    """
    rng, times, now = np.random.default_rng(seed), list[float](), 0.0
    while most is None or len(times) < most:
        now += float(rng.exponential()) / rate
        if now >= seconds:
            break
        times.append(now)
    return times


async def run(
    arrivals: Sequence[float],
    bodies: Iterator[bytes],
    ask: Ask,
    *,
    max_in_flight: int,
    drain_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadRun:
    """Send requests on schedule, then wait a limited time for the remaining answers.

    Args:
        arrivals: scheduled times in seconds after the start, ascending.
        bodies: a body for each arrival. Each is made before its time, while earlier requests run.
        ask: sends a request.
        max_in_flight: the arrivals end when this many requests have no answer.
        drain_s: longest wait in seconds for answers after the last arrival. Later answers are cancelled.
        clock: current time in seconds, for the schedule and for `Record`; `ask` must use the same one.
    """
    made = LoadRun(len(arrivals), clock())
    watch = asyncio.create_task(_watch(made, clock))
    pending: set[asyncio.Task[None]] = set()
    try:
        for due in arrivals:
            body, record = next(bodies), Record(made.began + due)
            await _until(record.due, clock)
            if len(pending) >= max_in_flight:
                made.is_full = True
                break
            made.records.append(record)
            task = asyncio.create_task(_send(body, record, ask, clock))
            pending.add(task)
            task.add_done_callback(pending.discard)
        made.in_flight = len(pending)
        if pending:
            await asyncio.wait(pending, timeout=drain_s)
        made.ended = clock()
    finally:
        left = [watch, *pending]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return made


async def _until(due: float, clock: Callable[[], float]) -> None:
    """Wait until the clock reaches a time. Timers of uvloop count whole milliseconds and may end early."""
    while (left := due - clock()) > 0:
        await asyncio.sleep(left)


async def _send(body: bytes, record: Record, ask: Ask, clock: Callable[[], float]) -> None:
    record.sent = clock()
    try:
        await ask(body, record)
    except asyncio.CancelledError:
        record.status = UNANSWERED
        raise
    except Exception as error:  # a defect of the client counts as a failed request and does not end the run
        record.status, record.message = type(error).__name__, str(error)
    record.ended = clock()


async def _watch(made: LoadRun, clock: Callable[[], float]) -> None:
    while True:
        due = clock() + _TICK_S
        await asyncio.sleep(_TICK_S)
        made.loop_lag_s = max(made.loop_lag_s, clock() - due)
