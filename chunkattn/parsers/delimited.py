"""Packed scoring sequences `query<d>item 1<d>...item N<d>`, the form of SGLang's and FlashInfer's multi-item scoring.

The delimiter only marks boundaries here. It does not enter the model, so items cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from chunkattn.errors import ConfigError, RequestError
from chunkattn.parsers.separator import split_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def parse_delimited(ids: Sequence[int], delimiter: int) -> tuple[list[int], list[list[int]]]:
    """Return the query and the items of a packed sequence. Adjacent delimiters enclose an empty item.

    Args:
        ids: token ids of the packed sequence.
        delimiter: token id of the delimiter.

    Raises:
        RequestError: the delimiter is absent, the query is empty, or the last id is not the delimiter.
    """
    if delimiter not in ids:
        raise RequestError(f"packed_ids hold no delimiter (id {delimiter})", param="packed_ids")
    if ids[-1] != delimiter:
        raise RequestError(f"packed_ids must end with the delimiter (id {delimiter}), got {ids[-1]}", param="packed_ids")
    query, *items, _ = split_ids(ids, [delimiter])
    if not query:
        raise RequestError("packed_ids begin with the delimiter: the query is empty", param="packed_ids")
    return query, items


def pack_delimited(query: Sequence[int], items: Sequence[Sequence[int]], delimiter: int) -> list[int]:
    """Return the packed sequence of a query and its items.

    Args:
        query: token ids of the query.
        items: token ids of each item.
        delimiter: token id of the delimiter.

    Raises:
        RequestError: the delimiter occurs inside the query or an item.
    """
    check_no_delimiter(query, items, delimiter)
    return [*query, delimiter, *(t for item in items for t in (*item, delimiter))]


def check_no_delimiter(query: Sequence[int], items: Sequence[Sequence[int]], delimiter: int) -> None:
    """Check that query and items can be packed.

    Args:
        query: token ids of the query.
        items: token ids of each item.
        delimiter: token id of the delimiter.

    Raises:
        RequestError: the delimiter occurs inside the query or an item.
    """
    for name, part in (("query", query), *((f"item {i}", item) for i, item in enumerate(items))):
        if delimiter in part:
            raise RequestError(
                f" contains the delimiter (id {delimiter}) at index {list(part).index(delimiter)}",
                param="query" if name == "query" else "items",
                part=name,
            )


class FlashInferParams(NamedTuple):
    """FlashInfer's multi-item parameters of one packed sequence (a batch of one).

    Attributes:
        prefix_len: uint32 `[1]`, tokens before the first delimiter.
        token_pos_in_items: uint16 `[len]`, 0 at every delimiter, then 1, 2... within an item.
        token_pos_in_items_len: number of tokens from the first delimiter on.
        max_item_len: uint16 `[1]`, tokens of the longest item.
    """

    prefix_len: np.ndarray
    token_pos_in_items: np.ndarray
    token_pos_in_items_len: int
    max_item_len: np.ndarray


def flashinfer_params(ids: Sequence[int], delimiter: int) -> FlashInferParams:
    """Return the parameters of FlashInfer's prefill for a packed sequence.

    Args:
        ids: token ids of the packed sequence.
        delimiter: token id of the delimiter.

    >>> flashinfer_params([5, 5, 5, 0, 7, 0, 7, 7, 0], 0).token_pos_in_items.tolist()
    [0, 1, 0, 1, 2, 0]

    Raises:
        RequestError: the sequence is malformed (see `parse_delimited`), or an item's length exceeds uint16.
    """
    query, items = parse_delimited(ids, delimiter)
    longest = max(map(len, items), default=0)
    if longest > np.iinfo(np.uint16).max:
        raise RequestError(f"an item of {longest} tokens exceeds FlashInfer's uint16 positions", param="packed_ids")
    positions = np.concatenate([*(np.arange(len(i) + 1) for i in items), [0]]).astype(np.uint16)
    return FlashInferParams(np.asarray([len(query)], np.uint32), positions, len(positions), np.asarray([longest], np.uint16))


def check_delimiter(tokenizer: PreTrainedTokenizerBase | None, delimiter: int, vocab_size: int) -> None:
    """Check that a delimiter's text tokenizes to the delimiter.

    Args:
        tokenizer: tokenizer of the model; None skips the check of the text.
        delimiter: token id of the delimiter.
        vocab_size: size of the model's vocabulary.

    Raises:
        ConfigError: the delimiter is outside the vocabulary, or its text tokenizes to other ids.
    """
    if delimiter >= vocab_size:
        raise ConfigError(f"multi_item_scoring_delimiter {delimiter} is outside the vocabulary of {vocab_size}")
    if tokenizer is None:
        return
    text = tokenizer.decode([delimiter])
    again = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if again != [delimiter]:
        raise ConfigError(
            f"multi_item_scoring_delimiter {delimiter} decodes to {text!r}, which tokenizes to {again}; "
            "choose a token that stands for itself, such as a special token"
        )
