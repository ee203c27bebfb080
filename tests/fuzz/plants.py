"""Defects to plant, to see that the fuzzer finds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from chunkattn.cache.disk.store import entry_key
from chunkattn.cache.trie import Block, BlockTrie
from chunkattn.calls import focus_scores, score
from chunkattn.calls.algorithms import ScoreInputs
from chunkattn.calls.score_memory import item_keys
from chunkattn.engine import decode_program, disk_tier, readout
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.grammars import TextMatcher
from chunkattn.engine.placement import Placement
from chunkattn.engine.request import Part, Request, Sample
from chunkattn.engine.runs import Run, RunResult, Runs
from chunkattn.engine.states import Move, Track
from chunkattn.engine.step import SampleRow
from chunkattn.engine.walks import Walks
from chunkattn.layout import ChunkLayout
from chunkattn.parsers import choice


def _scoring() -> Any:
    """Blocks of packed items enter the trie, though positions begin anew with every item and items are isolated."""
    original = Placement.publish

    def publish(self: Placement, sample: Sample, part: Part, index: int) -> None:
        request, block = sample.request, part.blocks[index]
        if request.score is None or not request.shares:
            original(self, sample, part, index)
            return
        above = part.parents if index == 0 else (part.blocks[index - 1],)
        if all(parent is not None and parent.key is not None for parent in above):
            number, start = len(request.segments) - 1, part.start + index * self.block_size
            key = self._key(sample, number, start, block.size, above)
            if key not in above[0].children:
                self.trie.link(block, above, key)

    return patch.object(Placement, "publish", publish)


def _position() -> Any:
    """A block's key lacks its position."""
    original = Request.key_of

    def key_of(self: Request, sample: Sample, start: int, width: int) -> tuple[int, bytes]:
        return 0, original(self, sample, start, width)[1]

    return patch.object(Request, "key_of", key_of)


def _salt() -> Any:
    """All salts have one root."""
    original = BlockTrie.root
    return patch.object(BlockTrie, "root", lambda self, _: original(self, None))


def _reference() -> Any:
    """A cached block may be evicted while one request still holds it."""
    original = BlockTrie.release

    def release(self: BlockTrie, blocks: Iterable[Block], *, used: bool = True) -> None:
        blocks = list(blocks)
        original(self, blocks, used=used)
        for block in blocks:
            if block.refs == 1 and block.page >= 0 and block.key is not None and block.complete:
                self._unheld.add(block)
                self._offer(block)

    return patch.object(BlockTrie, "release", release)


def _store() -> Any:
    """An entry's key in the K/V store lacks its position."""
    return patch.object(disk_tier, "entry_key", lambda model, salt, prefix, chunk, _: entry_key(model, salt, prefix, chunk, 0))


@contextmanager
def _not_finite() -> Iterator[None]:
    """Tokens that are not finite count as computed, and stay cached."""
    endless = property(lambda _: sys.maxsize, lambda *_: None)
    with patch.object(Request, "finite_end", endless, create=True), patch.object(Placement, "discard"):
        yield


def _results() -> Any:
    """A scored item's key lacks the query."""

    def keys(call: ScoreInputs, *args: Any, **options: Any) -> list[bytes]:
        return item_keys(ScoreInputs([], call.items, labels=call.labels), *args, **options)

    return patch.object(score, "item_keys", keys)


def _labels() -> Any:
    """A scored item's key lacks its labels."""

    def keys(call: ScoreInputs, *args: Any, **options: Any) -> list[bytes]:
        return item_keys(ScoreInputs(call.before, call.items), *args, **options)

    return patch.object(score, "item_keys", keys)


def _documents() -> Any:
    """A decision's key lacks the documents, and has the state alone."""

    def keys(call: ScoreInputs, *args: Any, **options: Any) -> list[bytes]:
        before = call.before + (call.documents.state if call.documents else [])
        return item_keys(ScoreInputs(before, call.items, call.after, call.labels, call.reads), *args, **options)

    return patch.object(score, "item_keys", keys)


def _state() -> Any:
    """The key of a state behind documents lacks the documents."""
    original = Placement._key

    def key(self: Placement, sample: Sample, number: int, start: int, width: int, parents: Sequence[Block]) -> Any:
        known = parents[:1] if sample.request.is_state(number) else parents
        return original(self, sample, number, start, width, known)

    return patch.object(Placement, "_key", key)


def _order() -> Any:
    """Documents keep the caller's order, which changes bits alone."""
    return patch.object(ChunkLayout, "canonical_order", lambda self: [*range(self.num_chunks)])


