"""Algorithms that turn a scoring call into sequences. All give the same log-probabilities.

An algorithm lays tokens out and names the rows to read, one sequence at a time. The engine that generates text also
computes the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32, Int64

from chunkattn.backends.registry import ON_REQUEST
from chunkattn.engine.limits import ITEMS
from chunkattn.layout import ChunkLayout, Names
from chunkattn.parsers.token_lists import TokenLists
from chunkattn.rope.positions import lay_out, make_layout


@dataclass(frozen=True, eq=False)
class SharedDocuments:
    """Documents of a scoring call, and the tokens between them and every item.

    Attributes:
        chunks: token ids of each document, int32; every layout copies them.
        state: token ids behind the documents, which every item's sequence shares.
        strategy: name of the position strategy.
        gap: positions left free before the documents.
    """

    chunks: Sequence[Int32[np.ndarray, " T"]]
    state: list[int]
    strategy: str
    gap: int

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(map(len, self.chunks)) + len(self.state)

    def layout(self, before: list[int], item: list[int]) -> ChunkLayout:
        """Return the layout of one item behind prefix, documents and state."""
        return make_layout(before, self.chunks, self.state + item, self.strategy, self.gap)


@dataclass(eq=False)
class ScoreInputs:
    """Sequences to score: `before + item` for every item; and the bounds of sequences that hold several items.

    Attributes:
        before: token ids before every item: leading special tokens and the query.
        items: token ids of each item.
        labels: token ids of each item's labels; empty for a classifier, or where they do not matter.
        reads: number of each item's last tokens that are read. An item of one is read for all of its labels; an item of several
            has one label for each token in order. Empty reads one token of each item.
        backs: tokens of each item that are read, counted from its end, the last being 1, in descending order; instead of
            `reads`. Empty for none.
        names: the caller's names of query and items.
        documents: documents between `before` and every item; None for none.
        item_first: whether the caller's item comes first. Then `before` is that item, and `items` holds the query alone.
        max_pack_tokens: maximum number of tokens of a packed sequence with more than one item.
        max_batch_tokens: maximum number of tokens of several items sent together after a cached query.
        max_pack_slots: maximum number of KV slots of a packed sequence with more than one item.
        max_batch_slots: maximum number of KV slots of several items sent together after a cached query.
        max_extend_tokens: maximum number of tokens of one item after a cached query: the room that the KV pool has beside the
            query, and at most `max_chunk_len`.
        block_size: tokens of a KV page.
        cut_size: tokens to whose multiples the query is cut where its end is computed again.
        items_on_pages: whether every item begins on a page.
    """

    before: list[int]
    items: list[list[int]]
    labels: Sequence[tuple[int, ...]] = ()
    reads: Sequence[int] = ()
    names: Names = ITEMS
    documents: SharedDocuments | None = None
    item_first: bool = False
    max_pack_tokens: int = 8192
    max_batch_tokens: int = 2048
    max_pack_slots: int = 1 << 31
    max_batch_slots: int = 1 << 31
    max_extend_tokens: int = 1 << 31
    block_size: int = 16
    cut_size: int = 16
    items_on_pages: bool = False
    backs: Sequence[tuple[int, ...]] = ()

    def packs(self, lens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield ranges of items of these lengths that are packed behind the query, see `groups`."""
        unit = self.unit
        slots = self.max_pack_slots + self.query_len // -unit * unit
        return groups(lens, self.max_pack_tokens - self.query_len, slots, unit)

    def batches(self, lens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield ranges of items of these lengths that are sent together after a cached query, see `groups`."""
        return groups(lens, self.max_batch_tokens, self.max_batch_slots, self.unit)

    @cached_property
    def prefix_ids(self) -> Int32[np.ndarray, " P"]:
        """Return `before` as an array."""
        return np.asarray(self.before, np.int32)

    @cached_property
    def listed(self) -> TokenLists:
        """Return the token ids of each item."""
        return TokenLists.of(self.items)

    @property
    def lens(self) -> list[int]:
        """Return the number of tokens of each item."""
        return self.listed.lens

    @property
    def unit(self) -> int:
        """Return the slots to whose multiples an item's length is rounded up."""
        return self.block_size if self.items_on_pages else 1

    @property
    def query_len(self) -> int:
        """Return the number of tokens that every sequence has beside its item."""
        return len(self.before) + (0 if self.documents is None else len(self.documents))

    def reads_of(self, place: int) -> int:
        """Return the number of tokens that are read of an item.

        Args:
            place: place of the item in `items`.
        """
        if self.backs:
            return len(self.backs[place])
        return self.reads[place] if self.reads else 1

    def rows_of(self, place: int, end: int) -> list[int]:
        """Return the ascending indices of the tokens that are read of an item.

        Args:
            place: place of the item in `items`.
            end: index behind the item's last token.
        """
        backs = self.backs[place] if self.backs else range(self.reads_of(place), 0, -1)
        return [end - back for back in backs]

    def tokens(self) -> dict[str, int]:
        """Return the number of tokens that each algorithm computes, by name."""
        query = self.query_len
        if self.documents is not None:
            return {"prefill_extend": query + sum(self.lens)}
        labels = self.labels or [()] * len(self.items)
        different = dict(zip(zip(self.listed.encoded, labels, strict=True), self.lens, strict=True))
        items = [*different.values()]  # items repeated with their labels are scored once
        total = sum(items)

        # An empty item makes `prefill_extend` compute the query's end again.
        again = (query - 1) % self.cut_size + 1 if query and not all(items) else 0
        return {
            **dict.fromkeys(PACKED, total + query * sum(1 for _ in self.packs(items))),
            "serial": total + query * len(items),
            "prefill_extend": total + query + again if items else 0,
        }


Pack = tuple[ChunkLayout, Int64[np.ndarray, " R"], list[int]]
"""One sequence: its layout, the ascending indices of the tokens whose next-token distribution is read, and the place in
`ScoreInputs.items` of the item that each of these rows belongs to."""


def serial(call: ScoreInputs, places: Sequence[int]) -> Iterator[Pack]:
    """Yield every item as a plain sequence with the query. This algorithm defines the scores.

    Args:
        call: query and items.
        places: places of the items to lay out, here and in the other algorithms.
    """
    for place in places:
        item = call.items[place]
        rows = call.rows_of(place, call.query_len + len(item))
        yield make_layout(call.prefix_ids, [], item), np.asarray(rows), [place] * len(rows)


def packed_segment(call: ScoreInputs, places: Sequence[int]) -> Iterator[Pack]:
    """Yield packs of the query followed by as many items as fit, each isolated from other items.

    Scores are read at each item's last tokens, or at the query's last token for an empty item.
    """
    return _packs(call, places, call.packs)


def prefill_extend(call: ScoreInputs, places: Sequence[int]) -> Iterator[Pack]:
    """Yield batches of items that follow a query in the cache.

    A cached token has no logits, so empty items make the query's last `ScoreInputs.cut_size` tokens be computed again.
    """
    yield from _packs(call, [place for place in places if call.items[place]], call.batches)
    if empty := [place for place in places if not call.items[place]]:
        last = len(call.before) - 1
        cut = last - last % call.cut_size
        yield make_layout(call.before[:cut], [], call.before[cut:]), np.full(len(empty), last), empty


def _packs(
    call: ScoreInputs, places: Sequence[int], cut: Callable[[Sequence[int]], Iterator[tuple[int, int]]]
) -> Iterator[Pack]:
    """Yield sequences of the query and some of the items, in the order of `places`.

    Args:
        call: query and items.
        places: places of the items.
        cut: cuts lengths of items into ranges, see `groups`.
    """
    of_places = [call.lens[place] for place in places]
    for first, last in cut(of_places):
        # Every item starts at the query's length, as if it were alone, regardless of the engine's position strategy.
        packed = places[first:last]
        token_ids = np.concatenate([call.prefix_ids, call.listed.joined(packed)])
        layout = lay_out(token_ids, len(call.before), tuple(of_places[first:last]), 0, "shared")
        lens = np.asarray(layout.chunk_lens, np.int64)
        ends = layout.prefix_len + np.cumsum(lens) * (lens > 0)
        if call.reads or call.backs:
            read = [call.rows_of(place, end) for place, end in zip(packed, ends.tolist(), strict=True)]
            rows, owners = np.asarray([row for rows in read for row in rows]), np.repeat(packed, [len(rows) for rows in read])
        else:
            rows, owners = ends - 1, np.asarray(packed)
        order = np.argsort(rows, kind="stable")
        yield layout, rows[order], owners[order].tolist()


def extend_documents(call: ScoreInputs, places: Sequence[int]) -> Iterator[Pack]:
    """Yield every item as a sequence of its own behind prefix, documents and state, which the cache holds."""
    assert call.documents is not None
    for place in places:
        layout = call.documents.layout(call.before, call.items[place])
        rows = call.rows_of(place, len(layout))
        yield layout, np.asarray(rows), [place] * len(rows)


ALGORITHMS: dict[str, Callable[[ScoreInputs, Sequence[int]], Iterator[Pack]]] = {
    "packed_segment": packed_segment,
    "prefill_extend": prefill_extend,
    "serial": serial,
    **dict.fromkeys(ON_REQUEST, packed_segment),
}
"""Algorithms by name; those of `ON_REQUEST` run on the attention backend of their name."""

PACKED = "packed_segment", *ON_REQUEST
"""Algorithms whose sequences hold the query and several items."""

AUTO = "packed_segment", "prefill_extend", "serial"
"""Algorithms that `auto` chooses from; at equal cost the first algorithm wins. The others exist for comparison only."""


def groups(lens: Sequence[int], most: int, room: int = 1 << 31, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges `[first, last)` of consecutive entries within two limits; a longer entry stands alone.

    Args:
        lens: tokens of each entry.
        most: token limit of a range.
        room: slot limit of a range.
        unit: slots to whose multiples an entry's tokens are rounded up.
    """
    first, sizes = 0, np.asarray(lens, np.int64)
    sums = [(np.cumsum(sizes), most), (np.cumsum(-(-sizes // unit) * unit), room)]
    while first < len(sizes):
        before = [int(total[first - 1]) if first else 0 for total, _ in sums]
        ends = [int(total.searchsorted(start + limit, "right")) for start, (total, limit) in zip(before, sums, strict=True)]
        last = max(min(ends), first + 1)
        yield first, last
        first = last
