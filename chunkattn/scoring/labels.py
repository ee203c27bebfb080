"""The labels of a scoring request: token ids, or texts of one token each."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from chunkattn.config import MAX_LABELS, check_size
from chunkattn.errors import MissingError, RequestError
from chunkattn.parsers.arguments import check_ids
from chunkattn.parsers.encode import PartEncoder


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
