"""`ScoreJob`: turns queries and items into plans, sends their requests, and returns the scores or a ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np

from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import Taken
from chunkattn.engine.messages import CachedTokens, EngineOutput, PrecomputeRequest, PrecomputeResult, ScoreResult
from chunkattn.errors import CapacityError, MissingError, RequestError
from chunkattn.outputs import RerankOutput, ScoreOutput
from chunkattn.parsers.arguments import as_list, check_ids, salt_key
from chunkattn.parsers.delimited import check_no_delimiter, parse_delimited
from chunkattn.scoring import QueryItems, QueryPlan
from chunkattn.scoring.labels import resolve_labels
from chunkattn.scoring.plan import Stage
from chunkattn.scoring.planner import max_request_tokens
from chunkattn.scoring.queries import pair_queries
from chunkattn.scoring.rerank import plan_rerank, relevance_class
from chunkattn.scoring.rerank_template import RerankTemplate, pick_template

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

    def take(self, output: EngineOutput) -> Taken:
        """Process the result of one request."""
        if isinstance(output, (ScoreResult, PrecomputeResult)):
            self.done += self._by_id.pop(output.request_id).add(output)
        return Taken(ended=True)

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
    label_ids = _label_ids(frontend, labels, label_token_ids)
    pairs = None if packed_ids is not None else pair_queries(query, items)
    if pairs is None:
        queries = [tokenize_query(frontend, query, items, packed_ids, labels=label_ids, item_first=item_first)]
    else:
        frontend.check_count(max(sum(len(own) for _, own in pairs), len(pairs)), "items of all queries")
        queries, known = [], dict[int, list[list[int]]]()
        for number, (one, own) in enumerate(pairs):
            try:
                queries.append(tokenize_query(frontend, one, own, labels=label_ids, item_first=item_first, known=known))
            except RequestError as error:
                raise type(error)(f"query {number}: {error}", param=error.param) from None

    def result(outputs: list[ScoreOutput]) -> ScoreOutput | list[ScoreOutput]:
        return outputs[0] if pairs is None else outputs

    return _job(frontend, queries, result, label_ids, apply_softmax, algorithm, cache_salt, priority)


def rerank_job(
    frontend: Frontend,
    query: str,
    documents: Sequence[str | Sequence[int]],
    top_n: int | None = None,
    *,
    instruction: str | None = None,
    template: RerankTemplate | str | None = None,
    max_tokens_per_doc: int | None = None,
    truncate_prompt_tokens: int | None = None,
    algorithm: str | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
) -> ScoreJob[RerankOutput]:
    """Check the arguments of `LLM.rerank`, choose the algorithm and return the job, which scores documents as items.

    Args:
        frontend: frontend of the engine.
        query: see `LLM.rerank`.
        documents: see `LLM.rerank`.
        top_n: see `LLM.rerank`.
        instruction: see `LLM.rerank`.
        template: see `LLM.rerank`.
        max_tokens_per_doc: see `LLM.rerank`.
        truncate_prompt_tokens: see `LLM.rerank`.
        algorithm: see `LLM.score`.
        cache_salt: see `LLM.generate`.
        priority: rank in the queue; lower goes first.

    Raises:
        RequestError: an argument is malformed, a document is too long, or the checkpoint is a classifier whose classes do not
            tell which one means relevant.
        CapacityError: the call would compute more than `max_tokens_per_call`.
    """
    classes = frontend.reranker.class_names
    column = relevance_class(classes) if classes else 0
    if isinstance(documents, Sequence):
        frontend.check_count(len(documents), "documents")
    config, encode = frontend.config, frontend.parser.encode
    plan = plan_rerank(
        encode,
        frontend.rerank_template if template is None else pick_template(template, encode),
        query,
        documents,
        top_n=top_n,
        instruction=instruction,
        max_tokens_per_doc=max_tokens_per_doc,
        truncate_prompt_tokens=truncate_prompt_tokens,
        special_tokens=config.special_tokens_in_documents,
        classifier=bool(classes),
    ).fit(frontend.limits, config.max_chunk_len)

    def ranked(outputs: list[ScoreOutput]) -> RerankOutput:
        return plan.ranked(outputs[0], column)

    try:
        scored = tokenize_query(frontend, plan.prefix, plan.items, labels=plan.labels, delimited=False)
        raw = len(plan.labels) == 1
        return _job(frontend, [scored], ranked, plan.labels, True, algorithm, cache_salt, priority, raw=raw)
    except RequestError as error:  # translate to the argument names of this call
        names = {"items": "documents", "label_token_ids": "template"}
        raise error.renamed(error.part, names.get(error.param or "", error.param)) from None


def _job(
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
            check=frontend.intake.check,
        )
        for items in queries
    ]
    return ScoreJob(plans, result, frontend.config.max_num_batched_tokens)


def _label_ids(frontend: Frontend, labels: Sequence[str] | None, label_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    if (classes := frontend.limits.num_labels) is None:
        return resolve_labels(frontend.parser.encode, labels, label_token_ids)
    if labels is not None or label_token_ids is not None:
        given = "label_token_ids" if labels is None else "labels"
        reason = f"this checkpoint is a sequence classifier and scores its own {classes} classes; leave {given} out"
        raise RequestError(reason, param=given)
    return ()


def tokenize_query(
    frontend: Frontend,
    query: Any,
    items: Any,
    packed_ids: Sequence[int] | None = None,
    *,
    labels: tuple[int, ...],
    item_first: bool = False,
    delimited: bool = True,
    known: dict[int, list[list[int]]] | None = None,
) -> QueryItems:
    """Tokenize and check one query and its items.

    Args:
        frontend: frontend of the engine.
        query: text or token ids.
        items: texts or token ids, of the same kind as the query.
        packed_ids: packed token ids, instead of query and items.
        labels: token ids of the labels.
        item_first: see `LLM.score`.
        delimited: whether to reject parts that hold the engine's delimiter, if it has one.
        known: token ids of the item lists of this call, by the identity of the list; new lists are added.

    Raises:
        RequestError: the query, items or labels are malformed.
    """
    delimiter = frontend.config.multi_item_scoring_delimiter
    if packed_ids is not None:
        if item_first:
            raise RequestError("packed_ids begin with the query; item_first needs query and items", param="item_first")
        query_ids, item_ids = _packed(frontend, query, items, packed_ids)
        leading: list[int] = []
    else:
        query_ids, item_ids, leading = _tokenized(frontend, query, items, {} if known is None else known)
        if delimited and delimiter is not None:
            check_no_delimiter(query_ids, item_ids, delimiter)
    _check(frontend, query_ids, item_ids, leading, labels)
    return frontend.scores.query_items(query_ids, item_ids, leading, item_first)


def _packed(frontend: Frontend, query: Any, items: Any, packed_ids: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a packed query and of its items."""
    delimiter = frontend.config.multi_item_scoring_delimiter
    if delimiter is None:
        raise RequestError("packed_ids need the engine option multi_item_scoring_delimiter", param="packed_ids")
    if query is not None or items is not None:
        raise RequestError("packed_ids come instead of query and items", param="packed_ids")
    if isinstance(packed_ids, (Sequence, np.ndarray)):
        frontend.check_count(list(packed_ids).count(delimiter) - 1, "items")
    return parse_delimited(check_ids(packed_ids, "packed_ids", "packed_ids"), delimiter)


