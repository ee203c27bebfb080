"""The mapping from token indices to KV slots: page-aligned parts, each followed by a hole up to its page's end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32

from chunkattn.layout import ChunkLayout


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """Slots of one sequence. Generated tokens continue from the last slot.

    Attributes:
        slots: slot of every token of the layout, ascending.
        row_start: first slot a row sees beyond the prefix (0 for prefix and question).
        prefix_end: number of slots of the prefix, whose attention is summed apart; 0 where the prompt is summed as one piece.
        page_len: valid slots of every page. The last page of the question counts as full: its rows see no slot beyond
            their own.
        block_size: slots per page.
        aligned: whether every part begins on a page of its own.
        packed_chunks: whether the chunks of an aligned plan lie without holes after the prefix.
    """

    slots: Int32[np.ndarray, " T"]
    row_start: Int32[np.ndarray, " T"]
    prefix_end: int
    page_len: Int32[np.ndarray, " pages"]
    block_size: int
    aligned: bool
    packed_chunks: bool = False

    @cached_property
    def end(self) -> int:
        """Return the slot of the first generated token."""
        return int(self.slots[-1]) + 1 if len(self.slots) else 0


def plan_slots(
    layout: ChunkLayout,
    block_size: int,
    *,
    aligned: bool,
    packed_chunks: bool = False,
    apart: bool = False,
    state_len: int = 0,
) -> SlotPlan:
    """Lay out a prompt in slots.

    Args:
        layout: the prompt.
        block_size: slots per page.
        aligned: begin every part on a page of its own, so that its pages can be shared; False packs the parts without
            holes.
        packed_chunks: in an aligned plan, pack the chunks without holes after the prefix. For chunks that no other
            request shares.
        apart: without chunks, sum the question's attention to the prefix apart, as a chunk's. False for a prompt that shares
            pages with plain prompts.
        state_len: in an aligned plan, tokens of the question after which it continues on a new page; 0 for none.

    Returns:
        The slots of all `T` tokens of the layout.
    """
    if layout.is_plain and not aligned:
        page_len = np.full(-(-len(layout) // block_size), block_size, np.int32)
        slots = np.arange(len(layout), dtype=np.int32)
        return SlotPlan(slots, np.zeros_like(slots), 0, page_len, block_size, aligned)
    lens = np.asarray(_part_lens(layout, state_len if aligned else 0), np.int64)
    if aligned and packed_chunks:
        pages = -(-np.asarray([lens[0], lens[1:].sum()]) // block_size)
        page_len = np.full(pages.sum(), block_size, np.int32)
        if pages[0]:
            page_len[pages[0] - 1] = (lens[0] - 1) % block_size + 1
        starts = np.cumsum(lens) - lens
        starts[1:] += pages[0] * block_size - lens[0]
    elif aligned:
        pages = -(-lens // block_size)
        page_len = np.full(pages.sum(), block_size, np.int32)
        # The question's last page stays full, because generated tokens fill it.
        closed = lens[:-1] > 0
        page_len[(np.cumsum(pages)[:-1] - 1)[closed]] = ((lens[:-1] - 1) % block_size + 1)[closed]
        starts = (np.cumsum(pages) - pages) * block_size
    else:
        page_len = np.full(-(-lens.sum() // block_size), block_size, np.int32)
        starts = np.cumsum(lens) - lens
    within = np.arange(len(layout)) - np.repeat(np.cumsum(lens) - lens, lens)
    is_chunk = np.pad(np.ones(layout.num_chunks, bool), (1, len(lens) - 1 - layout.num_chunks))
    is_chunk[-1] |= aligned and apart and not layout.num_chunks  # has the bits of a chunk
    return SlotPlan(
        slots=(np.repeat(starts, lens) + within).astype(np.int32),
        row_start=np.repeat(np.where(is_chunk, starts, 0), lens).astype(np.int32),
        prefix_end=layout.prefix_len if layout.num_chunks or apart else 0,
        page_len=page_len,
        block_size=block_size,
        aligned=aligned,
        packed_chunks=aligned and packed_chunks,
    )


def _part_lens(layout: ChunkLayout, state_len: int) -> list[int]:
    """Return the tokens of every part, with the first `state_len` tokens of the question as a part of their own."""
    ends = [layout.question_len] if not state_len else [state_len, layout.question_len - state_len]
    return [layout.prefix_len, *layout.chunk_lens, *ends]


def num_slots(layout: ChunkLayout, block_size: int, *, aligned: bool, packed_chunks: bool = False, state_len: int = 0) -> int:
    """Return the slots of a prompt that `plan_slots` lays out with the same arguments, holes before the last token included."""
    lens = [n for n in _part_lens(layout, state_len if aligned else 0) if n]
    if not lens or not aligned:
        return sum(lens)
    if packed_chunks:
        prefix = layout.prefix_len
        return sum(lens) if prefix == sum(lens) else -(-prefix // block_size) * block_size + sum(lens) - prefix
    return sum(-(-n // block_size) * block_size for n in lens[:-1]) + lens[-1]
