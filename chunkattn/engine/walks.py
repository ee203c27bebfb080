"""`Walks`: chooses the tokens that the recurrent layers compute for a sample, and keeps the states they leave.

A sample computes the parts of its prompt in order, each from the state at the end of the part it continues from. A part whose
K/V is cached is computed again where a state is missing: as far as needed, from the last kept state in it. Of several samples
that need a part, one computes it, and the others wait for its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from chunkattn.backends.recurrence import BLOCK
from chunkattn.cache.trie import Block
from chunkattn.engine.request import Part, Request, Sample
from chunkattn.engine.states import MOST_SOURCES, KeptState, Move, States, Track
from chunkattn.layout import PREFIX_ID, QUESTION_ID

Emit = Callable[[Sample, Move, int], bool]
"""Adds tokens behind a move to a plan, and returns whether there was room for them."""


class Walks:
    """Planner of the tokens that samples compute in a model with recurrent layers.

    Args:
        states: slots, seats and kept states.
        block_size: tokens per page.
    """

    def __init__(self, states: States, block_size: int) -> None:
        self.states, self._block_size = states, block_size
        self._forked: list[tuple[int, int, int, int]] = []

    def reset(self) -> None:
        """Mark every slot and seat free, and drop the copies of forks, after the pool is lost."""
        self.states.reset()
        self._forked = []

    # Placed requests

    def take(self, request: Request) -> bool:
        """Give a placed request its tracks, and the states that its parts continue from. Return whether there was room."""
        states, fresh = self.states, list[Block]()
        tracks = self._tracks(request)
        for block in self._sources(request):
            if kept := states.find(block):
                request.sources.append(states.hold(kept))
            else:
                fresh.append(block)
        if tracks > states.num_free_seats or tracks + len(fresh) > states.num_available:
            self._let_go(request)
            return False
        for part in (part for sample in request.samples for part in sample.parts):
            for kept in (kept for block in part.blocks for kept in (block.states or {}).values()):
                states.touch(kept)  # no track of the request shall take what the request may go on from
        for block in fresh:
            kept = states.keep(block, block.size)
            assert kept is not None
            request.sources.append(states.hold(kept))
        made = [track for _ in range(tracks) if (track := states.new_track())]
        for sample in request.samples:
            sample.track = made.pop()
        request.spare_tracks = made
        request.heirs = {}
        for number, part in enumerate(request.samples[0].parts):
            if (above := part.parents[-1]) is not None:
                request.heirs.setdefault(above, []).append(number)
        return True

    def may_take(self, request: Request) -> bool:
        """Return whether there is room for the tracks of a request, whatever states it needs besides."""
        return self._tracks(request) <= min(self.states.num_free_seats, self.states.num_available)

    @staticmethod
    def _tracks(request: Request) -> int:
        return request.num_samples if request.forks else len(request.samples)

    @staticmethod
    def _sources(request: Request) -> dict[Block, None]:
        """Return the blocks of a placed request at whose ends other parts begin, or whose states it pins."""
        parents = [part.parents[-1] for sample in request.samples for part in sample.parts]
        if request.precompute is not None and request.precompute.pin:
            parts = request.samples[0].parts
            parents += [part.blocks[-1] for number, part in enumerate(parts) if Walks._keeps_end(request, number)]
        return {block: None for block in parents if block is not None and block.page >= 0}

    def needs(self, request: Request) -> tuple[int, int]:
        """Return the seats, and at most the slots, that placing a request takes."""
        message = request.precompute
        pins = message is not None and message.pin and message.keep_states
        kept = len(request.segments) if pins else min(len(request.segments), MOST_SOURCES)
        return request.num_samples, request.num_samples + kept

    def give_back(self, request: Request) -> None:
        """Take back what a request holds besides the tracks of its samples."""
        self._let_go(request)
        for track in request.spare_tracks:
            self.states.end(track)
        request.spare_tracks = []

    def _let_go(self, request: Request) -> None:
        for kept in request.sources:
            self.states.let_go(kept)
        request.sources = []

    def end(self, sample: Sample) -> None:
        """Take back the track of a sample. The cache keeps its state if the sample's block is there without one."""
        if (track := sample.track) is not None:
            self._stop(track)
            kept = self._kept_of(sample, track)
            self.states.end(track, slot_is_kept=kept is not None)
            sample.track = None

    def _kept_of(self, sample: Sample, track: Track) -> KeptState | None:
        """Give the state in a track's slot to its block, if nothing forbids."""
        if track.holds is None or not sample.request.shares:
            return None
        number, tokens = track.holds
        part = sample.parts[number]
        is_wanted = self._grows(sample, number) or self._keeps(sample, number)
        if not tokens or part.start + tokens > track.done or not is_wanted:
            return None
        block, offset = self._place(part, tokens)
        is_cached = block.key is not None and block.keep and block.filled >= offset
        if not is_cached or self.states.find(block, offset):
            return None
        return self.states.keep(block, offset, track.slot, ready=True)

    def pin(self, request: Request) -> None:
        """Free the tracks of a completed request, which goes on holding its states."""
        for sample in request.samples:
            self.end(sample)

    def fork(self, first: Sample, sample: Sample, track: Track) -> None:
        """Give a sample the place of the one that computed its prompt; the device copies slot and seat."""
        assert first.track is not None
        track.part, track.planned, track.started = first.track.part, first.track.planned, first.track.started
        track.holds = first.track.holds
        sample.track = track
        self._forked.append((first.track.slot, first.track.seat, track.slot, track.seat))

    def take_forked(self) -> list[tuple[int, int, int, int]]:
        """Return slot and seat of the first sample and of the forked one, for each fork since the last call."""
        forked, self._forked = self._forked, []
        return forked

    def forget(self, request: Request) -> None:
        """Clear what a request holds after the pool was reset, without giving it back."""
        request.sources, request.spare_tracks = [], []
        for sample in request.samples:
            sample.track = None

    # Planning

    def settle(self, sample: Sample) -> None:
        """Pass the parts that need no computing."""
        track, parts = sample.track, sample.parts
        while track is not None and track.part < len(parts):
            is_last, end = track.part == len(parts) - 1, self._end(sample, track.part)
            if track.started:
                if is_last or track.planned < end:
                    return
            elif self._passes(sample, track.part):
                track.planned = end
                if is_last:
                    return
            else:
                return
            track.part, track.started = track.part + 1, False

    def advance(self, sample: Sample, room: int, turn: int, emit: Emit) -> int:
        """Plan up to `room` of a sample's next tokens. Return how many were planned.

        Args:
            sample: sample that runs.
            room: limit on the tokens.
            turn: number of the plan.
            emit: adds tokens to the plan.
        """
        taken, track = 0, sample.track
        while track is not None and taken < room:
            before = track.part, track.planned, track.started
            self.settle(sample)
            end, begins = self._end(sample, track.part), not track.started
            if track.planned >= end or (begins and not self._begin(sample, track)):
                return taken
            count = min(end - track.planned, room - taken)
            move = track.moves[-1] if track.moves else None
            if begins or move is None or move.turn != turn:
                first, at = sample.parts[track.part].start, track.planned
                move = Move(track, track.part, first, at, at, begins, track.source, before, turn)
            # A step reads the track for one part at most, or writes it for one.
            is_taken = begins and track.turn == turn and (count < end - track.planned or self._grows(sample, track.part))
            if is_taken or not emit(sample, move, count):
                if begins:
                    self._unbegin(track, before)
                return taken
            if move.end == move.start:
                track.moves.append(move)
                track.source = None
                track.turn = track.turn if begins else turn
            move.end += count
            track.planned, taken = move.end, taken + count
            move.is_part_end = move.end == end and not self._grows(sample, track.part)
            if track.keep_at and move.end - move.first >= track.keep_at:
                move.goal, move.keep_at, move.claimed = track.goal, track.keep_at, track.claimed
                track.goal, track.keep_at, track.claimed = None, 0, None
        return taken

    def _begin(self, sample: Sample, track: Track) -> bool:
        """Begin a part, from the last kept state in it. Return False if another sample computes what it begins from."""
        part, states, request = sample.parts[track.part], self.states, sample.request
        above = part.parents[-1]
        source = None if above is None or above.page < 0 else states.find(above)
        if above is not None and above.page >= 0 and not (source and source.ready):
            return False
        block, offset, keep_at = self._goal(sample, track.part)
        if block is not None and block.walker is not None:  # a repeated chunk waits for the first one
            return False
        at = 0
        for reached, kept in self._inside(part, self._end(sample, track.part) - part.start):
            if reached > at:
                at, source = reached, kept
        track.started, track.planned, track.source = True, part.start + at, source
        if source is not None:
            states.hold(source)
        if block is not None and keep_at > at:
            block.walker, track.claimed, track.keep_at = track, block, keep_at
            goal = states.find(block, offset)
            if goal is None and request.shares and (self._grows(sample, track.part) or self._keeps(sample, track.part)):
                goal = states.keep(block, offset)
            if goal is not None and not goal.ready:
                track.goal = states.hold(goal)
        return True

    def _inside(self, part: Part, size: int) -> Iterator[tuple[int, KeptState]]:
        """Yield the states from which a part can go on, each with the tokens of the part before it.

        Args:
            part: the part.
            size: number of tokens of the part.
        """
        for index, block in enumerate(part.blocks):
            for tokens, kept in (block.states or {}).items():
                reached = index * self._block_size + tokens
                if kept.ready and not reached % BLOCK and reached < size:
                    yield reached, kept

    def _unbegin(self, track: Track, before: tuple[int, int, bool]) -> None:
        """Undo `_begin`, after which nothing was planned."""
        self._drop_goal(track)
        self._drop_source(track)
        track.part, track.planned, track.started = before

    def _goal(self, sample: Sample, number: int) -> tuple[Block | None, int, int]:
        """Return the block of the trie that a part is computed for, the tokens of it before the kept state, and of the part.

        A part that grows keeps the state from which the same prompt, or a longer one, can go on. The block is None if nothing
        is kept and no sample waits.
        """
        part, request = sample.parts[number], sample.request
        if self._grows(sample, number):
            size = self._block_size  # a page of the prompt that is not full is in no trie
            tokens = (len(request.layout) - part.start - 1) // size * size // BLOCK * BLOCK
            block, offset = self._place(part, tokens) if tokens else (None, 0)
        else:
            tokens, block = self._end(sample, number) - part.start, part.blocks[-1]
            offset = block.size
        is_wanted = block is not None and block.key is not None
        return (block, offset, tokens) if is_wanted else (None, 0, 0)

    def _passes(self, sample: Sample, number: int) -> bool:
        """Return whether nothing of a part has to be computed: its K/V are there, and the state that others go on from."""
        request, part = sample.request, sample.parts[number]
        is_read = number == len(sample.parts) - 1 and not request.precompute
        if is_read or not part.complete:
            return False
        kept = self.states.find(part.blocks[-1])
        if self._is_source(sample, number):
            return kept is not None and kept.ready
        if not self._keeps_end(request, number):
            return True
        return kept.ready if kept is not None else not self.states.num_available

    def _is_source(self, sample: Sample, number: int) -> bool:
        """Return whether a part that is still to be computed goes on from the end of this part."""
        request = sample.request
        heirs = request.heirs.get(sample.parts[number].blocks[-1], ())
        return any(later > number and not (request.precompute and self._passes(sample, later)) for later in heirs)

    def _keeps(self, sample: Sample, number: int) -> bool:
        """Return whether the cache keeps the state at the end of a part of a prompt."""
        return self._is_source(sample, number) or self._keeps_end(sample.request, number)

    @staticmethod
    def _keeps_end(request: Request, number: int) -> bool:
        """Return whether a request asks for the state at the end of a part, whatever goes on from it."""
        message, kind = request.precompute, request.segments[number].chunk_id
        return message is not None and (message.keep_states or kind in (PREFIX_ID, QUESTION_ID))

    @staticmethod
    def _grows(sample: Sample, number: int) -> bool:
        return number == len(sample.parts) - 1 and sample.request.sampling is not None

    @staticmethod
    def _end(sample: Sample, number: int) -> int:
        """Return the token index after a part."""
        return sample.parts[number + 1].start if number + 1 < len(sample.parts) else sample.num_tokens

    def _place(self, part: Part, tokens: int) -> tuple[Block, int]:
        """Return the block with the last of the first `tokens` tokens of a part, and how many of them it holds."""
        index = (tokens - 1) // self._block_size
        return part.blocks[index], tokens - index * self._block_size

    # Lookups

    def count_cached(self, request: Request, number: int, part: Part) -> int:
        """Return the tokens of a part that a request would not compute.

        Args:
            request: precompute request that is only looked up.
            number: place of the part in its segments.
            part: the part with its cached blocks.
        """
        kind, start, end = request.segments[number]
        filled, is_last = sum(block.filled for block in part.blocks), number == len(request.segments) - 1
        is_source = not is_last and request.layout.question_len > 0 and kind >= 0
        if filled == end - start and (self.has_state(part, filled) or not (is_source or self._keeps_end(request, number))):
            return filled
        return max((reached for reached, _ in self._inside(part, end - start)), default=0)

    def has_state(self, part: Part, size: int) -> bool:
        """Return whether the cache holds the state at the end of a part.

        Args:
            part: the part, perhaps with some of its blocks alone.
            size: number of tokens of the whole part.
        """
        kept = self.states.find(part.blocks[-1]) if sum(block.size for block in part.blocks) == size else None
        return kept is not None and kept.ready

    # Planned moves

    def sent(self, sample: Sample, move: Move) -> None:
        """Note that a move is on the device."""
        if sample.track is move.track and not (move.begins and move.is_part_end):
            move.track.holds = move.part, (move.end - move.first) // BLOCK * BLOCK

    def undo(self, sample: Sample, move: Move) -> None:
        """Undo the latest move of the last plan."""
        track = move.track
        self._drop_source(move)
        if sample.track is not track:
            return
        assert track.moves.pop() is move
        if move.keep_at:
            track.goal, track.keep_at, track.claimed = move.goal, move.keep_at, move.claimed
        if move.begins:
            self._drop_goal(track)
        track.part, track.planned, track.started = move.before

    def commit(self, sample: Sample, move: Move, *, computed: bool) -> bool:
        """End a move whose step is done.

        Args:
            sample: sample of the move.
            move: its oldest move that is not committed.
            computed: whether the K/V of its tokens, and of all tokens before them, are computed.

        Returns:
            Whether the sample goes on. Otherwise it computes its parts anew, from the states that are kept.
        """
        track = move.track
        self._drop_source(move)
        if sample.track is not track:
            return True
        if not computed:
            self._stop(track)
            sample.track = Track(track.slot, track.seat)
            return False
        assert track.moves.popleft() is move
        if move.goal is not None:
            move.goal.ready = True
        self._drop_goal(move)
        return True

    def _stop(self, track: Track) -> None:
        """Let go what a track and its moves would have left in the cache, and what they begin from.

        A move on the device has read its source before any later step writes there.
        """
        self._drop_goal(track)
        for move in track.moves:
            self._drop_goal(move)
            self._drop_source(move)

    def _drop_source(self, owner: Track | Move) -> None:
        if owner.source is not None:
            self.states.let_go(owner.source)
        owner.source = None

    def _drop_goal(self, owner: Track | Move) -> None:
        if owner.goal is not None:
            self.states.let_go(owner.goal)
        if owner.claimed is not None:
            owner.claimed.walker = None
        owner.goal, owner.keep_at, owner.claimed = None, 0, None
