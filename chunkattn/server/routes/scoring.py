"""Routes of `/v1/score`, `/generative_scoring` and `/v1/rerank`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from chunkattn.calls.algorithms import AUTO
from chunkattn.calls.rerank import rerank_call
from chunkattn.errors import RequestError
from chunkattn.outputs import RerankOutput, RerankResult, ScoreOutput, ScoreUsage
from chunkattn.schema.scoring import GenerativeScoringBody, RerankBody, ScoreBody, ScoringBody
from chunkattn.server.json_answer import json_answer
from chunkattn.server.state import CallerOf, ServerState, State, new_id
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Caller
from chunkattn.web.middleware import route_path
from chunkattn.web.time_limit import unless_gone

router = APIRouter(route_class=JsonRoute, tags=["scoring"])


@router.post("/generative_scoring")
async def generative_scoring(body: GenerativeScoringBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Score items by the probability of the first label after query and item."""
    _check(state, body, caller)
    items: Any = [body.items] if isinstance(body.items, str) else body.items
    state.check_answer_values(len(items) * len(body.label_token_ids), "items or labels at once", "items")
    caller.take(1)
    return await unless_gone(request, _first_labels(body, items, state, caller))


async def _first_labels(body: GenerativeScoringBody, items: Any, state: ServerState, caller: Caller) -> Response:
    output = await state.llm.score(
        body.query,
        items,
        label_token_ids=body.label_token_ids,
        apply_softmax=body.apply_softmax,
        item_first=body.item_first,
        **_how(body, state, caller),
    )
    answer = _listed(state, caller, [row[0] for row in output.scores], [output.usage], "generative-score")
    return await json_answer(state, caller, lambda: answer, len(output.scores))


@router.post("/score", include_in_schema=False)
@router.post("/v1/score")
async def score(body: ScoreBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Score items by the probability of labels after query and item, or pairs of texts by their relevance."""
    _check(state, body, caller)
    try:
        return await unless_gone(request, _scored(body, state, caller))
    except (ApiError, RequestError) as error:
        raise body.own_error(error) from None


async def _scored(body: ScoreBody, state: ServerState, caller: Caller) -> Response:
    if body.pairwise:
        listed = await _pairwise(body, state, caller)
        return await json_answer(state, caller, lambda: listed, len(listed["data"]))
    caller.take(1)
    if isinstance(body.query, list) and body.query and not isinstance(body.query[0], int):
        _check_queries(state, len(body.query))
    _check_size(state, body)
    query: Any = body.query
    items: Any = [body.items] if isinstance(body.items, str) else body.items
    output: ScoreOutput | list[ScoreOutput] = await state.llm.score(
        query,
        items,
        labels=body.labels,
        label_token_ids=body.label_token_ids,
        apply_softmax=body.apply_softmax,
        item_first=body.item_first,
        packed_ids=body.packed_ids,
        **_how(body, state, caller),
    )
    outputs, several = (output, True) if isinstance(output, list) else ([output], False)

    def per_query(values: Sequence[Any]) -> Any:
        return list(values) if several else values[0]

    answer = {
        "id": new_id("score"),
        "object": "scoring",
        "created": int(time.time()),
        "model": state.name_for(caller),
        "scores": per_query([o.scores for o in outputs]),
        "algorithm": per_query([o.algorithm for o in outputs]),
        "usage": _usage([o.usage for o in outputs]),
    }
    if body.return_logprobs:
        answer["logprobs"] = per_query([o.logprobs for o in outputs])
    values = sum(len(row) for o in outputs for row in o.scores)
    return await json_answer(state, caller, lambda: answer, values)


@router.post("/reranking", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank")
async def rerank(body: RerankBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Rank documents by their relevance to a query, the best first.

    A body with `documents` gets the answer of Cohere, Jina and SiliconFlow, a body with `texts` the list of TEI.
    """
    _check(state, body, caller)
    caller.take(1)
    version = "1" if route_path(request.scope).startswith("/v1/") else "2"
    return await unless_gone(request, _reranked(body, version, state, caller))


async def _reranked(body: RerankBody, version: str, state: ServerState, caller: Caller) -> Response:
    if body.max_query_length is not None:
        await state.llm.threads.run(_check_query, state, body.query_text, body.max_query_length)
    if body.return_documents or body.return_text:
        await state.llm.threads.run(body.check_returned)
    stored = state.named_documents(body.named(), caller, body.cache_salt)
    sources = {number: document.source for number, document in stored.items()}
    documents = body.contents(sources) if body.rank_fields is None else await state.llm.threads.run(body.contents, sources)
    try:
        output = await state.llm.rerank(
            body.query_text,
            documents,
            body.argument("top_n"),
            **body.relevance(),
            **_how(body, state, caller),
        )
    except RequestError as error:
        raise body.own_error(error) from None
    values, returns = len(output.results), body.return_documents or body.return_text

    def score(result: RerankResult) -> float:
        return result.logit if body.raw_scores else result.relevance_score

    if (texts := body.texts) is not None:

        def rank(result: RerankResult) -> dict[str, Any]:
            shown = {"text": texts[result.index]} if body.return_text else {}
            return {"index": result.index, "score": score(result)} | shown

        return await json_answer(state, caller, lambda: map(rank, output.results), values, in_thread=returns)

    def ranked(result: RerankResult) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": result.index, "relevance_score": score(result)}
        if result.truncated:
            fields["truncated"] = True
        if body.return_documents:
            sent, document = body.entries[result.index], stored.get(result.index)
            if document is not None:
                fields["document"] = {"id": document.record.id} | ({} if document.text is None else {"text": document.text})
            else:
                fields["document"] = {"text": sent} if isinstance(sent, str) else sent.model_dump(exclude_unset=True)
        return fields

    tokens = {"input_tokens": output.usage.prompt_tokens, "output_tokens": 0}
    answer = {
        "id": body.request_id or new_id("rerank"),
        "model": state.name_for(caller),
        "results": map(ranked, output.results),
        "usage": _usage([output.usage]),
        "template": output.template,
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1, **tokens}, "tokens": tokens},
    }
    return await json_answer(state, caller, lambda: answer, values, in_thread=returns)