def _choice() -> Any:
    """Chosen documents are read again in the caller's order."""
    return patch.object(choice, "_canonical", lambda _, chosen: sorted(chosen))


def _chosen_salt() -> Any:
    """Documents are scored without the salt, and stay cached without it."""
    original = focus_scores.likelihood_request

    def request(*args: Any, salt_key: str | None = None, **options: Any) -> Any:
        return original(*args, **options)

    return patch.object(focus_scores, "likelihood_request", request)


def _uncommitted() -> Any:
    """A state counts as computed once its step is on the device."""
    original = Walks.sent

    def sent(self: Walks, sample: Sample, move: Move) -> None:
        original(self, sample, move)
        if move.goal is not None:
            move.goal.ready = True

    return patch.object(Walks, "sent", sent)


def _seat() -> Any:
    """A forked sample gets the slot of the first, and no seat."""
    original = Walks.take_forked

    def take_forked(self: Walks) -> list[tuple[int, int, int, int]]:
        return [(slot, to_seat, to_slot, to_seat) for slot, _, to_slot, to_seat in original(self)]

    return patch.object(Walks, "take_forked", take_forked)


def _offset() -> Any:
    """A part goes on in its middle from the state before its first token."""
    original = Walks._begin

    def begin(self: Walks, sample: Sample, track: Track) -> bool:
        begun = original(self, sample, track)
        part = sample.parts[track.part]
        if begun and track.planned > part.start:
            self._drop_source(track)
            above = part.parents[-1]
            source = None if above is None else self.states.find(above)
            track.source = None if source is None else self.states.hold(source)
        return begun

    return patch.object(Walks, "_begin", begin)


def _claim() -> Any:
    """A sample that stops computing a part keeps its claim."""
    original = Walks._drop_goal

    def drop_goal(self: Walks, owner: Track | Move) -> None:
        if isinstance(owner, Track):
            owner.claimed = None
        original(self, owner)

    return patch.object(Walks, "_drop_goal", drop_goal)


def _stopped() -> Any:
    """The last token of a text counts as computed after a run, though its K/V are not."""
    original = Runs.commit

    def commit(self: Runs, run: Run, result: RunResult, rows: Sequence[int], disk: DiskTier | None) -> None:
        later = [tokens + tokens[-1:] if len(tokens) < run.limit else tokens for tokens in result.tokens]
        original(self, run, replace(result, tokens=later), rows, disk)

    return patch.object(Runs, "commit", commit)


def _draw() -> Any:
    """Every decode of a run draws with the random numbers of the first."""
    return patch.object(decode_program, "later", lambda sampling, _: sampling)


@contextmanager
def _shape() -> Iterator[None]:
    """The grammar of a text is a token behind."""
    original = TextMatcher.follow
    behind = patch.object(TextMatcher, "follow", lambda self, output_ids: original(self, output_ids[:-1]))
    with behind, patch.object(TextMatcher, "take", lambda *_: None):
        yield


def _masks() -> Any:
    """The rows of a step that have grammars get one another's masks."""
    original = readout.mask_input

    def mask_input(block: Sequence[SampleRow], *args: Any) -> np.ndarray | None:
        masks = original(block, *args)
        if masks is not None:
            rows = [row for row, (_, sample, _) in enumerate(block) if sample.request.grammar is not None]
            masks[rows] = masks[rows[::-1]]
        return masks

    return patch.object(readout, "mask_input", mask_input)


PLANTS: dict[str, Callable[[], Any]] = {
    "scoring": _scoring,
    "position": _position,
    "salt": _salt,
    "reference": _reference,
    "store": _store,
    "not finite": _not_finite,
    "results": _results,
    "labels": _labels,
    "documents": _documents,
    "state": _state,
    "order": _order,
    "choice": _choice,
    "chosen salt": _chosen_salt,
    "uncommitted": _uncommitted,
    "seat": _seat,
    "offset": _offset,
    "claim": _claim,
    "stopped": _stopped,
    "draw": _draw,
    "shape": _shape,
    "masks": _masks,
}
"""By name: makes a context manager within which the defect is there."""
OF_STATES = ("uncommitted", "seat", "offset", "claim")
"""Defects of models with recurrent layers alone."""
OF_RUNS = ("stopped", "draw")
"""Defects of runs of decodes."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Have a defect of `PLANTS` in the engine; none for None."""
    with ExitStack() as stack:
        if name is not None:
            stack.enter_context(PLANTS[name]())
        yield
