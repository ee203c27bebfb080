"""`SamplingPlan`: the arrays with which a step samples up to `READ_ROWS` rows, made from the requests' parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from chunkattn.config import SamplingParams
from chunkattn.engine.buckets import bucket_for
from chunkattn.engine.request import Sequence as Sample
from chunkattn.engine.sampling import READ_ROWS, ROW_BUCKETS, Edits, SampleInput, edit_widths, empty_edits

LOWEST_TEMPERATURE = 0.01
"""Minimum of temperatures above 0, as in vLLM: dividing by less loses the precision of the logits."""
_NO_IDS = np.zeros(0, np.int64)


class SampleRow(NamedTuple):
    """Row of a step from which the next token of a sample is drawn.

    Attributes:
        row: index of the row in the step.
        sequence: sequence that computed the row; before a fork, the request's only sequence.
        sample: number of the sample in the request.
    """

    row: int
    sequence: Sample
    sample: int

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of the row's request, which is a generation request."""
        params = self.sequence.request.sampling
        assert params is not None
        return params


@dataclass(frozen=True)
class SamplingPlan:
    """Plan for one block of rows to sample from.

    Attributes:
        rows: rows of the step, at most `READ_ROWS`.
        given: sampling parameters, padded to a size of `Runner.row_sizes`; None if every row takes its likeliest token.
        edits: changes of single logits, padded to the same size; None if no row changes a logit.
        num_logprobs: number of log-probabilities to return for each row; None returns no log-probabilities.
    """

    rows: tuple[int, ...]
    given: SampleInput | None
    edits: Edits | None
    num_logprobs: tuple[int | None, ...]


def plan_sampling(rows: Sequence[SampleRow], vocab_size: int, sizes: tuple[int, ...] = ROW_BUCKETS) -> Iterator[SamplingPlan]:
    """Yield the plans of all rows, one for each block of up to `READ_ROWS` rows.

    Args:
        rows: rows of the step to sample from.
        vocab_size: number of token ids.
        sizes: sizes to which blocks are padded.
    """
    for first in range(0, len(rows), READ_ROWS):
        block = rows[first : first + READ_ROWS]
        size = bucket_for(len(block), sizes)
        yield SamplingPlan(
            tuple(r.row for r in block),
            sample_input(block, size, vocab_size),
            edit_input(block, size, vocab_size),
            tuple(r.params.logprobs for r in block),
        )


def sample_input(block: Sequence[SampleRow], size: int, vocab_size: int) -> SampleInput | None:
    """Return the sampling parameters of a block, padded to `size` rows; None if every row takes its likeliest token.

    Args:
        block: rows to sample from.
        size: one of `Runner.row_sizes`.
        vocab_size: number of token ids.
    """
    params = [row.params for row in block]
    if all(p.greedy for p in params):
        return None

    def column(values: list[Any], dtype: type, fill: float) -> np.ndarray:
        return np.asarray(values + [fill] * (size - len(values)), dtype)

    seeds = [row.sequence.request.seed for row in block]
    folds = [(row.sample, len(row.sequence.output_ids)) for row in block]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 and not p.greedy else vocab_size for p in params]
    return SampleInput(
        column([p.temperature and max(p.temperature, LOWEST_TEMPERATURE) for p in params], np.float32, 0.0),
        _padded([(s >> 32, s & 0xFFFFFFFF) for s in seeds], size, np.uint32),
        _padded(folds, size, np.int32),
        column(top_k, np.int32, vocab_size),
        column([1.0 if p.greedy else p.top_p for p in params], np.float32, 1.0),
        column([0.0 if p.greedy else p.min_p for p in params], np.float32, 0.0),
    )


def _padded(rows: list[tuple[int, int]], size: int, dtype: type) -> np.ndarray:
    return np.asarray(rows + [(0, 0)] * (size - len(rows)), dtype)


def edit_input(block: Sequence[SampleRow], size: int, vocab_size: int) -> Edits | None:
    """Return the changes of logits of a block, padded to `size` rows; None if no row changes a logit.

    Args:
        block: rows to sample from.
        size: one of `Runner.row_sizes`.
        vocab_size: number of token ids.
    """
    per_row = [_edited_ids(row) for row in block]
    longest = max(map(len, per_row))
    if not longest:
        return None
    edits = empty_edits(size, bucket_for(longest, edit_widths(vocab_size)), vocab_size)
    for i, (row, ids) in enumerate(zip(block, per_row, strict=True)):
        params, output = row.params, np.asarray(row.sequence.output_ids, np.int64)
        edits.repetition[i] = params.repetition_penalty
        edits.presence[i], edits.frequency[i] = params.presence_penalty, params.frequency_penalty
        places = slice(0, len(ids))
        edits.ids[i, places] = ids
        # If a penalty needs the output ids, all of them are among the edited ids.
        edits.count[i, places] = np.bincount(np.searchsorted(ids, output[np.isin(output, ids)]), minlength=len(ids))
        edits.seen[i, places] = (edits.count[i, places] > 0) | np.isin(ids, row.sequence.request.prompt_ids)
        for token, bias in _biases(row).items():
            edits.bias[i, np.searchsorted(ids, token)] = bias
    return edits


def _biases(row: SampleRow) -> dict[int, float]:
    """Return the bias of each biased token id; -inf bans the token."""
    params = row.params
    if len(row.sequence.output_ids) >= params.min_tokens:
        return dict(params.logit_bias)
    ends = (*row.sequence.request.eos_token_ids, *params.stop_token_ids)
    return dict(params.logit_bias) | dict.fromkeys(ends, -np.inf)


def _edited_ids(row: SampleRow) -> np.ndarray:
    """Return the ascending distinct token ids whose logits this row changes."""
    params = row.params
    parts: list[np.ndarray | list[int]] = [[*_biases(row)]]
    if params.repetition_penalty != 1:
        parts.append(row.sequence.request.prompt_ids)
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        parts.append(row.sequence.output_ids)
    elif not parts[0]:  # fast path, since most rows have no edits
        return _NO_IDS
    return np.unique(np.concatenate([np.asarray(p, np.int64) for p in parts]))
