"""How a scoring job becomes sequences. Every algorithm gives the same log-probabilities.

An algorithm only lays tokens out and says at which rows to read; the engine that
generates also scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout


@dataclass(frozen=True)
class ScoreJob:
    """Token ids of a query and its items.

    Attributes:
        leading: special tokens that begin every sequence.
        item_first: each sequence is item + query instead of query + item.
        max_pack_tokens: most tokens of one packed sequence, where more than one item is in it.
    """

    query: list[int]
    items: list[list[int]]
    leading: list[int] = field(default_factory=list)
    item_first: bool = False
    max_pack_tokens: int = 8192


@dataclass(frozen=True)
class ScorePart:
    """One sequence of a job.

    Attributes:
        rows: int64 `[R]`, ascending token indices whose next-token distribution is read.
        items: which item each row belongs to.
    """

    layout: ChunkLayout
    rows: np.ndarray
    items: list[int]


def serial(job: ScoreJob) -> list[ScorePart]:
    """The definition: every item a plain sequence of its own with the query."""
    parts = []
    for index, item in enumerate(job.items):
        ids = job.leading + (item + job.query if job.item_first else job.query + item)
        parts.append(ScorePart(make_layout([], [], ids), np.asarray([len(ids) - 1]), [index]))
    return parts


def packed_segment(job: ScoreJob) -> list[ScorePart]:
    """The query once, behind it as many items as a pack holds, each isolated from the others.

    Read at each item's last token; an empty item at the query's.
    """
    if job.item_first:
        raise ValueError("item_first leaves no shared prefix to pack behind")
    parts: list[ScorePart] = []
    query, first = job.leading + job.query, 0
    while first < len(job.items):
        last, tokens = first + 1, len(query) + len(job.items[first])
        while last < len(job.items) and tokens + len(job.items[last]) <= job.max_pack_tokens:
            tokens += len(job.items[last])
            last += 1
        # Positions are the query's length onwards whatever the engine's strategy: an item stands alone.
        layout = make_layout(query, job.items[first:last], [], "shared")
        ends = np.asarray([s.end - 1 if s.end > s.start else layout.prefix_len - 1 for s in layout.segments[1:-1]])
        order = np.argsort(ends, kind="stable")
        parts.append(ScorePart(layout, ends[order], (order + first).tolist()))
        first = last
    return parts


ALGORITHMS: dict[str, Callable[[ScoreJob], list[ScorePart]]] = {"serial": serial, "packed_segment": packed_segment}
