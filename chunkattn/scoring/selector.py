"""Which algorithm serves a job."""

from __future__ import annotations

from chunkattn.errors import RequestError
from chunkattn.scoring.algorithms import ALGORITHMS, ScoreJob


def select_algorithm(name: str, job: ScoreJob, sliding_window: int | None) -> str:
    """The algorithm to run: the named one, or for `"auto"` one that shares the query where that is possible.

    Raises:
        RequestError: unknown, or unable to serve this job; the message says why.
    """
    if name not in (*ALGORITHMS, "auto"):
        raise RequestError(f"unknown algorithm {name!r}; choose auto, {', '.join(ALGORITHMS)}", param="algorithm")
    reason = None
    if job.item_first:
        reason = "item_first leaves no shared prefix"
    elif sliding_window is not None:
        reason = f"the checkpoint's sliding window of {sliding_window} tokens has no meaning across packed items"
    if name == "auto":
        return "serial" if reason or len(job.items) == 1 else "packed_segment"
    if name != "serial" and reason:
        raise RequestError(f"algorithm {name!r} cannot serve this request: {reason}; use 'serial'", param="algorithm")
    return name
