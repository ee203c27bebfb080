"""Parameters of a block of sampled rows, made on the host: how each row is sampled, and what is changed in its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chunkattn.backends.base import StepArray
from chunkattn.engine.request import Sample
from chunkattn.engine.step import SampleRow
from chunkattn.engine.step_sizes import bucket_for, buckets

SAMPLE_BUCKETS = (1, 16, 64)
"""Sizes to which a block of sampled rows is padded; small ones save rows of the head, which are slow on CPUs.

The last bounds the float32 `[rows, vocab]` array of logits. It is larger than the last of `sampling.READ_BUCKETS`: every block
reads the head's weight once, and a step of decodes does little else.
"""
LOWEST_TEMPERATURE = 0.01
"""Minimum of temperatures above 0, as in vLLM: dividing by less loses the precision of the logits."""
_LEAST_EDITS = 64
_NO_IDS = np.zeros(0, np.int64)


class Edits(NamedTuple):
    """Changes to single logits, arrays `[R, A]`; unused entries hold an id outside the vocabulary.

    Attributes:
        ids: int32 token ids, each at most once per row.
        bias: float32 bias, added first; -inf bans a token.
        seen: bool, True for tokens subject to the repetition penalty.
        count: float32 number of occurrences in the output.
        repetition: float32 `[R, 1]` repetition penalty.
        presence: float32 `[R, 1]` presence penalty.
        frequency: float32 `[R, 1]` frequency penalty.
    """

    ids: StepArray
    bias: StepArray
    seen: StepArray
    count: StepArray
    repetition: StepArray
    presence: StepArray
    frequency: StepArray


class SampleInput(NamedTuple):
    """Sampling parameters of one block of `R` rows.

    Attributes:
        temperature: float32 `[R]`; 0 is greedy.
        keys: uint32 `[R, 2]`, threefry keys from the requests' seeds.
        fold: int32 `[R, 2]`, sample number and output position, folded into the key.
        top_k: int32 `[R]`; the vocabulary size keeps all tokens.
        top_p: float32 `[R]`; 1 keeps all tokens.
        min_p: float32 `[R]`; 0 keeps all tokens.
    """

    temperature: StepArray
    keys: StepArray
    fold: StepArray
    top_k: StepArray
    top_p: StepArray
    min_p: StepArray


def empty_input(size: int, vocab_size: int) -> SampleInput:
    """Return parameters of a block of `size` rows without requests, for compilation.

    Args:
        size: number of rows `R`.
        vocab_size: number of token ids.
    """
    return SampleInput(
        np.zeros(size, np.float32),
        np.zeros((size, 2), np.uint32),
        np.zeros((size, 2), np.int32),
        np.full(size, vocab_size, np.int32),
        np.ones(size, np.float32),
        np.zeros(size, np.float32),
    )


def edit_widths(vocab_size: int) -> tuple[int, ...]:
    """Return the sizes `A` of `Edits`, up to the whole vocabulary."""
    return buckets(min(_LEAST_EDITS, vocab_size), vocab_size, 16)


def empty_edits(size: int, width: int, vocab_size: int) -> Edits:
    """Return edits of a block of `size` rows that change nothing.

    Args:
        size: number of rows `R`.
        width: number of entries per row `A`.
        vocab_size: number of token ids.
    """
    return Edits(
        np.full((size, width), vocab_size, np.int32),
        np.zeros((size, width), np.float32),
        np.zeros((size, width), bool),
        np.zeros((size, width), np.float32),
        *np.ones((1, size, 1), np.float32),
        *np.zeros((2, size, 1), np.float32),
    )


def sampling_blocks(
    rows: list[SampleRow], vocab_size: int, sizes: tuple[int, ...]
) -> list[tuple[list[SampleRow], SampleInput, Edits | None]]:
    """Return the rows to sample from in blocks of up to `sizes[-1]`, each with its parameters and edits.

    Edits of many tokens take long: call this after the step has been dispatched.

    Args:
        rows: rows of a step to sample from.
        vocab_size: number of token ids.
        sizes: sizes to which parameters and edits are padded.
    """
    blocks = [rows[first : first + sizes[-1]] for first in range(0, len(rows), sizes[-1])]
    padded = [(block, bucket_for(len(block), sizes)) for block in blocks]
    places = [[(sample, number, len(sample.output_ids)) for _, sample, number in block] for block in blocks]
    return [
        (block, sample_input(of_block, size, vocab_size), edit_input(block, size, vocab_size))
        for (block, size), of_block in zip(padded, places, strict=True)
    ]


def sample_input(block: Sequence[tuple[Sample, int, int]], size: int, vocab_size: int) -> SampleInput:
    """Return the sampling parameters of a block, padded to `size` rows.

    Args:
        block: for each row the sample that computes it, the number of the sample that gets the token, and the token's place in
            the output.
        size: number of rows.
        vocab_size: number of token ids.
    """
    parameters, rows = empty_input(size, vocab_size), list[tuple[Any, ...]]()
    if all(sample.params.greedy for sample, _, _ in block):
        return parameters
    for sample, number, place in block:
        p, seed = sample.params, sample.request.seed
        kept = (
            (vocab_size, 1.0, 0.0) if p.greedy else (min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size, p.top_p, p.min_p)
        )
        temperature = p.temperature and max(p.temperature, LOWEST_TEMPERATURE)
        rows.append((temperature, (seed >> 32, seed & 0xFFFFFFFF), (number, place), *kept))
    for column, values in zip(parameters, zip(*rows, strict=True), strict=True):
        column[: len(block)] = values
    return parameters


def edit_input(block: list[SampleRow], size: int, vocab_size: int) -> Edits | None:
    """Return the changes of logits of a block, padded to `size` rows; None if no row changes a logit.

    Args:
        block: rows to sample from.
        size: one of `Runner.sample_sizes`.
        vocab_size: number of token ids.
    """
    per_row = [_edited_ids(sample) for _, sample, _ in block]
    longest = max(map(len, per_row))
    if not longest:
        return None
    edits = empty_edits(size, bucket_for(longest, edit_widths(vocab_size)), vocab_size)
    for i, ((_, sample, _), ids) in enumerate(zip(block, per_row, strict=True)):
        params, output = sample.params, np.asarray(sample.output_ids, np.int64)
        edits.repetition[i] = params.repetition_penalty
        edits.presence[i], edits.frequency[i] = params.presence_penalty, params.frequency_penalty
        places = slice(0, len(ids))
        edits.ids[i, places] = ids
        # If a penalty needs the output ids, all of them are among the edited ids.
        edits.count[i, places] = np.bincount(np.searchsorted(ids, output[np.isin(output, ids)]), minlength=len(ids))
        edits.seen[i, places] = (edits.count[i, places] > 0) | np.isin(ids, sample.request.prompt_ids)
        for token, bias in _biases(sample).items():
            edits.bias[i, np.searchsorted(ids, token)] = bias
    return edits


def _biases(sample: Sample) -> dict[int, float]:
    """Return the bias of each token id that is biased for a sample's next token; -inf bans the token."""
    params = sample.params
    if len(sample.output_ids) >= params.min_tokens or sample.request.grammar is not None:  # whose masks ban the ends
        return dict(params.logit_bias)
    ends = (*sample.request.eos_token_ids, *params.stop_token_ids)
    return dict(params.logit_bias) | dict.fromkeys(ends, -np.inf)


def edits_logits(sample: Sample) -> bool:
    """Return whether logits change for a sample's next token."""
    params = sample.params
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalties or bool(_biases(sample))


def _edited_ids(sample: Sample) -> np.ndarray:
    """Return the ascending distinct token ids whose logits change for a sample's next token."""
    if not edits_logits(sample):  # fast path, since most rows have no edits
        return _NO_IDS
    params = sample.params
    parts: list[np.ndarray | list[int]] = [[*_biases(sample)]]
    if params.repetition_penalty != 1:
        parts.append(sample.request.prompt_ids)
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        parts.append(sample.output_ids)
    return np.unique(np.concatenate([np.asarray(p, np.int64) for p in parts]))
