"""Joined documents: the tokens of all documents as one chunk, in an order that ignores the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chunkattn.errors import RequestError, shown
from chunkattn.layout import ChunkLayout, Names, digest_of
from chunkattn.parsers.prompt import ParsedPrompt
from chunkattn.rope.positions import make_layout

ISOLATED, JOINED = CHUNK_MODES = ("isolated", "joined")
"""Values of `chunk_mode`: every document is a chunk, or all documents together are one chunk."""
_PART = "the joined chunk"
"""Name in errors of the chunk of joined documents."""


def is_joined(chunk_mode: Any) -> bool:
    """Return whether a mode joins documents.

    Args:
        chunk_mode: argument of the caller.

    Raises:
        RequestError: the mode is unknown.
    """
    if not isinstance(chunk_mode, str) or chunk_mode not in CHUNK_MODES:
        text = f"chunk_mode must be one of {', '.join(CHUNK_MODES)}, got {shown(chunk_mode)}"
        raise RequestError(text, param="chunk_mode")
    return chunk_mode == JOINED


def joined_order(documents: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of the documents that are not empty, sorted by the hash of `ChunkLayout.canonical_order`.

    Args:
        documents: token ids of each document.
    """
    filled = [number for number, ids in enumerate(documents) if len(ids)]
    return sorted(filled, key=lambda number: digest_of(documents[number]))


def joined_ids(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the documents as one chunk, or no chunk where all are empty. A repeated document stays repeated.

    Args:
        documents: token ids of each document.
    """
    ids = [token for number in joined_order(documents) for token in documents[number]]
    return [ids] if ids else []


def names_of_joined(names: Names) -> Names:
    """Return the names of a call's parts after its documents are joined."""
    return names._replace(listed=(_PART,))


def join_layout(layout: ChunkLayout, strategy: str, gap: int) -> ChunkLayout:
    """Return the layout whose chunks are joined.

    Args:
        layout: layout of a prompt.
        strategy: name of the position strategy.
        gap: positions left free before the chunk, under `shared` positions.
    """
    prefix, *chunks, question = (layout.part(segment).tolist() for segment in layout.segments)
    return make_layout(prefix, joined_ids(chunks), question, strategy, gap)


def in_mode(prompt: ParsedPrompt, chunk_mode: Any, strategy: str, gap: int) -> ParsedPrompt:
    """Return the prompt in a mode: as it is, or with its documents joined, at once or after its focus has chosen among them.

    Args:
        prompt: parsed prompt.
        chunk_mode: argument of the caller.
        strategy: see `join`.
        gap: see `join`.

    Raises:
        RequestError: the mode is unknown.
    """
    if not is_joined(chunk_mode):
        return prompt
    return join(prompt, strategy, gap) if prompt.focus is None else replace(prompt, joins=True)


def join(prompt: ParsedPrompt, strategy: str, gap: int, numbers: Sequence[int] | None = None) -> ParsedPrompt:
    """Return the prompt with its chunks joined, in layout, texts and names; a prompt without chunks as it is.

    Args:
        prompt: parsed prompt.
        strategy: name of the position strategy.
        gap: see `join_layout`.
        numbers: number of each chunk's document among the caller's; None for chunks in the caller's order.
    """
    layout, texts = prompt.layout, prompt.texts
    if not layout.num_chunks:
        return prompt
    order = [number for number in layout.canonical_order() if layout.chunk_lens[number]]
    if texts is not None:
        chunk = ["".join(texts[1 + number] for number in order)] if order else []
        texts = (texts[0], *chunk, texts[-1])
    joined = {number if numbers is None else numbers[number]: layout.chunk_lens[number] for number in order}
    names = names_of_joined(prompt.names)
    return replace(prompt, layout=join_layout(layout, strategy, gap), texts=texts, names=names, joined=joined)
