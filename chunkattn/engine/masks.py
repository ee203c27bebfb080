"""Masks of the tokens that grammars allow, made on the host while the device computes the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from chunkattn.engine.grammars import Grammars, TextMatcher
from chunkattn.engine.request import Sample
from chunkattn.engine.sampling import mask_words
from chunkattn.engine.step import SampleRow

_ALL = -1


def matcher_of(sample: Sample) -> TextMatcher:
    """Return the state of a sample's text in the grammar of its request, with all tokens of its output."""
    assert sample.request.grammar is not None
    if sample.matcher is None or sample.matcher.length > len(sample.output_ids):  # an interrupt has lost a token
        sample.matcher = TextMatcher(sample.request.grammar)
    sample.matcher.follow(sample.output_ids)
    return sample.matcher


def take_token(sample: Sample, token: int) -> bool:
    """Take the next token of a text that a grammar describes. Return whether the text is complete.

    A text is complete if the grammar allows nothing more. A text that no token may end is complete, too, if the grammar allows
    its end, and the vocabulary has no token that goes on.

    Args:
        sample: the sample, whose output does not have the token yet.
        token: token id, which does not end the text.
    """
    matcher = matcher_of(sample)
    matcher.take(token)
    return matcher.is_complete or (not sample.request.ends and matcher.has_no_token)


def mask_input(block: Sequence[SampleRow], size: int, vocab_size: int, grammars: Grammars) -> np.ndarray | None:
    """Return the masks of a block, padded to `size` rows; None if no row has a grammar.

    A token that ends the text is allowed where the grammar lets the text end, if the text has `min_tokens` tokens or nothing
    else is allowed. Elsewhere, a stop token may be a part of the text, which it cuts, and an end-of-sequence token only where
    the grammar names it. A row whose matcher has an error may draw any token: its request fails after the step.

    Args:
        block: rows to sample from.
        size: number of rows.
        vocab_size: number of token ids `V`.
        grammars: grammars of the engine.

    Returns:
        int32 `[size, ceil(V / 32)]`; see `chunkattn.engine.sampling.apply_mask`.
    """
    # Samples that are still to be forked share the state of the first.
    matchers = {sample: matcher_of(sample) for _, sample, _ in block if sample.request.grammar is not None}
    if not matchers:
        return None
    masks = np.full((size, mask_words(vocab_size)), _ALL, np.int32)
    words, may_end = grammars.masks([*matchers.values()])
    rows = {
        sample: _with_ends(sample, own, bool(ends), masks.shape[1], grammars.special)
        for sample, own, ends in zip(matchers, words, may_end, strict=True)
    }
    for row, (_, sample, _) in enumerate(block):
        if (mask := rows.get(sample)) is not None:
            masks[row] = mask
    return masks


def _with_ends(sample: Sample, words: np.ndarray, may_end: bool, count: int, special: frozenset[int]) -> np.ndarray | None:
    """Return the mask of a row, int32 `[count]`, with the tokens that end the text; None for a matcher with an error.

    A matcher whose row would allow nothing becomes one with an error.

    Args:
        sample: sample of the row.
        words: int32 `[W]` tokens of the text that the grammar allows, without the end.
        may_end: whether the grammar lets the text end.
        count: number of words of the mask.
        special: tokens that a text has only where its grammar names them.
    """
    if sample.matcher is None or sample.matcher.error:
        return None
    mask = np.zeros(count, np.int32)
    mask[: len(words)] = words[:count]
    request = sample.request
    ends = _mask_of(request.ends, count)
    if not sample.params.ignore_eos and (texts := request.eos_token_ids - special):
        mask &= ~_mask_of(texts, count)
    kept = mask & ~ends
    if len(sample.output_ids) < sample.params.min_tokens and kept.any():
        return kept
    if may_end:
        mask |= ends
    sample.matcher.is_stuck = not mask.any()
    return None if sample.matcher.is_stuck else mask


def _mask_of(token_ids: Iterable[int], count: int) -> np.ndarray:
    """Return the mask of some tokens, int32 `[count]`."""
    mask = np.zeros(count, np.uint32)
    for token in token_ids:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)
