"""`read_labels`: the labels of `LLM.score` as token ids that are checked, one list for all items or one list per item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chunkattn.calls.frontend import Frontend
from chunkattn.config import MAX_LABELS
from chunkattn.errors import MissingError, RequestError
from chunkattn.parsers.arguments import check_ids, is_list
from chunkattn.parsers.encode import PartEncoder

Labels = Sequence[str] | Sequence[Sequence[str]] | Sequence[Sequence[Sequence[str]]]
LabelTokenIds = Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]

LabelList = tuple[int, ...]
"""Token ids of the labels of an item."""
ListsOf = Callable[[Sequence[int], bool], list[list[LabelList]]]
"""Function from the number of items of each query, and whether the queries are a list, to the labels of each item by query."""


def read_labels(frontend: Frontend, labels: Labels | None, label_token_ids: LabelTokenIds | None) -> ListsOf:
    """Return a function that gives each item its labels. For a classifier, which scores its own classes, it gives none.

    Args:
        frontend: frontend of the engine.
        labels: one list of texts for all items, one list per item, or such a list of lists per query.
        label_token_ids: token ids instead of texts, in the same forms.

    Raises:
        RequestError: both or neither of `labels` and `label_token_ids` are given, a list is empty or too long, an entry is no
            label, or the labels of a classifier are given. The function raises it unless there is one list per item.
    """
    if (classes := frontend.limits.num_labels) is not None:
        if labels is not None or label_token_ids is not None:
            given = "label_token_ids" if labels is None else "labels"
            reason = f"this checkpoint is a sequence classifier and scores its own {classes} classes; leave {given} out"
            raise RequestError(reason, param=given)
        return lambda counts, _: [[] for _ in counts]
    param, given = _given(labels, label_token_ids)
    reader = _Reader(frontend, param)
    depth = _depth(given)
    if depth < 2:
        shared = reader.read(given)
        return lambda counts, _: [[shared] * count for count in counts]
    if depth == 2:
        lists = reader.read_items(given)
        return lambda counts, _: [_one_each(param, lists, count) for count in counts]
    by_query = reader.read_queries(given)

    def lists_of(counts: Sequence[int], listed: bool) -> list[list[LabelList]]:
        if not listed:
            raise RequestError(f"{param} holds lists of lists, which need a list of queries", param=param)
        if len(by_query) != len(counts):
            raise RequestError(f"{param} holds lists for {len(by_query)} queries, not for {len(counts)}", param=param)
        pairs = enumerate(zip(by_query, counts, strict=True))
        return [_one_each(param, lists, count, number) for number, (lists, count) in pairs]

    return lists_of


def resolve_labels(
    encode: PartEncoder, labels: Sequence[str] | None = None, label_token_ids: Sequence[int] | None = None
) -> LabelList:
    """Return the token ids of one list of labels.

    Args:
        encode: encoder with the engine's tokenizer.
        labels: texts, each one token without special tokens; duplicates are allowed.
        label_token_ids: token ids instead of texts; duplicates are allowed.

    Raises:
        RequestError: both or neither of `labels` and `label_token_ids` are given, the number of labels is 0 or above
            `MAX_LABELS`, or a label is not exactly one token.
    """
    param, given = _given(labels, label_token_ids)
    return _read_list(encode, param, given, {})


class _Reader:
    """Reader of the lists of one call.

    Args:
        frontend: frontend of the engine.
        param: argument that holds the lists, `"labels"` or `"label_token_ids"`.
    """

    def __init__(self, frontend: Frontend, param: str) -> None:
        self._frontend, self._param = frontend, param
        self._known: dict[str, int] = {}
        self._lists: dict[LabelList, LabelList] = {}

    def read(self, given: Any, at: tuple[int, ...] = ()) -> LabelList:
        """Return the token ids of one list. Equal lists give the same tuple.

        Args:
            given: the list.
            at: place of the list: none, its item, or its query and item.
        """
        ids = _read_list(self._frontend.parser.encode, self._param, given, self._known, at)
        self._frontend.limits.check_ids(ids, self._param, f"{self._param}{_of(at)}")
        return self._lists.setdefault(ids, ids)

    def read_items(self, given: Any, at: tuple[int, ...] = ()) -> list[LabelList]:
        """Return the token ids of each item's list.

        Args:
            given: a list per item.
            at: the query of the items, or none.
        """
        self._check_lists(given, at)
        self._frontend.limits.check_count(len(given), f"{self._param} lists", self._param)
        return [self.read(own, (*at, number)) for number, own in enumerate(given)]

    def read_queries(self, given: Any) -> list[list[LabelList]]:
        """Return the token ids of each item's list, query by query."""
        self._check_lists(given)
        self._frontend.limits.check_count(
            max(len(given), sum(map(len, given))), f"{self._param} lists of all queries", self._param
        )
        return [self.read_items(own, (number,)) for number, own in enumerate(given)]

    def _check_lists(self, given: Any, at: tuple[int, ...] = ()) -> None:
        number = next((n for n, own in enumerate(given) if not is_list(own)), -1)
        if number >= 0:
            text = f"{_place(self._param, (*at, number))} must be a list as other entries are, got {given[number]!r}"
            raise RequestError(f"{text}; give one list for all items, or one list per item", param=self._param)


