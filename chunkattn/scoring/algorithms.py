"""How a scoring job becomes sequences. Every algorithm gives the same log-probabilities.

An algorithm only lays tokens out and says at which rows to read, one sequence at a time; the engine that
generates also scores.
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
        leading: special tokens that begin every sequence.
        item_first: each sequence is item + query instead of query + item.
        max_pack_tokens: most tokens of one packed sequence, where more than one item is in it.
        max_dense_tokens: the same under a dense mask; no pack may be larger then.
        max_batch_tokens: most tokens of items that are sent together behind a cached query, where there is more than one.
        max_extend_tokens: the same where there is one: what the KV pool holds beside the query.
        block_size: tokens of a KV page.
    """

    query: list[int]
    items: list[list[int]]
    leading: list[int] = field(default_factory=list)
    item_first: bool = False
    max_pack_tokens: int = 8192
    max_dense_tokens: int = 8192
    max_batch_tokens: int = 2048
    max_extend_tokens: int = 1 << 31
    block_size: int = 16

    @property
    def prefix(self) -> list[int]:
        """What every item stands behind."""
        return self.leading + self.query

    def tokens(self) -> dict[str, int]:
        """Tokens that each algorithm computes for this job, by name."""
        return score_tokens(
            len(self.leading) + len(self.query),
            [len(item) for item in self.items],
            max_pack_tokens=self.max_pack_tokens,
            max_dense_tokens=self.max_dense_tokens,
            block_size=self.block_size,
        )


@dataclass(frozen=True)
class ScorePart:
    """One sequence of a job.

    Attributes:
        rows: int64 `[R]`, ascending token indices whose next-token distribution is read.
        items: which item each row belongs to.
    """

    layout: ChunkLayout
    rows: Int64[np.ndarray, " R"]
    items: list[int]


def serial(job: QueryItems) -> Iterator[ScorePart]:
    """The definition: every item a plain sequence of its own with the query."""
    for index, item in enumerate(job.items):
        ids = job.leading + (item + job.query if job.item_first else job.query + item)
        yield ScorePart(make_layout([], [], ids), np.asarray([len(ids) - 1]), [index])


def packed_segment(job: QueryItems) -> Iterator[ScorePart]:
    """The query once a pack, behind it as many items as the pack holds, each isolated from the others.

    Read at each item's last token; an empty item at the query's.
    """
    return _packs(job, job.max_pack_tokens - len(job.prefix))


def packed_dense(job: QueryItems) -> Iterator[ScorePart]:
    """As `packed_segment`, in packs small enough for a mask over all their pairs."""
    return _packs(job, job.max_dense_tokens - len(job.prefix))


def prefill_extend(job: QueryItems) -> Iterator[ScorePart]:
    """The items in batches behind the query, which is in the cache.

    A cached token has no logits, so for empty items the query's last page of tokens is computed again.
    """
    prefix, empty = job.prefix, [index for index, item in enumerate(job.items) if not item]
    yield from _packs(job, job.max_batch_tokens, [index for index, item in enumerate(job.items) if item])
    if empty:
        last = len(prefix) - 1
        cut = last - last % job.block_size
        yield ScorePart(make_layout(prefix[:cut], [prefix[cut:]], [], "shared"), np.full(len(empty), last), empty)


def _packs(job: QueryItems, most: int, picked: Sequence[int] | None = None) -> Iterator[ScorePart]:
    """Sequences of the query and up to `most` tokens of items, of `picked` ones in this order."""
    if job.item_first:
        raise ValueError("item_first leaves no shared prefix to pack behind")
    picked = range(len(job.items)) if picked is None else picked
    for first, last in groups([len(job.items[index]) for index in picked], most):
        # Positions are the query's length onwards whatever the engine's strategy: an item stands alone.
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
"""By name."""

AUTO = "packed_segment", "prefill_extend", "serial"
"""Those to choose from; where costs are equal the first. Not `packed_dense`: it is there to be compared with."""
