"""Choice among the documents of a prompt by their scores, and the prompt that shows the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from chunkattn.errors import RequestError
from chunkattn.layout import ChunkLayout
from chunkattn.outputs import FocusOutput
from chunkattn.parsers.joined import join
from chunkattn.parsers.prompt import ParsedPrompt
from chunkattn.rope.positions import make_layout


def candidates_of(layout: ChunkLayout) -> list[int]:
    """Return the numbers of the documents to choose from: the first of each content, none empty.

    Args:
        layout: layout of the prompt.
    """
    return [number for number, length in enumerate(layout.chunk_lens) if length and number not in layout.repeats]


def choose(layout: ChunkLayout, numbers: Sequence[int], scores: Sequence[float], top_n: int) -> list[int]:
    """Return the numbers of the documents with the highest scores, the best first.

    Of equal scores, the document with the lower hash of its content comes first, so that the caller's order has no influence.
    NaN is the lowest score.

    Args:
        layout: layout of the prompt.
        numbers: numbers of the documents to choose from.
        scores: score of each of them.
        top_n: number of documents to choose.
    """
    lost = {number: math.inf if math.isnan(score) else -score for number, score in zip(numbers, scores, strict=True)}
    return sorted(numbers, key=lambda number: (lost[number], layout.chunk_digests[number]))[:top_n]


def compose(layout: ChunkLayout, chosen: Sequence[int], mode: str, gap: int) -> ChunkLayout:
    """Return the layout of a prompt that shows a choice of its documents, under `shared` positions.

    `"reread"` keeps all documents and puts the chosen ones before the question, as the beginning of its part, in canonical
    order. `"only"` keeps the chosen documents alone, in the caller's order, which has no influence on the answer.

    Args:
        layout: layout of the prompt.
        chosen: numbers of the chosen documents; none returns the layout.
        mode: one of `chunkattn.focus.MODES`.
        gap: positions left free between prefix and documents.
    """
    if not chosen:
        return layout
    prefix, *chunks, question = (layout.part(segment).tolist() for segment in layout.segments)
    if mode == "only":
        return make_layout(prefix, [chunks[number] for number in sorted(chosen)], question, gap=gap)
    again = [token for number in _canonical(layout, chosen) for token in chunks[number]]
    return make_layout(prefix, chunks, [*again, *question], gap=gap)


def longest(prompt: ParsedPrompt, gap: int, *, descending: bool = True) -> ParsedPrompt:
    """Return a prompt with the longest layout that its focus can compose; a prompt without focus as it is.

    Args:
        prompt: parsed prompt.
        gap: positions left free between prefix and documents.
        descending: whether to choose the longest documents first; False gives the shortest layout.
    """
    if prompt.focus is None:
        return prompt
    numbers = sorted(candidates_of(prompt.layout), key=prompt.layout.chunk_lens.__getitem__, reverse=descending)
    return show(prompt, numbers[: prompt.focus.top_n], gap)


shortest = partial(longest, descending=False)
"""Function of a prompt and a gap that returns the prompt with its shortest layout."""


def show(prompt: ParsedPrompt, chosen: Sequence[int], gap: int) -> ParsedPrompt:
    """Return the prompt that shows a choice, with its layout, its texts and its names. Documents are joined after the choice.

    Args:
        prompt: parsed prompt with a focus.
        chosen: numbers of the chosen documents.
        gap: positions left free between prefix and documents.
    """
    assert prompt.focus is not None
    layout, texts, names, mode = prompt.layout, prompt.texts, prompt.names, prompt.focus.mode
    kept: Sequence[int] = range(layout.num_chunks)
    if not chosen:
        return join(prompt, "shared", gap) if prompt.joins else prompt
    if mode == "only":
        kept = sorted(chosen)
        names = names._replace(listed=[names.of(number) for number in kept])
        if texts is not None:
            texts = (texts[0], *(texts[1 + number] for number in kept), texts[-1])
    else:
        again = _canonical(layout, chosen)
        names = names._replace(last=f"the {names.last} behind them")
        if texts is not None:
            texts = (*texts[:-1], "".join([*(texts[1 + number] for number in again), texts[-1]]))
    shown = replace(prompt, layout=compose(layout, chosen, mode, gap), texts=texts, names=names)
    return join(shown, "shared", gap, kept) if prompt.joins else shown


def _canonical(layout: ChunkLayout, chosen: Sequence[int]) -> list[int]:
    """Return the numbers of chosen documents, sorted by a hash of their contents."""
    return sorted(chosen, key=layout.chunk_digests.__getitem__)


def answered(prompt: ParsedPrompt, numbers: Sequence[int], scores: Sequence[float], computed: int, gap: int) -> ParsedPrompt:
    """Return the prompt that shows the choice by given scores, with the choice.

    Args:
        prompt: parsed prompt with a focus.
        numbers: numbers of the documents to choose from, see `candidates_of`.
        scores: score of each of them.
        computed: tokens that were computed for the scores.
        gap: positions left free between prefix and documents.
    """
    layout, focus = prompt.layout, prompt.focus
    assert focus is not None
    chosen = choose(layout, numbers, scores, focus.top_n)
    by_digest = {layout.chunk_digests[number]: score for number, score in zip(numbers, scores, strict=True)}
    every = [by_digest.get(digest) if length else None for digest, length in zip(layout.chunk_digests, layout.chunk_lens)]
    shown = sorted(chosen) if focus.mode == "only" and not prompt.joins else _canonical(layout, chosen)
    output = FocusOutput(chosen, every, focus.mode, focus.score, computed, shown)
    return replace(show(prompt, chosen, gap), chosen=output)


def behind_one(layout: ChunkLayout, number: int, gap: int) -> ChunkLayout:
    """Return the layout of prefix, one document and question under `shared` positions.

    Args:
        layout: layout of the prompt.
        number: number of the document.
        gap: positions left free between prefix and document.
    """
    prefix, document, question = (layout.part(layout.segments[place]) for place in (0, 1 + number, -1))
    return make_layout(prefix, [document], question, gap=gap)


def read_from(prompt: ParsedPrompt, alone: ChunkLayout) -> int:
    """Return the index of the first token whose log-probability the likelihood of a question counts.

    Args:
        prompt: parsed prompt with a focus.
        alone: layout of prefix, one document and question, see `behind_one`.
    """
    return alone.question_start + max(1, min(prompt.history_len, alone.question_len - 1))


def check_likelihood(prompt: ParsedPrompt) -> None:
    """Check that the likelihood of a prompt's question can be read.

    Args:
        prompt: parsed prompt.

    Raises:
        RequestError: the question has one token.
    """
    if prompt.layout.question_len < 2 and candidates_of(prompt.layout):
        text = "has one token, and focus by likelihood needs two: the first one is not read"
        raise RequestError(f" {text}", param=prompt.names.question, part="the question")
