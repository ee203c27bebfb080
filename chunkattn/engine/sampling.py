"""Sampling of a block of rows: its parameters, made on the host, and the functions that choose tokens on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import StepArray
from chunkattn.backends.cpu import normaliser as native
from chunkattn.backends.cpu import rows as native_rows
from chunkattn.engine.messages import TokenLogprobs
from chunkattn.engine.request import Sample
from chunkattn.engine.step import SampleRow
from chunkattn.engine.step_sizes import bucket_for, buckets
from chunkattn.models.linear import sums

SAMPLE_BUCKETS = (1, 16, 64)
"""Sizes to which a block of sampled rows is padded; small ones save rows of the head, which are slow on CPUs.

The last bounds the float32 `[rows, vocab]` array of logits. It is larger than the last of `READ_BUCKETS`: every block
reads the head's weight once, and a step of decodes does little else.
"""
READ_BUCKETS = (16, 48)
"""Sizes to which a block of rows that are only read is padded, labels read by `label_readout` excepted: without 1, for fewer
programs.

With a vocabulary of 151,936, the logits of 48 rows take 28 MiB. glibc maps every array above 32 MiB anew, and the page faults
take long where block follows block, as in the readout of a prompt on a CPU.
"""
LOWEST_TEMPERATURE = 0.01
"""Minimum of temperatures above 0, as in vLLM: dividing by less loses the precision of the logits."""
_LEAST_EDITS = 64
_ARGMAX_BLOCK = 128
_AT_ONCE = 16
"""Rows that are drawn, or whose log-probabilities are read, at once."""
_WHOLE = 1 << 30
"""Number that stands for the probability 1."""
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


def finite_rows(values: jax.Array) -> jax.Array:
    """Return bool `[R]`, whether all values of each row are finite.

    Args:
        values: float32 `[R, N]`.
    """
    return jnp.isfinite(values).all(-1)


def apply_edits(logits: jax.Array, edits: Edits) -> jax.Array:
    """Return the logits `[R, V]` with the bias added, then repetition, presence and frequency penalties applied.

    Source: arXiv:1909.05858 for the repetition penalty.

    Args:
        logits: float32 `[R, V]`.
        edits: changes of the logits; a token is edited if its id is in `edits.ids`.
    """
    rows = jnp.arange(len(logits))[:, None]
    value = logits.at[rows, edits.ids].get(mode="fill", fill_value=0.0) + edits.bias
    penalty = jnp.where(edits.seen, edits.repetition, 1.0)
    value = jnp.where(value > 0, value / penalty, value * penalty)
    value -= edits.frequency * edits.count + edits.presence * (edits.count > 0)
    return logits.at[rows, edits.ids].set(value, mode="drop", unique_indices=False)


def mask_words(vocab_size: int) -> int:
    """Return the number of words of a mask; see `apply_mask`."""
    return -(-vocab_size // 32)


def apply_mask(logits: jax.Array, mask: StepArray) -> jax.Array:
    """Return the logits `[R, V]` of the tokens in a mask; those of others become -inf.

    Args:
        logits: float32 `[R, V]`.
        mask: int32 `[R, ceil(V / 32)]`; bit `t % 32` of word `t // 32` stands for token id `t`.
    """
    bits = (jnp.asarray(mask)[:, :, None] >> jnp.arange(32)) & 1
    allowed = bits.reshape(len(logits), -1)[:, : logits.shape[1]]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set the logits of excluded tokens to -inf: first by min-p, then top-k, then top-p.

    Tokens tied at a threshold are kept. Thresholds are found by bisection over the bits of float32, in 32 passes over the
    logits, which avoids sorting 150,000 of them. Probabilities are summed as whole numbers of `1 / _WHOLE`, so that the sums do
    not depend on the order of additions.

    Args:
        logits: float32 `[R, V]`.
        top_k: int32 `[R]`; V keeps all tokens.
        top_p: float32 `[R]`; 1 keeps all tokens.
        min_p: float32 `[R]`; 0 keeps all tokens.
    """
    keep = logits >= logits.max(-1, keepdims=True) + jnp.log(min_p)[:, None]
    logits = jnp.where(keep, logits, -jnp.inf)
    order = _sortable(logits)
    logits = jnp.where(order >= _threshold(order, jnp.ones_like(order), top_k), logits, -jnp.inf)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    parts = jnp.round(weights / sums(weights) * _WHOLE).astype(jnp.int32)
    kept = order >= _threshold(order, parts, jnp.round(top_p * _WHOLE).astype(jnp.int32))
    return jnp.where(kept | (top_p >= 1)[:, None], logits, -jnp.inf)


