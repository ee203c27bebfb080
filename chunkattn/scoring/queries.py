"""The form of scoring calls with a list of queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chunkattn.errors import RequestError


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
