"""`ScoreJob`: runs the scoring of several queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from chunkattn.calls.algorithm_choice import too_costly
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import STAGE_STEPS, Flow, LookUp, together
from chunkattn.calls.score import ScoreCall, computed_rows
from chunkattn.outputs import ScoreOutput, ScoreUsage

LOOKUP_BATCH = 32
"""Queries per lookup. The engine answers a lookup between two steps."""

T = TypeVar("T")


class ScoreJob(Generic[T]):
    """Job of several queries; see `chunkattn.calls.job.Job`.

    Args:
        frontend: frontend of the engine.
        calls: one call for each query, without an algorithm.
        finish: makes the result of the job from the scores of each query.
        steps: limit on the tokens of a stage that merges the stages of several queries, in steps' worth.

    Raises:
        RequestError: an algorithm is unknown or cannot serve a query.
        CapacityError: the job would compute more than `max_tokens_per_call`.
    """

    unit = "items"

    def __init__(
        self,
        frontend: Frontend,
        calls: Sequence[ScoreCall],
        finish: Callable[[list[ScoreOutput]], T],
        steps: int = STAGE_STEPS,
    ) -> None:
        self._calls, self._finish = calls, finish
        self._most = steps * frontend.config.max_num_batched_tokens
        costly = too_costly(calls, frontend.config.max_tokens_per_call)
        for call in calls:
            call.plan(costly)
        self.total = sum(call.total for call in calls)

    @property
    def done(self) -> int:
        """Return the number of items that have been scored."""
        return sum(call.done for call in self._calls)

    @property
    def tokens(self) -> int:
        """Return the tokens of all queries and items, cached or not."""
        return sum(call.query_len + sum(call.lens) for call in self._calls)

    def flow(self) -> Flow[T]:
        """Look up the queries whose algorithm depends on it, and score the items. Small queries run together."""
        asking = [call for call in self._calls if call.asks]
        for first in range(0, len(asking), LOOKUP_BATCH):
            batch = asking[first : first + LOOKUP_BATCH]
            for call, cached in zip(batch, (yield LookUp([call.query_request() for call in batch])), strict=True):
                call.decide(cached)
        for group in self._groups():
            yield from together([call.flow() for call in group], self._most, computed_rows)
        return self._finish([call.result() for call in self._calls])

    def _groups(self) -> Iterator[list[ScoreCall]]:
        """Yield the queries that run together; none of those whose results are all known.

        Cached prefixes go first, so that no other prefix evicts them. Where company decides the bits, the cache must not:
        queries keep their order there, and a query whose items share it runs alone.
        """
        group: list[ScoreCall] = []
        slots = tokens = 0
        was_alone = False
        for call in sorted(self._calls, key=lambda call: call.is_missing and not call.is_whole):
            if not call.total:
                continue
            alone = call.extends and call.is_whole and not call.item_first
            held, more = (call.query_len + sum(call.lens), 0) if call.extends else (0, call.tokens()[call.choice[0]])
            full = slots + held > call.max_batch_slots or tokens + more > self._most
            if group and (alone or was_alone or full):
                yield group
                group, slots, tokens = [], 0, 0
            group.append(call)
            slots, tokens, was_alone = slots + held, tokens + more, alone
        if group:
            yield group


def total_usage(outputs: Sequence[ScoreOutput]) -> ScoreUsage:
    """Return the sums of the token counts of several calls.

    Args:
        outputs: outputs of the calls.
    """
    usages = [output.usage for output in outputs]
    return ScoreUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.computed_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
