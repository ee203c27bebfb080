"""`States`: the slots and seats of recurrent layers on the host, and the states that the cache keeps of blocks.

A sample that runs has a slot and a seat, its *track* (see `chunkattn.backends.recurrence`). The other slots hold states that
are kept: each belongs to a block of the trie, is written once, and is freed with its block or, the least recently used first,
when a slot is needed. A kept state lies at the end of a part, where other parts continue from it, or after a whole number of
blocks of the chunkwise form, where the part itself continues.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chunkattn.backends.recurrence import Walk
from chunkattn.cache.trie import Block

MOST_SOURCES = 3
"""States at the ends of parts that one prompt needs at most: after prefix, chunk and the beginning of its question."""


@dataclass(eq=False)
class KeptState:
    """State that belongs to a block.

    Attributes:
        slot: its slot.
        block: its block.
        offset: tokens of the block before the state.
        ready: whether the state has been computed.
        refs: number of requests and moves that need it.
    """

    slot: int
    block: Block
    offset: int
    ready: bool = False
    refs: int = 0


@dataclass(eq=False)
class Move:
    """Tokens of one part that one step computes for a sample: a walk of the recurrent layers.

    Attributes:
        track: track of the sample.
        part: place of the part in the sample.
        first: token index of the part's first token.
        start: token index of the first token.
        end: token index after the last token.
        is_part_end: whether the part ends there, so that the track does not go on from it.
        begins: whether the move begins the part, or goes on from a kept state, so that it does not read the track.
        source: state that the move begins from; None for the track's own, or for zeros.
        before: place, planned tokens and whether the part had begun before the move was planned.
        turn: number of the plan that the move belongs to.
        goal: state that the move leaves in the cache; None for none.
        keep_at: tokens of the part before that state.
        claimed: block that other samples wait for until the move is committed.
    """

    track: Track
    part: int
    first: int
    start: int
    end: int
    begins: bool
    source: KeptState | None
    before: tuple[int, int, bool]
    turn: int
    is_part_end: bool = False
    goal: KeptState | None = None
    keep_at: int = 0
    claimed: Block | None = None

    def walk(self, row: int) -> Walk:
        """Return the walk of the recurrent layers.

        Args:
            row: the move's first row in its step.
        """
        track, slot, seat = self.track, self.track.slot, self.track.seat
        source = track.slot
        if self.begins:
            source = -1 if self.source is None else self.source.slot
            if self.is_part_end:
                slot = seat = -1
        kept = (0, -1) if self.goal is None else (self.keep_at, self.goal.slot)
        return Walk(row, self.end - self.start, self.start - self.first, source, slot, seat, *kept)


@dataclass(eq=False)
class Track:
    """Place of a sample in its prompt, whose parts it computes in order, and what the device holds for it.

    Attributes:
        slot: slot of the state before the open block.
        seat: seat of the open block.
        part: place of the part that is computed next or at present.
        planned: tokens from the start that are computed, or will be by the steps planned so far.
        started: whether the part has begun.
        moves: planned moves that are not committed, the oldest first.
        source: state that the part's first move begins from; None for zeros.
        goal: state that the part leaves in the cache and no move does yet; None for none.
        keep_at: tokens of the part before that state, or before the claimed block's end.
        claimed: block that other samples wait for, since this one computes it.
        holds: part and its tokens before the state in `slot`, once a step that wrote the slot was sent; None before.
        turn: number of the last plan with a move that reads the track.
    """

    slot: int
    seat: int
    part: int = 0
    planned: int = 0
    started: bool = False
    moves: deque[Move] = field(default_factory=deque)
    source: KeptState | None = None
    goal: KeptState | None = None
    keep_at: int = 0
    claimed: Block | None = None
    holds: tuple[int, int] | None = None
    turn: int = -1

    @property
    def done(self) -> int:
        """Return the tokens from the start that are computed."""
        return self.moves[0].start if self.moves else self.planned


class States:
    """Slots and seats, each free, of a track, or of a kept state.

    Attributes:
        num_slots: number of slots.
        num_seats: number of seats.
        evictions: number of kept states evicted so far.
    """

    def __init__(self, num_slots: int, num_seats: int) -> None:
        self.num_slots, self.num_seats, self.evictions = num_slots, num_seats, 0
        self.reset()

    def reset(self) -> None:
        """Mark every slot and seat free, after the pool is lost."""
        self._slots, self._seats = deque(range(self.num_slots)), deque(range(self.num_seats))
        self._kept: dict[KeptState, None] = {}
        self._idle: dict[KeptState, None] = {}  # the least recently used first

    @property
    def num_free(self) -> int:
        """Return the number of free slots."""
        return len(self._slots)

    @property
    def num_idle(self) -> int:
        """Return the number of kept states that nobody needs at present."""
        return len(self._idle)

    @property
    def num_kept(self) -> int:
        """Return the number of kept states."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Return the number of slots that are free or can be taken from kept states."""
        return len(self._slots) + len(self._idle)

    @property
    def num_free_seats(self) -> int:
        """Return the number of free seats."""
        return len(self._seats)

    # Kept states

    @staticmethod
    def find(block: Block, offset: int | None = None) -> KeptState | None:
        """Return the state of a block after some of its tokens, computed or not.

        Args:
            block: the block.
            offset: number of its tokens; None for all.
        """
        return None if not block.states else block.states.get(block.size if offset is None else offset)

    def keep(self, block: Block, offset: int, slot: int | None = None, *, ready: bool = False) -> KeptState | None:
        """Give a block a state, on a free slot or the one of the least recently used state. Return None if there is no room.

        Args:
            block: block without a state after these tokens.
            offset: number of tokens of the block.
            slot: slot that the caller owns; None for a new one.
            ready: whether the slot holds the state.
        """
        slot = self.new_slot() if slot is None else slot
        if slot is None:
            return None
        kept = KeptState(slot, block, offset, ready)
        block.states = {**(block.states or {}), offset: kept}
        self._kept[kept] = self._idle[kept] = None
        return kept

    def hold(self, kept: KeptState) -> KeptState:
        """Keep a state from being evicted."""
        kept.refs += 1
        self._idle.pop(kept, None)
        return kept

    def touch(self, kept: KeptState) -> None:
        """Count a state as used now, so that others are evicted before it."""
        if kept in self._idle:
            del self._idle[kept]
            self._idle[kept] = None

    def let_go(self, kept: KeptState) -> None:
        """Undo `hold`. A state that was never computed is freed with its last holder."""
        kept.refs -= 1
        if kept.refs or kept not in self._kept:
            return
        self._idle[kept] = None
        if not kept.ready:
            self._free(kept)

    def drop(self, block: Block) -> None:
        """Free the states of a block that leaves the cache."""
        for kept in list((block.states or {}).values()):
            self._free(kept)

    def _free(self, kept: KeptState) -> None:
        if kept in self._kept:
            del self._kept[kept]
            self._idle.pop(kept, None)
            self._slots.append(kept.slot)
            states = kept.block.states or {}
            states.pop(kept.offset, None)
            kept.block.states = states or None
            kept.ready = False

    # Slots and seats

    def new_slot(self) -> int | None:
        """Return a slot, of the least recently used state if none is free; None if all are needed."""
        if not self._slots and self._idle:
            self.evictions += 1
            self._free(next(iter(self._idle)))
        return self._slots.popleft() if self._slots else None

    def new_track(self) -> Track | None:
        """Return a track with a slot and a seat of its own; None if there is no room."""
        if not self._seats or (slot := self.new_slot()) is None:
            return None
        return Track(slot, self._seats.popleft())

    def end(self, track: Track, *, slot_is_kept: bool = False) -> None:
        """Free the seat of a track and, unless a kept state has taken it over, its slot."""
        self._seats.append(track.seat)
        if not slot_is_kept:
            self._slots.append(track.slot)

    def check(self, tracks: list[Track], held: dict[KeptState, int]) -> None:
        """Assert that every slot and seat is accounted for.

        Args:
            tracks: the tracks of all samples, those still to be forked among them.
            held: number of holders of each held state.

        Raises:
            AssertionError: a slot or a seat is lost or used twice, or holders are miscounted.
        """
        slots = [*self._slots, *(kept.slot for kept in self._kept), *(track.slot for track in tracks)]
        assert sorted(slots) == list(range(self.num_slots)), "slots are lost, or used twice"
        assert sorted([*self._seats, *(t.seat for t in tracks)]) == list(range(self.num_seats)), "seats are lost or used twice"
        assert all(kept.refs == held.get(kept, 0) for kept in self._kept), "holders of states are miscounted"
        assert all(kept.ready or kept.refs for kept in self._kept), "a state that nobody computes is kept"
        assert {kept for kept in self._kept if not kept.refs} == {*self._idle}, "idle states are miscounted"
        assert all(States.find(kept.block, kept.offset) is kept for kept in self._kept), "a state has lost its block"
