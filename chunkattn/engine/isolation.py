"""`Isolation`: finds the request that makes a step fail by running requests alone; and the failures of single requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import jax.numpy as jnp

from chunkattn.engine.messages import RequestFailed
from chunkattn.engine.readout import request_stats
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.step import Span


class Isolation:
    """Queue of suspects: requests of a failed step, run one at a time until each passes the point of failure or fails.

    All other requests wait meanwhile and hold no pages, so that a suspect has at least the pages it had in the failed step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspects: deque[tuple[Request, dict[Sample, int]]] = deque()  # with the token count that each sample must reach
        self._cleared: set[Request] = set()  # passed alone; emptied when a step of several spans succeeds

    @property
    def has_suspects(self) -> bool:
        """Return whether requests run alone at present."""
        return bool(self._suspects)

    def blame(self, concerned: list[Request], spans: Iterable[Span]) -> list[Request]:
        """Return the requests that fail because a step raised. The other requests of the step become suspects.

        Args:
            concerned: requests of the failed step.
            spans: spans of the failed step.
        """
        if self._suspects:
            return [self._suspects[0][0]]
        if len(concerned) == 1 or self._cleared.issuperset(concerned):  # a second run alone would pass again
            return concerned
        ends: dict[Request, dict[Sample, int]] = {request: {} for request in concerned}
        for sample, _, end, _ in spans:
            if sample.request in ends:
                ends[sample.request][sample] = end
        self._suspects.extend(ends.items())
        return []

    def restart(self, failed: Iterable[Request]) -> None:
        """Remove the failed requests, after the scheduler has restarted without them."""
        gone = set(failed)
        self._suspects = deque(suspect for suspect in self._suspects if suspect[0] not in gone)
        self._cleared -= gone
        self._set_alone()

    def step_done(self, is_alive: Callable[[Request], bool], num_spans: int) -> None:
        """Continue with the next suspect if the step cleared the current one.

        Args:
            is_alive: returns whether a request has not ended yet.
            num_spans: number of spans of the step that has just succeeded.
        """
        if not self._suspects:
            if num_spans > 1:
                self._cleared.clear()
            return
        request, ends = self._suspects[0]
        if is_alive(request):
            behind = any(s.num_computed < end for s, end in ends.items() if s in request.samples)
            if behind or request in self._scheduler.waiting:
                return
            if request in self._scheduler.running or request in self._scheduler.pinned:
                self._scheduler.send_back(request)
            self._cleared.add(request)
        self._suspects.popleft()
        self._set_alone()

    def _set_alone(self) -> None:
        self._scheduler.alone = self._suspects[0][0] if self._suspects else None


def stuck(request: Request, *, lacks_states: bool = False) -> RequestFailed:
    """Return the failure of a request that cannot be placed even alone, because pinned documents leave too little.

    Args:
        request: the request.
        lacks_states: whether states of recurrent layers are missing, and not pages.
    """
    reason = (
        f"the prompt of {len(request.layout)} tokens needs up to {request.total_pages} KV pages, "
        "and pinned documents leave too few; send a shorter prompt, unpin documents or raise kv_cache_memory_bytes"
    )
    if lacks_states:
        reason = (
            "the states of pinned documents leave too few for the request in this model's recurrent layers; "
            "unpin documents or raise state_cache_memory_bytes"
        )
    return RequestFailed(
        request.request_id, reason, "prompt" if request.sampling else None, fits=False, stats=request_stats(request)
    )


def not_finite(request: Request, token_id: int, dtype: jnp.dtype) -> RequestFailed:
    """Return the failure of a request because a value at a token is not finite.

    Args:
        request: the request.
        token_id: id of the first such token.
        dtype: dtype of the model's weights.
    """
    cause = "a weight of the checkpoint is probably damaged; compare its files with their source"
    if dtype == jnp.float16:
        cause = 'dtype="float16" probably overflows; use dtype="bfloat16" or "float32"'
    reason = f"the model's values at token id {token_id} are NaN or infinite: {cause}"
    return RequestFailed(request.request_id, reason, finite=False, stats=request_stats(request))
