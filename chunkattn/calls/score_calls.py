"""`ScoreCalls`: the job of several queries, whose small stages run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Generic, TypeVar, cast

from chunkattn.calls.algorithms import groups
from chunkattn.calls.job import StopSample
from chunkattn.calls.score import ScoreCall, Stage
from chunkattn.engine.messages import CachedTokens, EngineOutput, PrecomputeRequest, ScoreRequest
from chunkattn.outputs import ScoreOutput

LOOKUP_BATCH = 32
"""Queries per lookup. The engine answers a lookup between two steps."""

T = TypeVar("T")


class ScoreCalls(Generic[T]):
    """Job of several queries; see `chunkattn.calls.job.Job`.

    Args:
        calls: one call for each query.
        max_stage_tokens: limit on the tokens of a stage that merges the stages of several queries.
        finish: makes the result of the job from the scores of each query; None returns the scores.
    """

    unit = "items"
    pins: Sequence[str] = ()

    def __init__(
        self,
        calls: Sequence[ScoreCall[ScoreOutput]],
        max_stage_tokens: int,
        finish: Callable[[list[ScoreOutput]], T] | None = None,
    ) -> None:
        self._calls, self._max_stage_tokens, self._finish = calls, max_stage_tokens, finish
        self._by_id: dict[str, ScoreCall[ScoreOutput]] = {}  # calls of the requests that have not ended
        self.total, self.done = sum(call.total for call in calls), 0

    @property
    def tokens(self) -> int:
        """Return the tokens of all queries and items, cached or not."""
        return sum(call.query_len + sum(map(len, call.items)) for call in self._calls)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order. Small queries run together: the first stages of all, then the second ones, and so on."""
        for group in self._groups():
            for stages in zip_longest(*(call.stages() for call in group), fillvalue=()):
                requests: Stage = []
                for call, stage in zip(group, stages, strict=True):
                    self._by_id |= {request.request_id: call for request in stage}
                    requests += stage
                for first, last in groups([_rows(request) for request in requests], self._max_stage_tokens):
                    yield requests[first:last]

    def _groups(self) -> Iterator[list[ScoreCall[ScoreOutput]]]:
        """Yield the queries that run together; none of those whose results are all known.

        Cached prefixes go first, so that no other prefix evicts them. Where company decides the bits, the cache must not:
        queries keep their order there, and a query whose items share it runs alone.
        """
        group: list[ScoreCall[ScoreOutput]] = []
        slots = tokens = 0
        for call in sorted(self._calls, key=lambda call: call.is_missing and not call.is_whole):
            if not call.total:
                continue
            alone = call.extends and call.is_whole and not call.item_first
            held, more = (call.query_len + sum(map(len, call.items)), 0) if call.extends else (0, call.tokens()[call.choice[0]])
            if group and (alone or slots + held > call.max_batch_slots or tokens + more > self._max_stage_tokens):
                yield group
                group, slots, tokens = [], 0, 0
            group.append(call)
            slots, tokens = slots + held, tokens + more
            if alone:
                yield group
                group, slots, tokens = [], 0, 0
        if group:
            yield group

    def lookups(self) -> Iterator[list[PrecomputeRequest]]:
        """Yield requests to look up in the cache: the queries whose algorithm depends on it."""
        for first in range(0, len(self._calls), LOOKUP_BATCH):
            asking = [(request, call) for call in self._calls[first : first + LOOKUP_BATCH] for (request,) in call.lookups()]
            self._by_id |= {request.request_id: call for request, call in asking}
            if asking:
                yield [request for request, _ in asking]

    def decide(self, asked: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Choose the algorithms of the queries that were looked up."""
        for request, found in zip(asked, cached, strict=True):
            self._by_id.pop(request.request_id).decide([request], [found])

    def take(self, output: EngineOutput, stop: StopSample | None = None) -> bool:
        """Store the result of one request."""
        call = self._by_id.pop(output.request_id)
        self.done -= call.done
        call.take(output)
        self.done += call.done
        return True

    def result(self) -> T:
        """Return the scores of each query, or what `finish` makes of them."""
        outputs = [call.result() for call in self._calls]
        return cast(T, outputs) if self._finish is None else self._finish(outputs)


def _rows(request: PrecomputeRequest | ScoreRequest) -> int:
    """Return the tokens that a request computes when the cache holds its prefix for a scoring request, and nothing else."""
    layout = request.layout
    if not isinstance(request, ScoreRequest) or not request.share_prefix:
        return len(layout)
    return layout.question_len - request.state_len if request.state_len else len(layout) - layout.prefix_len
