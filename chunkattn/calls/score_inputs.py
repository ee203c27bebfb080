"""`score_call`: query, items and labels of `LLM.score`, as token ids that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict

import numpy as np

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.items_first import ItemsFirst
from chunkattn.calls.job import STAGE_STEPS
from chunkattn.calls.labels import Labels, LabelTokenIds, read_labels
from chunkattn.calls.score import ScoreCall
from chunkattn.calls.score_job import ScoreJob
from chunkattn.engine.limits import ITEMS
from chunkattn.errors import MissingError, RequestError
from chunkattn.layout import Names
from chunkattn.outputs import ScoreOutput
from chunkattn.parsers.arguments import as_list, check_ids, is_list, plain_ids
from chunkattn.parsers.delimited import check_no_delimiter, parse_delimited
from chunkattn.parsers.token_lists import TokenLists

Query = str | Sequence[int]
Items = Sequence[str] | Sequence[Sequence[int]]
ListedQueries = Sequence[str] | Sequence[Sequence[int]]
ListedItems = Sequence[Sequence[str]] | Sequence[Sequence[Sequence[int]]]

PACKED = Names("packed_ids", "packed_ids", "packed_ids", "item")
"""Names of the parts of packed token ids."""


class ScoreOptions(TypedDict, total=False):
    """Options of `LLM.score`, all by name.

    Attributes:
        labels: texts of one token each; the score is the probability of the label after the item. One list for all items, or
            one list per item, or such a list of lists for each of a list of queries.
        label_token_ids: token ids of the labels, instead of `labels` and in the same forms. A sequence classifier takes no
            labels: its scores are the softmax over its classes, or the sigmoid of its only class.
        apply_softmax: normalise over the item's labels instead of the whole vocabulary; ignored for a classifier.
        item_first: score item + query instead. Items share nothing, so only `"serial"` and `"prefill_extend"` can run; the
            latter keeps the items in the cache. `"auto"` reads the items that are cached and computes the others.
        algorithm: `"auto"`, `"serial"`, `"packed_segment"`, `"prefill_extend"` or `"packed_dense"`, which return equal scores;
            None takes the engine's `score_algorithm`.
        packed_ids: token ids `query<d>item<d>...item<d>`, instead of query and items. `<d>` is the engine's
            `multi_item_scoring_delimiter`.
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        priority: see `LLM.generate`; one value for the call.
    """

    labels: Labels | None
    label_token_ids: LabelTokenIds | None
    apply_softmax: bool
    item_first: bool
    algorithm: str | None
    packed_ids: Sequence[int] | None
    cache_salt: str | None
    lora_request: LoRARequest | None
    priority: int


def score_call(
    frontend: Frontend,
    query: Query | ListedQueries | None,
    items: Items | ListedItems | None,
    *,
    labels: Labels | None = None,
    label_token_ids: LabelTokenIds | None = None,
    item_first: bool = False,
    packed_ids: Sequence[int] | None = None,
    apply_softmax: bool = False,
    algorithm: str | None = None,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
    priority: int = 0,
) -> ScoreJob[ScoreOutput | list[ScoreOutput]]:
    """Check the arguments of `LLM.score`, choose the algorithms and return the job.

    See `LLM.score` and `ScoreOptions` for the arguments.

    Raises:
        RequestError: queries, items or labels are malformed, or the algorithm cannot serve them. For a list of queries the
            message names the query.
        CapacityError: the call would compute more than `max_tokens_per_call`.
    """
    names = ITEMS if packed_ids is None else PACKED
    lists_of = read_labels(frontend, labels, label_token_ids)
    known: dict[int, TokenLists] = {}

    def read(one: Any, listed: Any) -> tuple[list[int], list[int], TokenLists]:
        """Return the leading special tokens, and the token ids of the query and of each item."""
        if packed_ids is not None:
            leading, (query_ids, item_lists) = list[int](), _packed(frontend, one, listed, packed_ids)
            item_ids = TokenLists.of(item_lists)
        else:
            leading, query_ids, item_ids = _tokenized(frontend, one, listed, known)
            if (delimiter := frontend.config.multi_item_scoring_delimiter) is not None:
                check_no_delimiter(query_ids, item_ids, delimiter)
        frontend.limits.check_items(leading + query_ids, item_ids, names)
        return leading, query_ids, item_ids

    if packed_ids is not None and item_first:
        raise RequestError("packed_ids begin with the query; item_first needs query and items", param="item_first")
    pairs = None if packed_ids is not None else pair_queries(query, items)
    if pairs is None:
        parts = [read(query, items)]
    else:
        frontend.limits.check_count(max(sum(len(listed) for _, listed in pairs), len(pairs)), "items of all queries", "items")
        parts = []
        for number, (one, listed) in enumerate(pairs):
            try:
                parts.append(read(one, listed))
            except RequestError as error:
                raise type(error)(f"query {number}: {error}", param=error.param) from None
    lists = lists_of([len(item_ids) for _, _, item_ids in parts], pairs is not None)
    options: dict[str, Any] = {"algorithm": algorithm, "priority": priority, "names": names}
    options["cache_salt"] = salt_for(lora_request, cache_salt)
    options["apply_softmax"] = apply_softmax
    if item_first:
        turned = [
            ItemsFirst(frontend, [leading + item for item in item_ids], query_ids, item_labels, **options)
            for (leading, query_ids, item_ids), item_labels in zip(parts, lists, strict=True)
        ]
        calls = [call for query in turned for call in query.calls]
    else:
        calls = [
            ScoreCall(frontend, leading + query_ids, item_ids, item_labels, **options)
            for (leading, query_ids, item_ids), item_labels in zip(parts, lists, strict=True)
        ]

    def finish(outputs: list[ScoreOutput]) -> ScoreOutput | list[ScoreOutput]:
        left = iter(outputs)
        by_query = [query.merge([next(left) for _ in query.calls]) for query in turned] if item_first else outputs
        return by_query[0] if pairs is None else by_query

    return ScoreJob(frontend, calls, finish, STAGE_STEPS if item_first or pairs is None else 1)


def _packed(frontend: Frontend, query: Any, items: Any, packed_ids: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a packed query and of its items."""
    delimiter = frontend.config.multi_item_scoring_delimiter
    if delimiter is None:
        raise RequestError("packed_ids need the engine option multi_item_scoring_delimiter", param="packed_ids")
    if query is not None or items is not None:
        raise RequestError("packed_ids come instead of query and items", param="packed_ids")
    if isinstance(packed_ids, (Sequence, np.ndarray)):
        frontend.limits.check_count(list(packed_ids).count(delimiter) - 1, "items", "packed_ids")
    return parse_delimited(check_ids(packed_ids, "packed_ids", "packed_ids"), delimiter)


