"""`StateCalls`: the job of many states with the same questions, of which only a few are laid out at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Int32

from chunkattn.calls.algorithms import groups
from chunkattn.calls.decide_items import QuestionItems
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import StopSample
from chunkattn.calls.score import ScoreCall, Stage
from chunkattn.engine.messages import CachedTokens, EngineOutput, PrecomputeRequest
from chunkattn.outputs import ScoreOutput, ScoreUsage

T = TypeVar("T")


class StateCalls(Generic[T]):
    """Job of many states with the same items behind each; see `chunkattn.calls.job.Job`.

    States whose tokens are in the cache run first, so that the others cannot evict them. A state becomes a `ScoreCall` when its
    turn comes, and a result when the call has ended: until then the job holds only its token ids.

    Args:
        frontend: frontend of the engine.
        states: token ids of each state (see `QuestionItems.state_ids`), which fit the engine with the items.
        items: items behind every state.
        finish: makes the result of a state from its scores, and those of `empty` if there are any.
        empty: call of the content-free state, which runs first; None for none. Its tokens count as computed for the first
            state, and as cached for the others.

    Attributes:
        total: number of states.
        done: number of states whose items have all been scored.
    """

    unit = "states"
    pins: Sequence[str] = ()

    def __init__(
        self,
        frontend: Frontend,
        states: Sequence[Int32[np.ndarray, " T"]],
        items: QuestionItems,
        finish: Callable[[list[ScoreOutput]], T],
        *,
        empty: ScoreCall[ScoreOutput] | None,
    ) -> None:
        self._frontend, self._states, self._items, self._finish = frontend, states, items, finish
        self._empty, self._extends = empty, items.algorithm == "prefill_extend"
        self._found: list[tuple[int, int]] = []  # missing and cached tokens of each state, as far as known
        self._by_id: dict[str, ScoreCall[ScoreOutput]] = {}  # calls of the requests that have not ended
        self._results: dict[int, T] = {}
        self.total, self.done = len(states), 0

    def lookups(self) -> Iterator[list[PrecomputeRequest]]:
        """Yield requests to look up in the cache: the states."""
        most = self._items.most_looked_up
        for first in range(0, len(self._states) if self._extends else 0, most):
            yield [self._items.lookup(ids.tolist()) for ids in self._states[first : first + most]]

    def decide(self, asked: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Store how much of the states is cached."""
        totals = [(len(request.layout), found.total) for request, found in zip(asked, cached, strict=True)]
        self._found += [(tokens - found, found) for tokens, found in totals]

    @property
    def _order(self) -> list[int]:
        """Return the places of the states: cached ones first, then those that begin with the most cached tokens."""
        if not self._found:
            return list(range(self.total))
        ranks = [(missing >= self._frontend.limits.block_size, -cached) for missing, cached in self._found]
        return sorted(range(self.total), key=ranks.__getitem__)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order. States that fit one step together share their stages."""
        free: list[ScoreOutput] = []
        if self._empty is not None:
            yield from self._rounds([self._empty])
            free = [self._empty.result()]
        limits, order = self._frontend.limits, self._order
        sizes = [max(len(self._states[place]), self._items.num_tokens) for place in order]
        # Elsewhere the size of a step decides the bits, and what is cached decides the order.
        shares = limits.batch_invariant or not self._extends
        most = self._frontend.config.max_num_batched_tokens if shares else 0
        for first, last in groups(sizes, most, limits.kv_tokens // 4):
            for start in range(first, last, self._items.most_together):
                yield from self._group(order[start : min(start + self._items.most_together, last)], free)

    def _group(self, places: Sequence[int], free: Sequence[ScoreOutput]) -> Iterator[Stage]:
        """Yield the stages of some states, and keep their results.

        Args:
            places: places of the states.
            free: scores behind the content-free state, or none.
        """
        calls = [self._items.behind_state(self._states[place].tolist()) for place in places]
        for call in calls:
            call.plan({})
        self.done += sum(call.total == 0 for call in calls)
        yield from self._rounds(calls)
        for place, call in zip(places, calls, strict=True):
            others = free if place == 0 else [_as_cached(output) for output in free]
            self._results[place] = self._finish([call.result(), *others])

    def _rounds(self, calls: Sequence[ScoreCall[ScoreOutput]]) -> Iterator[Stage]:
        """Yield the first stages of all calls as one stage, then the second ones, and so on."""
        for stages in zip_longest(*(call.stages() for call in calls), fillvalue=()):
            for call, stage in zip(calls, stages, strict=True):
                self._by_id |= {request.request_id: call for request in stage}
            yield [request for stage in stages for request in stage]

    def take(self, output: EngineOutput, stop: StopSample | None = None) -> bool:
        """Store the result of one request."""
        call = self._by_id.pop(output.request_id)
        call.take(output)
        self.done += call is not self._empty and call.done == call.total
        return True

    def result(self) -> list[T]:
        """Return the result of each state, in the caller's order."""
        return [self._results[place] for place in range(self.total)]


def _as_cached(output: ScoreOutput) -> ScoreOutput:
    tokens = output.usage.prompt_tokens
    return replace(output, usage=ScoreUsage(tokens, 0, tokens))