def _sortable(x: jax.Array) -> jax.Array:
    """Map float32 to int32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _threshold(order: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """Return `[R, 1]`, per row the largest `t` such that the int32 weights where `order >= t` sum to `target` or more."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the average rounded up, without overflow
        enough = jnp.sum(jnp.where(order >= middle[:, None], weight, 0), -1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    limits = np.iinfo(np.int32)
    rows = len(order)
    low, _ = jax.lax.fori_loop(0, 32, halve, (jnp.full(rows, limits.min), jnp.full(rows, limits.max)))
    return low[:, None]


def choose(logits: jax.Array, parameters: SampleInput) -> jax.Array:
    """Return int32 `[R]` token ids chosen from logits float32 `[R, V]`.

    The random numbers of a token depend on seed, sample number and output position only, so the choice is independent of the
    other rows of the batch.

    Args:
        logits: float32 `[R, V]`.
        parameters: sampling parameters of the rows.
    """
    likeliest = argmax(logits)
    # Drawing is a branch of this program, so that no request waits for the compilation of a second program.
    draws = jnp.asarray(parameters.temperature) > 0
    drawn = partial(_in_blocks, _draw, logits, parameters)
    return jax.lax.cond(draws.any(), lambda: jnp.where(draws, drawn(), likeliest), lambda: likeliest)


def _in_blocks(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return `function` of arrays, trees whose axis 0 is that of the rows, computed for few rows at once.

    A copy of 64 rows of logits may take 37 MiB.
    """
    rows = len(arrays[0])
    if rows <= _AT_ONCE or rows % _AT_ONCE:
        return function(*arrays)
    blocks = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, _AT_ONCE, *x.shape[1:]), arrays)
    found = jax.lax.map(lambda block: function(*block), blocks)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), found)


def _draw(logits: jax.Array, parameters: SampleInput) -> jax.Array:
    """Return int32 `[R]` token ids drawn from logits float32 `[R, V]`; they mean nothing in greedy rows."""
    scaled = logits / jnp.where(parameters.temperature > 0, parameters.temperature, 1.0)[:, None]
    limits = (jnp.asarray(parameters.top_k), jnp.asarray(parameters.top_p), jnp.asarray(parameters.min_p))
    truncates = (limits[0] < logits.shape[1]) | (limits[1] < 1) | (limits[2] > 0)
    scaled = jax.lax.cond(truncates.any(), lambda: truncate(scaled, *limits), lambda: scaled)

    def noise(key: jax.Array, fold: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, fold[0]), fold[1]), scaled.shape[1:])

    # The Gumbel-max trick, as `jax.random.categorical` draws.
    return argmax(scaled + jax.vmap(noise)(jnp.asarray(parameters.keys), jnp.asarray(parameters.fold)))


def argmax(values: jax.Array) -> jax.Array:
    """Return int32 `[R]`, the index of each row's first maximum; values are float32 `[R, V]`."""
    return largest(values)[0]


def largest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int32 `[R]`, the index of each row's first maximum, and `finite_rows(values)`.

    Args:
        values: float32 `[R, V]`.
    """
    if not native_rows.serves():
        return _largest(values)
    found: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(values, cpu=native_rows.largest, default=_largest)
    return found


def _largest(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `largest`. XLA:CPU's own argmax takes 10 to 50 times longer for a vocabulary, which is therefore read in blocks.

    First come the maxima of the blocks, then the block that holds the row's maximum.
    """
    rows, size = values.shape
    width = math.gcd(size, _ARGMAX_BLOCK)
    if width == 1:
        return values.argmax(-1).astype(jnp.int32), finite_rows(values)
    blocks = values.reshape(rows, size // width, width)
    best = blocks.max(-1).argmax(-1)
    block = jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0]
    return (best * width + block.argmax(-1)).astype(jnp.int32), finite_rows(values)


def read(logits: jax.Array, targets: jax.Array, num_top: int) -> tuple[TokenLogprobs, jax.Array]:
    """Return the log-probabilities of `targets` int32 `[R]` and of the `num_top` likeliest tokens, and `finite_rows(logits)`.

    Args:
        logits: float32 `[R, V]`.
        targets: int32 `[R]` token ids.
        num_top: number of likeliest tokens `K`.
    """
    values: tuple[TokenLogprobs, jax.Array] = _in_blocks(partial(_read, num_top=num_top), logits, targets)
    return values


def _read(logits: jax.Array, targets: jax.Array, *, num_top: int) -> tuple[TokenLogprobs, jax.Array]:
    target = jnp.take_along_axis(logits, targets[:, None], axis=1)
    rank = 1 + (logits > target).sum(-1)
    top, top_ids = jax.lax.top_k(logits, num_top)
    logprobs, finite = normalised(jnp.concatenate([target, top], axis=1), logits)
    values: tuple[StepArray, ...] = (logprobs[:, 0], rank, top_ids, logprobs[:, 1:])
    return TokenLogprobs(*values), finite


def read_labels(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the log-probabilities, float32 `[R, L]`, of `labels` int32 `[R, L]`, and `finite_rows(logits)`.

    Args:
        logits: float32 `[R, V]`.
        labels: int32 `[R, L]` token ids.
    """
    return normalised(jnp.take_along_axis(logits, labels, axis=1), logits)


def normalised(some: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the log-softmax of some logits of each row, and `finite_rows(logits)`."""
    if native.serves():
        both = jax.lax.platform_dependent(logits, cpu=native.normaliser, default=xla_normaliser)
    else:
        both = xla_normaliser(logits)
    return relative(some, both)


def relative(some: jax.Array, normalisers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return some logits of each row relative to its normaliser, and bool `[R]`, whether all logits of the row are finite.

    Args:
        some: float32 `[R, N]` logits.
        normalisers: float32 `[R, 2]`, as `xla_normaliser` returns.
    """
    return some - normalisers[:, :1] - normalisers[:, 1:], jnp.isfinite(normalisers[:, 0])


def xla_normaliser(logits: jax.Array) -> jax.Array:
    """Return each row's maximum, and the logarithm of the sum of its exponentials relative to it, float32 `[R, 2]`.

    Both are NaN where a logit is not finite, as those of `native.normaliser` are.

    Args:
        logits: float32 `[R, V]`.
    """
    maximum = logits.max(-1, keepdims=True)
    both = jnp.concatenate([maximum, jnp.log(sums(jnp.exp(logits - maximum)))], axis=1)
    return jnp.where(finite_rows(logits)[:, None], both, jnp.nan)
