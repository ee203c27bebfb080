"""Functions that choose tokens for a block of rows, and read log-probabilities, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import StepArray
from chunkattn.backends.cpu import normaliser as native
from chunkattn.backends.cpu import rows as native_rows
from chunkattn.engine.messages import TokenLogprobs
from chunkattn.engine.sample_inputs import Edits, SampleInput
from chunkattn.models.linear import sums

READ_BUCKETS = (16, 48)
"""Sizes to which a block of rows that are only read is padded, labels read by `label_readout` excepted: without 1, for fewer
programs.

With a vocabulary of 151,936, the logits of 48 rows take 28 MiB. glibc maps every array above 32 MiB anew, and the page faults
take long where block follows block, as in the readout of a prompt on a CPU.
"""
_ARGMAX_BLOCK = 128
_AT_ONCE = 16
"""Rows that are drawn, or whose log-probabilities are read, at once."""
_WHOLE = 1 << 30
"""Number that stands for the probability 1."""


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
