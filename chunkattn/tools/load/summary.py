"""Figures of one run: percentiles, rates, goodput and errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chunkattn.tools.load.open_loop import OK, UNANSWERED, LoadRun, Record

_FEW = 100
"""Requests below which the 99th percentile is the maximum."""


@dataclass(frozen=True)
class Spread:
    """Percentiles in milliseconds. None means that so many requests were unanswered that the percentile is unknown.

    Attributes:
        p50: median.
        p90: 90th percentile.
        p99: 99th percentile.
        max: maximum.
    """

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Return the percentiles of times in seconds; None without times.

        A percentile is the smallest time that at least so many percent of the times do not exceed. So it is a measured time,
        and an infinite time counts as one that is longer than all others.
        """
        if not seconds:
            return None
        percentiles = np.percentile(np.asarray(seconds, np.float64), (50, 90, 99, 100), method="inverted_cdf")
        return cls(*(1000 * value if math.isfinite(value) else None for value in percentiles.tolist()))


@dataclass(frozen=True)
class Objective:
    """Bounds on a good request, in milliseconds; None for no bound.

    Attributes:
        latency_ms: from the scheduled arrival to the end of the answer.
        ttft_ms: from the scheduled arrival to the first token of a stream.
        tpot_ms: mean time per token of a stream, after the first.
    """

    latency_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def bounds(self, streamed: bool) -> dict[str, float]:
        """Return the bounds that a kind of request can meet, by name."""
        named = {"latency": self.latency_ms, **({"ttft": self.ttft_ms, "tpot": self.tpot_ms} if streamed else {})}
        return {name: bound for name, bound in named.items() if bound is not None}

    def is_met(self, record: Record, streamed: bool) -> bool:
        """Return whether a successful request is good. A time that a request does not have exceeds no bound."""
        times = {"latency": latency(record), "ttft": ttft(record), "tpot": tpot(record)}
        return all((times[name] or 0.0) * 1000 <= bound for name, bound in self.bounds(streamed).items())


@dataclass(frozen=True)
class Summary:
    """Figures of one workload at one rate. Times are in milliseconds, from the scheduled arrival.

    Attributes:
        workload: name of the workload.
        rate: offered requests per second, the mean of the Poisson process.
        scheduled: number of scheduled requests.
        sent: number of requests that were sent.
        succeeded: number of requests with a right answer.
        statuses: number of sent requests by HTTP status or kind of failure.
        seconds: time from the start to the last answer, or to the end of the wait for answers.
        achieved_rate: right answers per second of `seconds`.
        goodput: right answers within the objective per second of `seconds`; None without an objective.
        latency_ms: time to the end of the answer.
        ttft_ms: time to the first token; None for scores.
        tpot_ms: mean time per token after the first, by request; None for scores.
        gap_ms: time between two events of a stream, over all streams; None for scores.
        prompt_tokens: mean tokens of a prompt, as the server counts them.
        completion_tokens: mean generated tokens.
        in_flight: requests without an answer at the last arrival.
        lag_ms: time by which requests were sent late.
        loop_lag_ms: longest delay of the client's event loop.
        notes: statements about the run that a reader of the figures needs.
    """

    workload: str
    rate: float
    scheduled: int
    sent: int
    succeeded: int
    statuses: dict[str, int]
    seconds: float
    achieved_rate: float
    goodput: float | None
    latency_ms: Spread | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    gap_ms: Spread | None
    prompt_tokens: float | None
    completion_tokens: float | None
    in_flight: int
    lag_ms: Spread | None
    loop_lag_ms: float
    notes: tuple[str, ...]

    @property
    def is_overloaded(self) -> bool:
        """Return whether requests were left without an answer, or were never sent."""
        return self.sent < self.scheduled or UNANSWERED in self.statuses


def latency(record: Record) -> float:
    """Return the seconds from the scheduled arrival to the end of the answer; infinite without an answer."""
    return record.ended - record.due


def ttft(record: Record) -> float | None:
    """Return the seconds from the scheduled arrival to the first token; None without a token."""
    return record.tokens[0] - record.due if record.tokens else None


def tpot(record: Record) -> float | None:
    """Return the mean seconds per token after the first; None below two tokens."""
    made = record.completion_tokens or len(record.tokens)
    return (record.tokens[-1] - record.tokens[0]) / (made - 1) if len(record.tokens) > 1 and made > 1 else None


def summarize(run: LoadRun, workload: str, rate: float, streamed: bool, objective: Objective, max_lag_ms: float) -> Summary:
    """Return the figures of a run.

    Latencies are those of the requests that succeeded or got no answer in time. The latter count as infinite.

    Args:
        run: observations.
        workload: name of the workload.
        rate: offered requests per second.
        streamed: whether answers are streams.
        objective: bounds on a good request.
        max_lag_ms: delay of the client beyond which a note says so.
    """
    succeeded = [record for record in run.records if record.status == OK]
    left = [record for record in run.records if record.status == UNANSWERED]
    seconds = max(run.ended - run.began, 1e-9)
    good = sum(objective.is_met(record, streamed) for record in succeeded)
    first = [time for record in succeeded if (time := ttft(record)) is not None]
    first += [math.inf if (time := ttft(record)) is None else time for record in left]
    lags = [max(0.0, record.sent - record.due) for record in run.records if not math.isnan(record.sent)]
    gaps = [b - a for record in succeeded for a, b in zip(record.tokens, record.tokens[1:])]
    return Summary(
        workload,
        rate,
        run.scheduled,
        len(run.records),
        len(succeeded),
        dict(sorted(Counter(record.status for record in run.records).items())),
        seconds,
        len(succeeded) / seconds,
        good / seconds if objective.bounds(streamed) else None,
        Spread.of([latency(record) for record in (*succeeded, *left)]),
        Spread.of(first) if streamed else None,
        Spread.of([time for record in succeeded if (time := tpot(record)) is not None]),
        Spread.of(gaps),
        _mean([record.prompt_tokens for record in succeeded]),
        _mean([record.completion_tokens for record in succeeded]) if streamed else None,
        run.in_flight,
        Spread.of(lags),
        1000 * run.loop_lag_s,
        tuple(_notes(run, len(succeeded) + len(left), len(left), lags, max_lag_ms)),
    )


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _notes(run: LoadRun, counted: int, unanswered: int, lags: Sequence[float], max_lag_ms: float) -> list[str]:
    notes = []
    if run.is_full:
        notes.append(
            f"overloaded: the arrivals ended after {len(run.records)} of {run.scheduled} requests, "
            f"because {run.in_flight} had no answer (--max-in-flight)"
        )
    if unanswered:
        notes.append(
            f"overloaded: {unanswered} requests had no answer within --drain-s of the last arrival; they count as infinite"
        )
    if (late := 1000 * max([run.loop_lag_s, *lags])) > max_lag_ms:
        notes.append(
            f"the client fell behind by up to {late:.0f} ms (--max-lag-ms {max_lag_ms:g}); times may be too long by as much"
        )
    if 0 < counted < _FEW:
        notes.append(f"{counted} requests: p99 is the maximum")
    messages = {r.status: r.message for r in reversed(run.records) if r.status not in (OK, UNANSWERED)}
    notes += [f"first answer of {status}: {' '.join(message.split())}" for status, message in sorted(messages.items())]
    return notes
