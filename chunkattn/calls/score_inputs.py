"""Query, items and labels of a scoring call, as token ids that are checked."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import partial
from typing import Any

import numpy as np

from chunkattn.calls.algorithms import ITEMS, Nouns, QueryItems
from chunkattn.calls.frontend import Frontend
from chunkattn.config import MAX_LABELS, check_size
from chunkattn.errors import MissingError, RequestError
from chunkattn.layout import Names
from chunkattn.parsers.arguments import as_list, check_ids
from chunkattn.parsers.delimited import check_no_delimiter, parse_delimited
from chunkattn.parsers.encode import PartEncoder


def label_ids(frontend: Frontend, labels: Sequence[str] | None, label_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Return the token ids of the labels of a call; none for a classifier, which scores its own classes."""
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
    nouns: Nouns = ITEMS,
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
        nouns: the caller's nouns, for errors.

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
    frontend.limits.check_ids(labels, nouns.labels)
    names = Names("query", nouns.items, chunk=nouns.item)
    frontend.limits.check_items([*leading, *query_ids], item_ids, names)
    return frontend.scores.query_items(query_ids, item_ids, leading, item_first, nouns)


def _packed(frontend: Frontend, query: Any, items: Any, packed_ids: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a packed query and of its items."""
    delimiter = frontend.config.multi_item_scoring_delimiter
    if delimiter is None:
        raise RequestError("packed_ids need the engine option multi_item_scoring_delimiter", param="packed_ids")
    if query is not None or items is not None:
        raise RequestError("packed_ids come instead of query and items", param="packed_ids")
    if isinstance(packed_ids, (Sequence, np.ndarray)):
        frontend.limits.check_count(list(packed_ids).count(delimiter) - 1, "items")
    return parse_delimited(check_ids(packed_ids, "packed_ids", "packed_ids"), delimiter)


def _tokenized(
    frontend: Frontend, query: Any, items: Any, known: dict[int, list[list[int]]]
) -> tuple[list[int], list[list[int]], list[int]]:
    """Return the token ids of the query, of the items, and of the leading special tokens if query and items are text."""
    if query is None or items is None:
        missing = "query" if query is None else "items"
        raise MissingError(f"{missing} is missing: score needs a query and items", param=missing)
    given, items = id(items), as_list(items, "items")
    frontend.limits.check_count(len(items), "items")
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


def resolve_labels(
    encode: PartEncoder, labels: Sequence[str] | None = None, label_token_ids: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the token ids of the labels.

    Args:
        encode: encoder with the engine's tokenizer.
        labels: texts, each one token without special tokens; duplicates are allowed.
        label_token_ids: token ids instead of texts; duplicates are allowed.

    Raises:
        RequestError: both or neither of `labels` and `label_token_ids` are given, the number of labels is 0 or above
            `MAX_LABELS`, or a label is not exactly one token.
    """
    if labels is None and label_token_ids is None:
        raise MissingError("give either labels or label_token_ids, e.g. labels=['yes', 'no']", param="label_token_ids")
    if labels is not None and label_token_ids is not None:
        raise RequestError("give either labels or label_token_ids, not both", param="label_token_ids")
    given = "labels" if label_token_ids is None else "label_token_ids"
    if isinstance(sized := labels if label_token_ids is None else label_token_ids, Sized):
        check_size(given, sized, MAX_LABELS)
    if label_token_ids is not None:
        ids = check_ids(label_token_ids, "label_token_ids", "label_token_ids")
    elif isinstance(labels, (list, tuple)):
        ids = [_label_id(encode, label, index) for index, label in enumerate(labels)]
    else:
        raise RequestError(f"labels must be a list of strings, got {type(labels).__name__}", param="labels")
    if not ids:
        raise RequestError(f"{given} must hold at least one {'label' if given == 'labels' else 'token id'}", param=given)
    return tuple(ids)


def _label_id(encode: PartEncoder, label: str, index: int) -> int:
    if not isinstance(label, str):
        raise RequestError(f"labels[{index}] must be a string, got {type(label).__name__}", param="labels")
    if encode.tokenizer is None:
        raise RequestError("labels need a tokenizer and this engine has none; give label_token_ids", param="labels")
    ids = encode(label, f"labels[{index}]", "labels")
    if len(ids) != 1:
        other = label.removeprefix(" ") if label.startswith(" ") else f" {label}"
        advice = f"{other!r} is one" if len(encode(other)) == 1 else "take another word, or label_token_ids"
        raise RequestError(
            f"label {label!r} is {len(ids)} tokens {encode.tokenizer.convert_ids_to_tokens(ids)}; "
            f"a label must be exactly one: {advice}",
            param="labels",
        )
    return ids[0]


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
    if not _is_list(query) or not len(query) or not _is_part(query[0]):
        return None
    for index, part in enumerate(query):
        if not _is_part(part):
            raise RequestError(f"query[{index}] must be text or token ids as the others are, got {part!r}", param="query")
    if not _is_list(items):
        raise RequestError(f"items must be a list, got {type(items).__name__}", param="items")
    flat = [isinstance(item, str) or (_is_list(item) and len(item) > 0 and not _is_part(item[0])) for item in items]
    if any(flat) or not len(items):
        for index, item in enumerate(items):
            # Among flat items, an empty list is an item without tokens.
            if not flat[index] and not (_is_list(item) and not len(item)):
                raise RequestError(
                    f"items[{index}] is no item while items[{flat.index(True)}] is one; "
                    "give items for all queries, or a list of items for each query",
                    param="items",
                )
        shared = list(items)  # queries share one list, so its items are tokenized once
        return [(part, shared) for part in query]
    for index, own in enumerate(items):
        if not _is_list(own):
            raise RequestError(f"items[{index}] must be a list of items, got {type(own).__name__}", param="items")
    if len(items) != len(query):
        raise RequestError(f"{len(items)} lists of items for {len(query)} queries", param="items")
    return [(part, own if isinstance(own, list) else list(own)) for part, own in zip(query, items, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _is_part(value: Any) -> bool:
    """Return whether `value` is text or a list rather than a token id."""
    return isinstance(value, str) or _is_list(value)