def _check_size(state: ServerState, body: ScoreBody) -> None:
    """Check the size of the answer: queries x items x labels, twice with log-probabilities.

    Raises:
        ApiError: 400, the answer would exceed `max_answer_values`.
    """
    listed = isinstance(body.query, list) and bool(body.query) and not isinstance(body.query[0], int)
    items: list[Any] = body.items if isinstance(body.items, list) else body.packed_ids or []  # ids bound the number of items
    if listed and any(isinstance(i, list) and i and isinstance(i[0], (str, list)) for i in items):
        count = sum(len(entry) for entry in items if isinstance(entry, list))  # one list of items per query
    else:
        count = len(items) * (len(body.query or []) if listed else 1)
    labels: list[Any] = list(body.labels or body.label_token_ids or [0])
    values = count * len(labels)
    if any(isinstance(entry, list) for entry in labels):
        by_query = [entry for lists in labels for entry in lists if isinstance(entry, list)]
        values = sum(map(len, by_query)) or sum(map(len, labels)) * (len(body.query or []) if listed else 1)
    values *= 1 + body.return_logprobs
    state.check_answer_values(values, "items or labels at once", "items")


def _check_queries(state: ServerState, count: int, param: str = "query") -> None:
    if count > (limit := state.most_prompts):
        raise ApiError(400, f"{count} queries exceed the {limit} of one request", param=param, code="invalid_value")


def _how(body: ScoringBody, state: ServerState, caller: Caller) -> dict[str, Any]:
    """Return the arguments of every scoring call."""
    arguments = {"algorithm": body.algorithm, "cache_salt": caller.salt(body.cache_salt), "priority": body.priority}
    return {**arguments, "timeout": state.config.request_timeout_s}


def _check_query(state: ServerState, query: str, most: int) -> None:
    """Check the length of a query against the request's own limit.

    Raises:
        ApiError: 400, the query has more than `most` tokens.
    """
    count = len(state.llm.frontend.parser.encode(query, "query", "query"))
    if count > most:
        text = f"the query has {count} tokens, max_query_length is {most}; shorten the query, it is never cut"
        raise ApiError(400, text, param="query", code="context_length_exceeded")


def _check(state: ServerState, body: ScoringBody, caller: Caller) -> None:
    state.check(body, caller)
    if body.algorithm not in (None, "auto", *AUTO):  # a baseline delays all other requests
        text = f"unknown algorithm {body.algorithm!r}; choose auto, {', '.join(AUTO)}"
        raise ApiError(400, text, param="algorithm", code="invalid_value")


async def _pairwise(body: ScoreBody, state: ServerState, caller: Caller) -> dict[str, Any]:
    """Return the relevance of each document to its query under the rerank template."""
    stored, fields = state.named_documents(body.named(), caller, body.cache_salt), body.pair_names
    queries, documents = body.pairs({number: document.source for number, document in stored.items()})
    _check_queries(state, len(queries), fields.prefix)
    caller.take(len(queries) or 1)

    places: dict[str, list[int]] = {}  # of the documents of each query
    for place, query in enumerate(queries):
        places.setdefault(query, []).append(place)
    if len(queries) == 1:
        places = {queries[0]: [*range(len(documents))]}

    async def ranked(query: str, numbers: list[int]) -> RerankOutput:
        options = body.relevance() | _how(body, state, caller)
        names = fields._replace(listed=[f"document {number}" for number in numbers])
        timeout, sent = options.pop("timeout"), [documents[place] for place in numbers]
        call = partial(rerank_call, state.llm.frontend, query, sent, names=names, **options)
        try:
            return await state.llm.run(call, timeout)
        except RequestError as error:
            if error.param != names.prefix or len(queries) == 1:
                raise
            raise type(error)(f"query {queries.index(query)}: {error}", param=error.param) from None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ranked(query, numbers)) for query, numbers in places.items()]
    except* Exception as several:
        raise several.exceptions[0] from None
    outputs = [task.result() for task in tasks]
    result_of = {numbers[r.index]: r for numbers, output in zip(places.values(), outputs, strict=True) for r in output.results}
    results = [result_of[place] for place in range(len(documents))]
    listed = _listed(state, caller, [result.relevance_score for result in results], [o.usage for o in outputs], "score")
    for entry, result in zip(listed["data"], results, strict=True):
        if result.truncated:
            entry["truncated"] = True
    return listed


def _listed(
    state: ServerState, caller: Caller, values: Sequence[float], usages: Sequence[ScoreUsage], kind: str
) -> dict[str, Any]:
    """Return scores in vLLM's format."""
    return {
        "id": new_id(kind),
        "object": "list",
        "created": int(time.time()),
        "model": state.name_for(caller),
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)],
        "usage": _usage(usages),
    }


def _usage(usages: Sequence[ScoreUsage]) -> dict[str, Any]:
    prompt = sum(u.prompt_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 0,
        "total_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
        "computed_tokens": sum(u.computed_tokens for u in usages),
    }