def _tokenized(
    frontend: Frontend, query: Any, items: Any, known: dict[int, list[list[int]]]
) -> tuple[list[int], list[list[int]], list[int]]:
    """Return the token ids of the query, of the items, and of the leading special tokens if query and items are text."""
    if query is None or items is None:
        missing = "query" if query is None else "items"
        raise MissingError(f"{missing} is missing: score needs a query and items", param=missing)
    given, items = id(items), as_list(items, "items")
    frontend.check_count(len(items), "items")
    kinds = {isinstance(part, str) for part in (query, *items)}
    if len(kinds) > 1:
        raise RequestError("query and items must be all text or all token ids", param="items")
    ids = partial(check_ids, most=frontend.parser.max_tokens)
    read, name = (ids, "items[{}]") if kinds == {False} else (frontend.parser.prompts, "item {}")
    query_ids = read(query, "query", "query")
    if given not in known:
        known[given] = [read(item, name.format(i), "items") for i, item in enumerate(items)]
    if not query_ids:
        raise RequestError("the query is empty", param="query")
    return query_ids, known[given], frontend.parser.encode.leading_ids if kinds == {True} else []


def _check(frontend: Frontend, query: list[int], items: list[list[int]], leading: list[int], labels: tuple[int, ...]) -> None:
    """Check every limit that is independent of the algorithm; errors use the caller's names."""
    limits, longest = frontend.limits, frontend.config.max_chunk_len
    slots = max_request_tokens(limits)
    named = [("query", query, "query"), *((f"item {i}", item, "items") for i, item in enumerate(items))]
    for name, ids, param in [*named, ("label_token_ids", labels, "label_token_ids")]:
        if ids and max(ids) >= limits.vocab_size:
            text = f": token id {max(ids)} is outside the vocabulary of {limits.vocab_size}"
            raise RequestError(text, param=param, part=name)
    for name, ids, param in named:
        total = len(leading) + len(query) + (len(ids) if name != "query" else 0)
        if name != "query" and len(ids) > longest:
            raise CapacityError(f" has {len(ids)} tokens, max_chunk_len is {longest}", param=param, part=name)
        if total > limits.max_model_len:
            text = f" of {len(ids)} tokens needs {total} positions with the query, max_model_len is {limits.max_model_len}"
            raise CapacityError(text, param=param, part=name)
        if total > slots:
            raise CapacityError(
                f" of {len(ids)} tokens needs {total} KV slots with the query, the pool has {slots}; "
                "raise kv_cache_memory_bytes",
                param=param,
                part=name,
            )
