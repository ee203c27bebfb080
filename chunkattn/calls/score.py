"""`ScoreJob`: turns queries and items into plans, sends their requests, and returns the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypedDict, TypeVar

from chunkattn.calls.algorithms import QueryItems
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import StopSample
from chunkattn.calls.score_inputs import label_ids, pair_queries, tokenize_query
from chunkattn.calls.score_plan import QueryPlan, Stage
from chunkattn.engine.messages import CachedTokens, EngineOutput, PrecomputeRequest, PrecomputeResult, ScoreResult
from chunkattn.errors import RequestError
from chunkattn.outputs import ScoreOutput
from chunkattn.parsers.arguments import salt_key

_LOOKUP_BATCH = 32
"""Queries per lookup. The engine answers a lookup between two steps."""

T = TypeVar("T")

Query = str | Sequence[int]
Items = Sequence[str] | Sequence[Sequence[int]]
ListedQueries = Sequence[str] | Sequence[Sequence[int]]
ListedItems = Sequence[Sequence[str]] | Sequence[Sequence[Sequence[int]]]


class ScoreOptions(TypedDict, total=False):
    """Options of `LLM.score`, documented there."""

    labels: Sequence[str] | None
    label_token_ids: Sequence[int] | None
    apply_softmax: bool
    item_first: bool
    algorithm: str | None
    packed_ids: Sequence[int] | None
    cache_salt: str | None
    priority: int


class ScoreJob(Generic[T]):
    """Job of a `score` or `rerank` call; see `chunkattn.calls.job.Job`.

    Args:
        plans: one plan for each query.
        result: makes the result from the scores of all queries.
        max_stage_tokens: limit on the tokens of a stage that merges the stages of several queries.
    """

    unit = "items"

    def __init__(self, plans: Sequence[QueryPlan], result: Callable[[list[ScoreOutput]], T], max_stage_tokens: int) -> None:
        self._plans, self._result, self._max_stage_tokens = plans, result, max_stage_tokens
        self._by_id: dict[str, QueryPlan] = {}  # plans of the requests that have not ended
        self._asking: dict[str, QueryPlan] = {}  # plans of the last lookups
        self.total, self.done = sum(plan.num_items for plan in plans), 0
        self.pins: Sequence[str] = ()

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order, query by query. Small stages of several queries become one."""
        waiting: Stage = []
        tokens = 0
        for plan in self._plans:
            for stage in plan.stages():
                self._by_id |= {request.request_id: plan for request in stage}
                size = sum(len(request.layout) for request in stage)
                if waiting and not (plan.independent and tokens + size <= self._max_stage_tokens):
                    yield waiting
                    waiting, tokens = [], 0
                if plan.independent and size < self._max_stage_tokens:
                    waiting, tokens = waiting + stage, tokens + size
                else:
                    yield stage
        if waiting:
            yield waiting

    @property
    def is_undecided(self) -> bool:
        """Return whether the algorithm of a query depends on what is cached."""
        return any(plan.is_undecided for plan in self._plans)

    def lookups(self) -> Iterator[list[PrecomputeRequest]]:
        """Yield requests to look up in the cache: the queries whose algorithm depends on it."""
        undecided = [plan for plan in self._plans if plan.is_undecided]
        for first in range(0, len(undecided), _LOOKUP_BATCH):
            group = undecided[first : first + _LOOKUP_BATCH]
            asked = [plan.make_lookup() for plan in group]
            self._asking = {request.request_id: plan for request, plan in zip(asked, group, strict=True)}
            yield asked

    def decide(self, asked: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Choose the algorithms of the queries that were looked up."""
        for request, found in zip(asked, cached, strict=True):
            self._asking.pop(request.request_id).decide(found)

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Process the result of one request."""
        if isinstance(output, (ScoreResult, PrecomputeResult)):
            self.done += self._by_id.pop(output.request_id).add(output)
        return True

    def result(self) -> T:
        """Return the scores or the ranking."""
        return self._result([plan.output() for plan in self._plans])


def score_job(
    frontend: Frontend,
    query: Query | ListedQueries | None,
    items: Items | ListedItems | None,
    *,
    labels: Sequence[str] | None = None,
    label_token_ids: Sequence[int] | None = None,
    apply_softmax: bool = False,
    item_first: bool = False,
    algorithm: str | None = None,
    packed_ids: Sequence[int] | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
) -> ScoreJob[ScoreOutput | list[ScoreOutput]]:
    """Check the arguments of `LLM.score`, choose the algorithms and return the job. Requests are made stage by stage.

    Args:
        frontend: frontend of the engine.
        query: see `LLM.score`.
        items: see `LLM.score`.
        labels: see `LLM.score`.
        label_token_ids: see `LLM.score`.
        apply_softmax: see `LLM.score`.
        item_first: see `LLM.score`.
        algorithm: see `LLM.score`.
        packed_ids: see `LLM.score`.
        cache_salt: see `LLM.generate`.
        priority: rank in the queue; lower goes first.

    Raises:
        RequestError: queries, items or labels are malformed, or the algorithm cannot serve them. For a list of queries the
            message names the query.
        CapacityError: the call would compute more than `max_tokens_per_call`.
    """
    ids = label_ids(frontend, labels, label_token_ids)
    pairs = None if packed_ids is not None else pair_queries(query, items)
    if pairs is None:
        queries = [tokenize_query(frontend, query, items, packed_ids, labels=ids, item_first=item_first)]
    else:
        frontend.limits.check_count(max(sum(len(own) for _, own in pairs), len(pairs)), "items of all queries")
        queries, known = [], dict[int, list[list[int]]]()
        for number, (one, own) in enumerate(pairs):
            try:
                queries.append(tokenize_query(frontend, one, own, labels=ids, item_first=item_first, known=known))
            except RequestError as error:
                raise type(error)(f"query {number}: {error}", param=error.param) from None

    def result(outputs: list[ScoreOutput]) -> ScoreOutput | list[ScoreOutput]:
        return outputs[0] if pairs is None else outputs

    return plan_job(frontend, queries, result, ids, apply_softmax, algorithm, cache_salt, priority)


def plan_job(
    frontend: Frontend,
    queries: Sequence[QueryItems],
    result: Callable[[list[ScoreOutput]], T],
    labels: tuple[int, ...],
    apply_softmax: bool,
    algorithm: str | None,
    cache_salt: str | None,
    priority: int,
    *,
    raw: bool = False,
) -> ScoreJob[T]:
    """Choose the algorithms of queries that are checked, and return the job.

    Args:
        frontend: frontend of the engine.
        queries: results of `tokenize_query`.
        result: makes the result from the scores of all queries.
        labels: token ids to read; empty for a classifier.
        apply_softmax: whether scores are normalised over the labels.
        algorithm: see `LLM.score`.
        cache_salt: see `LLM.generate`.
        priority: rank in the queue; lower goes first.
        raw: whether to read the labels' logits.
    """
    (rank,), salt = check_priorities(priority, 1), salt_key(cache_salt)
    too_costly = frontend.scores.too_costly(queries)
    plans = [
        frontend.scores.plan(
            items,
            algorithm,
            labels,
            apply_softmax=apply_softmax,
            cache_salt=salt,
            priority=rank,
            raw=raw,
            new_id=frontend.new_id,
            too_costly=too_costly,
            check=frontend.limits.check,
        )
        for items in queries
    ]
    return ScoreJob(plans, result, frontend.config.max_num_batched_tokens)
