"""Algorithms that turn a scoring job into sequences. All of them give the same log-probabilities.

An algorithm lays tokens out and names the rows to read, one sequence at a time. The engine that generates text also
computes the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from chunkattn.accounting import groups, score_tokens
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout


@dataclass(frozen=True)
class QueryItems:
    """Token ids of a query and its items.

    Attributes:
        query: token ids of the query.
        items: token ids of each item.
        leading: special tokens at the start of every sequence.
        item_first: whether each sequence is item + query instead of query + item.
        max_pack_tokens: maximum number of tokens of a packed sequence with more than one item.
        max_multi_item_seq_len: maximum number of tokens of a sequence of `packed_dense`, even with one item.
        max_batch_tokens: maximum number of tokens of several items sent together after a cached query.
        max_extend_tokens: maximum number of tokens of one item after a cached query: the room that the KV pool has beside the
            query.
        block_size: tokens of a KV page.
        items_on_pages: whether every item begins on a page.
    """

    query: list[int]
    items: list[list[int]]
    leading: list[int] = field(default_factory=list)
    item_first: bool = False
    max_pack_tokens: int = 8192
    max_multi_item_seq_len: int = 8192
    max_batch_tokens: int = 2048
    max_extend_tokens: int = 1 << 31
    block_size: int = 16
    items_on_pages: bool = False

    @property
    def unit(self) -> int:
        """Return the number of slots of whose multiples an item takes."""
        return self.block_size if self.items_on_pages else 1

    @property
    def prefix(self) -> list[int]:
        """Return the tokens that precede every item."""
        return self.leading + self.query

    def tokens(self) -> dict[str, int]:
        """Return the number of tokens that each algorithm computes for this job, by name."""
        distinct = dict.fromkeys(map(tuple, self.items))  # repeated items are scored once
        return score_tokens(
            len(self.leading) + len(self.query),
            [len(item) for item in distinct],
            max_pack_tokens=self.max_pack_tokens,
            max_multi_item_seq_len=self.max_multi_item_seq_len,
            block_size=self.block_size,
            unit=self.unit,
        )


@dataclass(frozen=True)
class ScorePart:
    """One sequence of a job.

    Attributes:
        layout: layout of the sequence.
        rows: token indices whose next-token distribution is read, ascending.
        items: index of the item that each row belongs to.
    """

    layout: ChunkLayout
    rows: Int64[np.ndarray, " R"]
    items: list[int]


def serial(job: QueryItems) -> Iterator[ScorePart]:
    """Yield every item as a plain sequence with the query. This algorithm defines the scores."""
    for index, item in enumerate(job.items):
        prefix, question = ([], job.leading + item + job.query) if job.item_first else (job.prefix, item)
        yield ScorePart(make_layout(prefix, [], question), np.asarray([len(prefix) + len(question) - 1]), [index])


def packed_segment(job: QueryItems) -> Iterator[ScorePart]:
    """Yield packs of the query followed by as many items as fit, each isolated from other items.

    Scores are read at each item's last token, or at the query's last token for an empty item.
    """
    return _packs(job, job.max_pack_tokens - len(job.prefix))


def packed_dense(job: QueryItems) -> Iterator[ScorePart]:
    """Yield packs like `packed_segment`, small enough for a mask over all pairs of their tokens."""
    return _packs(job, job.max_multi_item_seq_len - len(job.prefix))


def prefill_extend(job: QueryItems) -> Iterator[ScorePart]:
    """Yield batches of items that follow a query in the cache.

    A cached token has no logits, so empty items make the query's last page of tokens be computed again.
    """
    prefix, empty = job.prefix, [index for index, item in enumerate(job.items) if not item]
    yield from _packs(job, job.max_batch_tokens, [index for index, item in enumerate(job.items) if item])
    if empty:
        last = len(prefix) - 1
        cut = last - last % job.block_size
        yield ScorePart(make_layout(prefix[:cut], [], prefix[cut:]), np.full(len(empty), last), empty)


def _packs(job: QueryItems, most: int, picked: Sequence[int] | None = None) -> Iterator[ScorePart]:
    """Yield sequences of the query and up to `most` tokens of the items in `picked`, in that order; None picks all items."""
    if job.item_first:
        raise ValueError("item_first leaves no shared prefix to pack after")
    picked = range(len(job.items)) if picked is None else picked
    for first, last in groups([len(job.items[index]) for index in picked], most, job.unit):
        # Every item starts at the query's length, as if it were alone, regardless of the engine's position strategy.
        layout = make_layout(job.prefix, [job.items[index] for index in picked[first:last]], [], "shared")
        ends = np.asarray([s.end - 1 if s.end > s.start else layout.prefix_len - 1 for s in layout.segments[1:-1]])
        order = np.argsort(ends, kind="stable")
        yield ScorePart(layout, ends[order], [picked[first + place] for place in order])


ALGORITHMS: dict[str, Callable[[QueryItems], Iterator[ScorePart]]] = {
    "packed_segment": packed_segment,
    "prefill_extend": prefill_extend,
    "serial": serial,
    "packed_dense": packed_dense,
}
"""Algorithms by name."""

BACKENDS = {"packed_dense": "packed_dense"}
"""Attention backends of the algorithms that do not run on the engine's own."""

AUTO = "packed_segment", "prefill_extend", "serial"
"""Algorithms that `auto` chooses from; at equal cost the first algorithm wins. `packed_dense` exists for comparison only."""