def _tokenized(
    frontend: Frontend, query: Any, items: Any, known: dict[int, TokenLists]
) -> tuple[list[int], list[int], TokenLists]:
    """Return the leading special tokens of text, the token ids of the query, and those of each item.

    Args:
        frontend: frontend of the engine.
        query: text or token ids.
        items: texts or token ids, of the same kind as the query.
        known: token ids of the item lists of this call, by the identity of the list; new lists are added.
    """
    if query is None or items is None:
        missing = "query" if query is None else "items"
        raise MissingError(f"{missing} is missing: score needs a query and items", param=missing)
    identity, items = id(items), as_list(items, "items")
    frontend.limits.check_count(len(items), "items", "items")
    kinds = {isinstance(part, str) for part in (query, *items)}
    if len(kinds) > 1:
        raise RequestError("query and items must be all text or all token ids", param="items")
    ids = partial(check_ids, most=frontend.parser.max_tokens)
    read, name = (ids, "items[{}]") if kinds == {False} else (frontend.parser.prompts, "item {}")
    query_ids = read(query, "query", "query")
    if identity not in known:
        plain = plain_ids(items, frontend.parser.max_tokens) if kinds == {False} else None
        known[identity] = plain or TokenLists(read(item, name.format(i), "items") for i, item in enumerate(items))
    if not query_ids:
        raise RequestError("the query is empty", param="query")
    return frontend.parser.encode.leading_ids if kinds == {True} else [], query_ids, known[identity]


def pair_queries(query: Any, items: Any) -> list[tuple[Any, list[Any]]] | None:
    """Pair each query with its items; return None if `query` is one text or one list of token ids.

    `query` is a list of queries if its first entry is a text or a list. If any entry of `items` is a text or a list that begins
    with an integer, all queries share `items`. Otherwise `items` holds one list for each query. If `items` is empty, no query
    has items.

    Args:
        query: one query or a list of queries, each a text or token ids.
        items: items for all queries, or a list of items per query.

    Raises:
        RequestError: `query` or `items` mix both forms, or the numbers of item lists and queries differ.
    """
    if not is_list(query) or not len(query) or not _is_part(query[0]):
        return None
    for index, part in enumerate(query):
        if not _is_part(part):
            raise RequestError(f"query[{index}] must be text or token ids as the others are, got {part!r}", param="query")
    if not is_list(items):
        raise RequestError(f"items must be a list, got {type(items).__name__}", param="items")
    flat = [isinstance(item, str) or (is_list(item) and len(item) > 0 and not _is_part(item[0])) for item in items]
    if any(flat) or not len(items):
        for index, item in enumerate(items):
            # Among flat items, an empty list is an item without tokens.
            if not flat[index] and not (is_list(item) and not len(item)):
                raise RequestError(
                    f"items[{index}] is no item while items[{flat.index(True)}] is one; "
                    "give items for all queries, or a list of items for each query",
                    param="items",
                )
        shared = list(items)  # queries share one list, so its items are tokenized once
        return [(part, shared) for part in query]
    for index, entry in enumerate(items):
        if not is_list(entry):
            raise RequestError(f"items[{index}] must be a list of items, got {type(entry).__name__}", param="items")
    if len(items) != len(query):
        raise RequestError(f"{len(items)} lists of items for {len(query)} queries", param="items")
    return [(part, entry if isinstance(entry, list) else list(entry)) for part, entry in zip(query, items, strict=True)]


def _is_part(value: Any) -> bool:
    """Return whether `value` is text or a list rather than a token id."""
    return isinstance(value, str) or is_list(value)
