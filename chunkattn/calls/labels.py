"""`read_labels`: the labels of `LLM.score` as token ids that are checked, one list for all items or one list per item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chunkattn.calls.frontend import Frontend
from chunkattn.errors import MissingError, RequestError
from chunkattn.parsers.arguments import check_ids, is_list
from chunkattn.sampling_params import MAX_LABELS

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
            param = "label_token_ids" if labels is None else "labels"
            reason = f"this checkpoint is a sequence classifier and scores its own {classes} classes; leave {param} out"
            raise RequestError(reason, param=param)
        return lambda counts, _: [[] for _ in counts]
    frontend.check_language_head("labels")
    if labels is None and label_token_ids is None:
        raise MissingError("give either labels or label_token_ids, e.g. labels=['yes', 'no']", param="label_token_ids")
    if labels is not None and label_token_ids is not None:
        raise RequestError("give either labels or label_token_ids, not both", param="label_token_ids")
    param, value = ("labels", labels) if label_token_ids is None else ("label_token_ids", label_token_ids)
    depth = _depth(value)
    lists = _Reader(frontend, param).read(value, depth)

    def lists_of(counts: Sequence[int], listed: bool) -> list[list[LabelList]]:
        if depth < 3:
            return [[lists] * count if depth < 2 else _one_each(param, lists, count) for count in counts]
        if not listed:
            raise RequestError(f"{param} holds lists of lists, which need a list of queries", param=param)
        if len(lists) != len(counts):
            raise RequestError(f"{param} holds lists for {len(lists)} queries, not for {len(counts)}", param=param)
        pairs = enumerate(zip(lists, counts, strict=True))
        return [_one_each(param, by_item, count, number) for number, (by_item, count) in pairs]

    return lists_of


class _Reader:
    """Reader of the lists of one call.

    Args:
        frontend: frontend of the engine.
        param: argument that holds the lists, `"labels"` or `"label_token_ids"`.
    """

    def __init__(self, frontend: Frontend, param: str) -> None:
        self._encode, self._limits, self._param = frontend.parser.encode, frontend.limits, param
        self._known: dict[str, int] = {}
        self._lists: dict[LabelList, LabelList] = {}

    def read(self, value: Any, depth: int, at: tuple[int, ...] = ()) -> Any:
        """Return the token ids of one list, or of the lists within a list.

        Args:
            value: the list.
            depth: number of lists that a label is in, see `_depth`.
            at: place of the list: none, its item or query, or its query and item.
        """
        if depth < 2:
            return self._list(value, at)
        number = next((n for n, entry in enumerate(value) if not is_list(entry)), -1)
        if number >= 0:
            text = f"{_place(self._param, (*at, number))} must be a list as other entries are, got {value[number]!r}"
            raise RequestError(f"{text}; give one list for all items, or one list per item", param=self._param)
        count = len(value) if depth == 2 else max(len(value), sum(map(len, value)))
        self._limits.check_count(count, f"{self._param} lists{' of all queries' * (depth == 3)}", self._param)
        return [self.read(entry, depth - 1, (*at, number)) for number, entry in enumerate(value)]

    def _list(self, value: Any, at: tuple[int, ...]) -> LabelList:
        """Return the token ids of one list. Equal lists give the same tuple."""
        param, name = self._param, f"{self._param}{_of(at)}"
        if is_list(value) and len(value) > MAX_LABELS:
            raise RequestError(f"{name} has {len(value)} entries, at most {MAX_LABELS} are allowed", param=param)
        if param == "label_token_ids":
            ids = check_ids(value, _place(param, at), param)
        elif isinstance(value, (list, tuple)):
            ids = [self._label_id(label, (*at, index)) for index, label in enumerate(value)]
        else:
            raise RequestError(f"{name} must be a list of strings, got {type(value).__name__}", param=param)
        if not ids:
            raise RequestError(f"{name} must hold at least one {'label' if param == 'labels' else 'token id'}", param=param)
        self._limits.check_ids(ids, param, name)
        return self._lists.setdefault(tuple(ids), tuple(ids))

    def _label_id(self, label: Any, at: tuple[int, ...]) -> int:
        """Return the token id of a label.

        Args:
            label: text of the label.
            at: place of the label.
        """
        place, encode = _place("labels", at), self._encode
        if not isinstance(label, str):
            raise RequestError(f"{place} must be a string, got {type(label).__name__}", param="labels")
        if label in self._known:
            return self._known[label]
        if encode.tokenizer is None:
            raise RequestError("labels need a tokenizer and this engine has none; give label_token_ids", param="labels")
        ids = encode(label, place, "labels")
        if len(ids) != 1:
            other = label.removeprefix(" ") if label.startswith(" ") else f" {label}"
            advice = f"{other!r} is one" if len(encode(other)) == 1 else "take another word, or label_token_ids"
            raise RequestError(
                f"label {label!r}{_of(at[:-1])} is {len(ids)} tokens {encode.tokenizer.convert_ids_to_tokens(ids)}; "
                f"a label must be exactly one: {advice}",
                param="labels",
            )
        return self._known.setdefault(label, ids[0])


def _depth(labels: Any) -> int:
    """Return the number of lists that a label is in, from 0 to 3. A list below the first counts by its first entry."""
    if not is_list(labels):
        return 0
    inner = [entry for entry in labels if is_list(entry)]
    return 1 + bool(inner) + any(len(entry) > 0 and is_list(entry[0]) for entry in inner)


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