def _depth(labels: Any) -> int:
    """Return the number of lists that a label is in, from 0 to 3. A list below the first counts by its first entry."""
    if not is_list(labels):
        return 0
    inner = [own for own in labels if is_list(own)]
    return 1 + bool(inner) + any(len(own) > 0 and is_list(own[0]) for own in inner)


def _one_each(param: str, lists: list[LabelList], items: int, query: int | None = None) -> list[LabelList]:
    if len(lists) != items:
        of_query = "" if query is None else f" of query {query}"
        text = (
            f"{param}{of_query} holds {len(lists)} lists for {items} items; give one list for all items, or one list per item"
        )
        raise RequestError(text, param=param)
    return lists


def _of(at: tuple[int, ...]) -> str:
    return (f" of item {at[-1]}" if at else "") + (f" of query {at[0]}" if len(at) > 1 else "")


def _place(param: str, at: tuple[int, ...]) -> str:
    return param + "".join(f"[{number}]" for number in at)


def _given(labels: Any, label_token_ids: Any) -> tuple[str, Any]:
    """Return the name and the value of the argument that holds the labels."""
    if labels is None and label_token_ids is None:
        raise MissingError("give either labels or label_token_ids, e.g. labels=['yes', 'no']", param="label_token_ids")
    if labels is not None and label_token_ids is not None:
        raise RequestError("give either labels or label_token_ids, not both", param="label_token_ids")
    return ("labels", labels) if label_token_ids is None else ("label_token_ids", label_token_ids)


def _read_list(encode: PartEncoder, param: str, given: Any, known: dict[str, int], at: tuple[int, ...] = ()) -> LabelList:
    """Return the token ids of one list of labels.

    Args:
        encode: encoder with the engine's tokenizer.
        param: argument that holds the list, `"labels"` or `"label_token_ids"`.
        given: the list.
        known: token ids by text; new texts are added.
        at: place of the list, see `_Reader.read`.
    """
    name = f"{param}{_of(at)}"
    if is_list(given) and len(given) > MAX_LABELS:
        raise RequestError(f"{name} has {len(given)} entries, at most {MAX_LABELS} are allowed", param=param)
    if param == "label_token_ids":
        ids = check_ids(given, _place(param, at), param)
    elif isinstance(given, (list, tuple)):
        ids = []
        for index, label in enumerate(given):
            if not isinstance(label, str) or label not in known:
                token = _label_id(encode, label, _place(param, (*at, index)), _of(at))
                known[label] = token
            ids.append(known[label])
    else:
        raise RequestError(f"{name} must be a list of strings, got {type(given).__name__}", param=param)
    if not ids:
        raise RequestError(f"{name} must hold at least one {'label' if param == 'labels' else 'token id'}", param=param)
    return tuple(ids)


def _label_id(encode: PartEncoder, label: Any, place: str, where: str) -> int:
    """Return the token id of a label.

    Args:
        encode: encoder with the engine's tokenizer.
        label: text of the label.
        place: place of the label in the argument, for error messages.
        where: item of the label, for error messages.
    """
    if not isinstance(label, str):
        raise RequestError(f"{place} must be a string, got {type(label).__name__}", param="labels")
    if encode.tokenizer is None:
        raise RequestError("labels need a tokenizer and this engine has none; give label_token_ids", param="labels")
    ids = encode(label, place, "labels")
    if len(ids) != 1:
        other = label.removeprefix(" ") if label.startswith(" ") else f" {label}"
        advice = f"{other!r} is one" if len(encode(other)) == 1 else "take another word, or label_token_ids"
        raise RequestError(
            f"label {label!r}{where} is {len(ids)} tokens {encode.tokenizer.convert_ids_to_tokens(ids)}; "
            f"a label must be exactly one: {advice}",
            param="labels",
        )
    return ids[0]
