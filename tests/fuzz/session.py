"""One engine with the calls on it: sends asks, takes outputs, and checks each answer, count and step as it comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from chunkattn.engine.decode_program import STEPS
from chunkattn.engine.messages import (
    EngineOutput,
    GenerateRequest,
    PrecomputeRequest,
    PrecomputeResult,
    RequestFailed,
    ScoreResult,
    TokenOutput,
)
from chunkattn.engine.runs import Run, RunResult
from chunkattn.errors import CapacityError, RequestError
from tests.fuzz.alone import Alone
from tests.fuzz.calls import Ask, Call, Precompute, cacheable, continued, describe, has_no_state, is_private
from tests.fuzz.focus import Choose
from tests.fuzz.ledger import Ledger, exceeds
from tests.fuzz.rig import PAGES, TEXTS, Rig
from tests.fuzz.witness import Difference, Witness, check

MOST_STEPS = 2000
"""Limit on the steps in which everything in flight must end."""
_NUMBERS = count()


class Session:
    """An engine from its start to its end.

    Args:
        rig: builds the engine.
        cold: judges every answer.
        ledger: of everything computed so far that may be in `store`.
        positions: name in `POSITIONS`.
        store: folder of the K/V store; None for none.
        alone: judges the bits of every answer; None where they are not promised.
        tracks: see `Rig.start`.
        threshold: see `Rig.start`.
        steps: see `Rig.start`.

    Attributes:
        core: the engine.
        stalled: what is read from disk does not arrive.
        damaged: ids of requests with a row that is found not finite.
        answered: calls whose answers `cold` has found right, until the caller takes them.
        counts: of answers and events, by name.
    """

    def __init__(
        self,
        rig: Rig,
        cold: Witness,
        ledger: Ledger,
        positions: str,
        store: Path | None = None,
        alone: Alone | None = None,
        tracks: tuple[int, int] | None = None,
        threshold: int | None = None,
        steps: int = 16,
    ) -> None:
        self.core, self.frontend = rig.start(positions, store, tracks, threshold, steps), rig.frontends[positions]
        self._checks = 0
        self.positions, self.stalled = positions, False
        self.answered: list[Call] = []
        self.damaged: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._cold, self._alone, self._ledger = cold, alone, ledger
        self.core.runs.read = self._counted(self.core.runs.read)  # type: ignore[method-assign]
        self._number = next(_NUMBERS)
        self._calls: dict[str, Call] = {}  # by id of a request that has not ended
        if self.core.disk is not None:
            take_read = self.core.disk.take_read
            self.core.disk.take_read = lambda timeout=0.0: [] if self.stalled else take_read(timeout)

    def _counted(self, read: Callable[[Run], RunResult]) -> Callable[[Run], RunResult]:
        """Count the runs of decodes that are read, those of the most decodes, and those of several rows."""

        def reading(run: Run) -> RunResult:
            result = read(run)
            self.counts["runs"] += 1
            self.counts["decodes in runs"] += result.number
            self.counts["runs of 16 decodes"] += result.number == STEPS
            self.counts["runs of several rows"] += len(run.rows) > 1
            return result

        return reading

    @property
    def in_flight(self) -> list[Call]:
        """Calls that have not ended."""
        return [*dict.fromkeys(self._calls.values())]

    def send(self, ask: Ask) -> None:
        """Send an ask, unless it can never fit the pool, or has no state in the model."""
        stateless = self.core.limits.recurrent and not isinstance(ask, Choose) and has_no_state(ask)
        try:
            call = Call(ask, self.frontend)
        except CapacityError:
            self.counts["refused"] += 1
            return
        except RequestError as error:
            if not stateless or "recurrent layers" not in str(error):
                raise
            self.counts["refused by name"] += 1
            return
        if stateless:
            raise Difference("it has no state, and is not refused", ask)
        self._advance(call)

    def _advance(self, call: Call) -> None:
        """Send the next stage of a call, or judge its answer."""
        for request in call.next_stage():
            if (layout := cacheable(request)) is not None:
                self._ledger.note(self._owner(request.request_id), call.ask.salt, layout)
            self._calls[request.request_id] = call
            if isinstance(request, PrecomputeRequest) and isinstance(call.ask, Precompute) and call.ask.keep_states:
                request = replace(request, keep_states=True)
            if isinstance(request, GenerateRequest) and (shape := request.sampling.structured_outputs) is not None:
                self.core.shapes.know(TEXTS).compile(shape)  # at once, so that the seed decides what waits for what
                self.counts["shapes"] += 1
            self.core.add(request)
        if call.done and not isinstance(call.ask, Precompute):
            self.counts["answers"] += 1
            check(call, self._cold)
            if self._alone is not None:
                self._alone.check(call)
            self.answered.append(call)

    def leave(self, call: Call) -> None:
        """Abort a call."""
        for request_id in call.open:
            self.core.abort(request_id)
            self._calls.pop(request_id, None)

    def stop(self, call: Call) -> None:
        """End the texts of a call, as stop strings do."""
        for request_id in call.open:
            for sample in range(len(call.samples)):
                self.core.stop(request_id, sample)
        self.leave(call)

    def step(self) -> None:
        """Run a step and take its outputs."""
        self.counts["steps"] += 1
        for event in self.core.step():
            if call := self._calls.get(event.request_id):  # else the last outputs of a call that was left
                self._take(call, event)

    def _take(self, call: Call, event: EngineOutput) -> None:
        if isinstance(event, RequestFailed):
            expected = "injected" in event.reason or ("pinned" in event.reason and self.core.pins)
            if not (expected if event.finite else event.request_id in self.damaged):
                raise Difference(f"it fails: {event.reason}", call.ask)
            self.counts["failed"] += 1
            self.leave(call)
            return
        call.take(event)
        if isinstance(event, (TokenOutput, PrecomputeResult)) and event.cached is not None:
            self._check_cached(call, event)
        if isinstance(event, ScoreResult):
            self._check_computed(call, event)
        if isinstance(event, TokenOutput):
            self._note_generated(call, event)
        if event.request_id not in call.open:
            del self._calls[event.request_id]
            self._advance(call)

    def _check_cached(self, call: Call, event: TokenOutput | PrecomputeResult) -> None:
        """No more may come from the cache than others have had computed under the same salt."""
        found = event.cached
        assert found is not None
        request = call.requests[event.request_id]
        layout, ledger = request.layout, self._ledger
        if is_private(request):
            ledger = Ledger()  # a private request finds what its own other parts hold, and nothing else
            ledger.note(self._owner(event.request_id), call.ask.salt, layout)
        most = ledger.bound(self._owner(event.request_id), call.ask.salt, layout)
        if exceeds(found, most):
            raise Difference(f"{found} come from the cache, and at most {most} have been computed", call.ask)
        call.warm |= found.total > 0
        self.counts["cached tokens"] += found.total

    def _check_computed(self, call: Call, event: ScoreResult) -> None:
        """No more of a scoring request may come from the cache than others have had computed under the same salt."""
        request = call.requests[event.request_id]
        found, layout = len(request.layout) - event.computed, cacheable(request)
        most = 0 if layout is None else self._ledger.bound(self._owner(event.request_id), call.ask.salt, layout).total
        if not 0 <= found <= most:
            raise Difference(f"{found} tokens come from the cache, and at most {most} have been computed", call.ask)
        call.warm |= found > 0
        self.counts["cached tokens"] += found

    def _note_generated(self, call: Call, event: TokenOutput) -> None:
        request = call.requests[event.request_id]
        assert isinstance(request, GenerateRequest)
        if not request.prompt_only and not is_private(request):
            layout = continued(request.layout, call.samples[event.sample].tokens)
            self._ledger.note(self._owner(event.request_id), call.ask.salt, layout)

    def _owner(self, request_id: str) -> str:
        """Return a name that no request of another session has; ids begin anew with every session."""
        return f"{self._number}:{request_id}"

    def look_up(self, ask: Precompute, *, forget: bool) -> None:
        """Look up what a precompute call would compute, or forget it."""
        try:
            stages = ask.job(self.frontend).stages()
        except CapacityError:
            return
        for request in chain.from_iterable(stages):
            assert isinstance(request, PrecomputeRequest)
            found = self.core.look_up(request, forget=forget)
            most = self._ledger.bound("", ask.salt, request.layout)
            if exceeds(found, most):
                raise Difference(f"look_up finds {found}, and at most {most} have been computed", ask)

    def reset(self) -> None:
        """Reset the cache, as `LLM.reset_prefix_cache` does."""
        self.frontend.scores.forget_cached()
        empty, running = self.core.reset_prefix_cache(), len(self.core.scheduler.running)
        if empty and (states := self.core.scheduler.states) is not None and states.num_free != states.num_slots:
            raise Difference("reset_prefix_cache leaves states")
        if empty != (not running):
            raise Difference(f"reset_prefix_cache returns {empty} while {running} requests run")

    def check(self) -> None:
        """Check that pages, references and fills are accounted for.

        The threads of the K/V store catch up first, so that the seed decides what the store holds and when it is read.
        """
        if self.core.disk is not None:
            self.core.disk.writer.flush(60.0)
            reader = self.core.disk.reader
            with reader._changed:
                reader._changed.wait_for(lambda: len(reader._arrived) == len(reader._owners), 60.0)
        scheduler, self._checks = self.core.scheduler, self._checks + 1
        if self._checks % 4 == 0:
            self.core.ahead.drop()  # as if something unforeseen had happened
        try:
            scheduler.check()
        except AssertionError as error:
            raise Difference(f"invariant: {error}") from error
        in_flight = self.core.completion.pending is not None or self.core.ahead._planned is not None
        if not in_flight and any(block.planned != block.filled for block in scheduler.trie.blocks()):
            raise Difference("invariant: a block was planned and is not filled")
        tracks = [s.track for r in scheduler.running for s in r.samples if s.track is not None]
        owned = {(o.claimed, t) for t in tracks for o in (t, *t.moves) if o.claimed is not None}
        claims = {(block, block.walker) for block in scheduler.trie.blocks() if block.walker is not None}
        if not claims <= owned or any(block.walker is not track for block, track in owned):
            raise Difference("invariant: a claim belongs to no sample that runs")

    def drain(self) -> None:
        """Run everything to its end; then every page must be free or cached."""
        self.stalled = False
        self.core.unpin(self.core.pins)
        for _ in range(MOST_STEPS):
            if not self.core.has_work:
                break
            self.step()
            self.core.unpin(self.core.pins)
            self.check()
        else:
            raise Difference(f"after {MOST_STEPS} steps there still is work")
        if self.core.scheduler.trie.num_available != PAGES:
            raise Difference("invariant: pages are held though nothing runs")
        states = self.core.scheduler.states
        if states is not None and (states.num_free_seats, states.num_available) != (states.num_seats, states.num_slots):
            raise Difference("invariant: seats or slots are held though nothing runs")

    @property
    def restored(self) -> int:
        """Parts read from the K/V store."""
        return self.core.disk.counts["hit"] if self.core.disk else 0

    def close(self) -> None:
        """Close the K/V store, and count what the engine did."""
        self.counts["restored parts"] += self.restored
        self.counts["preemptions"] += self.core.scheduler.preemptions
        self.counts["evictions"] += self.core.scheduler.trie.evictions
        if (states := self.core.scheduler.states) is not None:
            self.counts["evicted states"] += states.evictions
        self.core.close_disk()


def smallest(
    rig: Rig, cold: Witness, asked: list[tuple[str, Ask]], failing: Ask, positions: str, alone: Alone | None = None
) -> list[Ask] | None:
    """Find the failing ask alone, or behind one other, that differs on a new engine.

    Args:
        rig: builds the engines.
        cold: judges.
        asked: everything that was asked, in order, with the positions of its engine.
        failing: whose answer was wrong.
        positions: of the engine that gave it.
        alone: judges the bits.

    Returns:
        One or two asks; None when neither differs, as where it takes requests in flight together or a restart.
    """
    others = [ask for name, ask in asked if name == positions and ask != failing]
    for before in [[], *([ask] for ask in reversed(others[-150:]))]:
        session = Session(rig, cold, Ledger(), positions, alone=alone)
        try:
            for ask in [*before, failing]:
                session.send(ask)
                session.drain()
        except Exception:  # the engine may raise instead
            return [*before, failing]
        finally:
            session.close()
    return None


def report(difference: Difference, asks: list[Ask] | None, positions: str) -> str:
    """Say what differs, and the asks that show it on a new engine."""
    lines = [str(difference)]
    if difference.ask is not None:
        lines += [f"asked: {describe(difference.ask)}", f"positions: {positions}"]
    if asks:
        lines += ["a new engine shows it after:", *(f"  {describe(ask)}" for ask in asks)]
    elif difference.ask is not None:
        lines.append("neither this alone nor behind one other does a new engine show it")
    return "\n".join(lines)
