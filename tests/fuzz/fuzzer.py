"""Random operations on one engine after the other."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import jax
import lmdb
import numpy as np

from chunkattn import Focus, SamplingParams
from chunkattn.cache.disk.store import KVStore
from chunkattn.calls.decide_questions import METHODS
from chunkattn.engine.runs import Run, RunResult
from chunkattn.engine.step import Span, Step, StepArrays
from chunkattn.focus import MODES
from tests.fuzz.alone import Alone
from tests.fuzz.calls import RERANK_LABELS, Ask, Call, Generate, Precompute, Score
from tests.fuzz.decisions import Decide
from tests.fuzz.focus import Choose, can_be_text
from tests.fuzz.ledger import Ledger
from tests.fuzz.patterns import draw
from tests.fuzz.prompts import Alphabet, Prompt
from tests.fuzz.rig import POSITIONS, TRACKS, WORDS, Rig
from tests.fuzz.session import Session, report, smallest
from tests.fuzz.witness import Difference, Witness, check

SALTS = (None, "salt", "pepper")
MOST_CALLS = 7
"""Calls in flight at once."""
SECOND_OPINION = 0.01
"""Share of answers that transformers judges too."""
_LABELS = (1, 1, 2, 2, 3, 6, 12, 300)
"""Numbers of labels."""
RUNS = (16, 4, 3, 16, 2, 1)
"""Values of `num_scheduler_steps`, of one engine after the other."""
EPISODE = 3000
"""Most operations with one alphabet, ledger and K/V store."""

T = TypeVar("T")


class Fuzzer:
    """One episode: engines one after the other on one K/V store, with one alphabet and one ledger.

    Args:
        rig: builds the engines.
        cold: judges every answer.
        oracle: judges some answers too: `SECOND_OPINION` of all, and of every engine the first decision behind cached documents
            and the first chunk prompt that has found something in the cache after a scoring call, and the first that has after
            parts of an earlier engine were read.
        seed: decides everything.
        alone: judges the bits of every answer; None where they are not promised.

    Attributes:
        counts: of operations, answers and events, by name.
    """

    def __init__(self, rig: Rig, cold: Witness, oracle: Witness | None, seed: int, alone: Alone | None = None) -> None:
        self._rig, self._cold, self._oracle, self._alone = rig, cold, oracle, alone
        self.rng, self._seed, self._engines = np.random.default_rng(seed), seed, count()
        self.alphabet, self._ledger = Alphabet(self.rng, rig.block), Ledger()
        self.counts: Counter[str] = Counter()
        self._asked: list[tuple[str, Ask]] = []
        self._store = Path(tempfile.mkdtemp(prefix="fuzz-cache-"))
        self._start()

    def _start(self) -> None:
        positions, store = str(self.rng.choice([*POSITIONS])), self._store if self.rng.random() < 0.8 else None
        tracks: tuple[int, int] | None = None
        threshold: int | None = None
        if self._rig.recurrent:
            tracks, threshold = self._some(TRACKS), self._some((None, None, 10, 50, 64))
        steps = RUNS[(self._seed + next(self._engines)) % len(RUNS)]
        self.session = Session(self._rig, self._cold, self._ledger, positions, store, self._alone, tracks, threshold, steps)
        # After the first two no chunk prompt has had a second opinion yet, and after the third no decision.
        self._open = {"scoring", "a restart", "cached documents"}
        self._scored = False

    def _end(self) -> None:
        self.session.close()
        self.counts += self.session.counts

    def run(self, operations: int, expired: Callable[[], bool] = lambda: False) -> None:
        """Do so many operations, or fewer once `expired`, and finish what is in flight.

        Raises:
            Difference: an answer or an invariant is wrong; the message holds what reproduces it.
        """
        try:
            while self.counts["operations"] < operations and not expired():
                self.operate()
            self.session.drain()
            self._hear_others()
        except Difference as difference:
            asks, positions = None, self.session.positions
            if difference.ask is not None:
                asks = smallest(self._rig, self._cold, self._asked, difference.ask, positions, self._alone)
            raise Difference(report(difference, asks, positions)) from difference
        finally:
            self._end()
            shutil.rmtree(self._store)

    def operate(self) -> None:
        """Do one operation.

        Raises:
            Difference: an answer or an invariant is wrong.
        """
        weights = _OPERATIONS if self.session.in_flight else _IDLE
        if self._rig.recurrent:
            weights = weights | {
                name: weight for name, weight in _OF_STATES.items() if self.session.in_flight or name != "damage"
            }
        shares = np.array([*weights.values()])
        name = str(self.rng.choice([*weights], p=shares / shares.sum()))
        self.counts["operations"] += 1
        self.counts[name] += 1
        getattr(self, f"_{name}")()
        self.session.check()
        self._hear_others()

    def _hear_others(self) -> None:
        """Have transformers judge some of the answers, and let later prompts be made of them."""
        for call in self.session.answered:
            self.counts["decisions"] += isinstance(call.ask, Decide)
            self.counts["choices"] += isinstance(call.ask, Choose)
            after = self._open & self._happened(call)
            if self._oracle is not None and (after or self.rng.random() < SECOND_OPINION):
                self.counts["second opinions"] += 1
                self.counts.update(f"second opinions after {event}" for event in after)
                self._open -= after
                check(call, self._oracle)
            if isinstance(call.ask, Generate):
                self.alphabet.remember([*call.ask.prompt.parts, tuple(self._some(call.samples).tokens)])
        self.session.answered.clear()

    def _happened(self, call: Call) -> set[str]:
        """The events of `_open` that an answer which found something in the cache came after."""
        ask = call.ask
        if isinstance(ask, Decide):
            return {"cached documents"} if call.warm and ask.documents else set()
        if not (isinstance(ask, Generate) and ask.prompt.chunks and call.warm):
            return set()
        restored = self.counts["restart"] and self.session.restored
        return {name for name, yes in (("scoring", self._scored), ("a restart", restored)) if yes}

    def _some(self, values: Sequence[T]) -> T:
        return values[int(self.rng.integers(len(values)))]

    # Operations

    def _call(self) -> None:
        if len(self.session.in_flight) == MOST_CALLS:
            self.session.step()
            return
        ask = self._ask()
        self._asked.append((self.session.positions, ask))
        self._scored |= isinstance(ask, Score) and ask.algorithm == "prefill_extend"
        self.counts["items first"] += isinstance(ask, Score) and ask.item_first
        self.session.send(ask)
        if self._rig.recurrent and self.rng.random() < 0.3:  # two need the same states at once
            self.session.send(ask)

    def _ask(self) -> Ask:
        rng, kind = self.rng, self.rng.random()
        salt, priority = self._salt(), int(rng.choice([0, 0, 0, 1, -1]))
        if kind < 0.57:
            prompt, form = self._with_state(self.alphabet.prompt())
            sampling = self._sampling([1, 1, 3, 8, 20, 48] if self._rig.recurrent else self._rig.lengths)
            if prompt.chunks and POSITIONS[self.session.positions][0] == "shared" and rng.random() < 0.4:
                return self._choose(prompt, sampling, salt, priority)
            return Generate(prompt, form or self._some(prompt.forms), sampling, salt, priority)
        if kind < 0.77:
            return self._score(salt, priority)
        if kind < 0.86:
            method, calibrate = self._some(METHODS), bool(rng.random() < 0.3)
            joins = self._rig.recurrent and bool(rng.random() < 0.9)
            own = {"method": method, "calibrate": calibrate, "joined": joins}
            return Decide(*self.alphabet.decision(), **own, salt=salt, priority=priority)
        keeps = self._rig.recurrent and bool(rng.random() < 0.6)
        pin = bool(rng.random() < 0.25)
        return Precompute(*self.alphabet.documents(), pin=pin, salt=salt, priority=priority, keep_states=keeps)

    def _sampling(self, lengths: Sequence[int]) -> SamplingParams:
        """Return random parameters of a text.

        Args:
            lengths: values of `max_tokens`.
        """
        rng, most = self.rng, int(self.rng.choice(lengths))
        shape = draw(rng, most) if rng.random() < 0.15 else None
        return SamplingParams(
            n=int(rng.choice([1, 1, 1, 2, 3])),  # of recurrent layers, more than the seats are refused
            seed=int(rng.integers(1 << 40)),
            temperature=float(rng.choice([0.0, 0.0, 1.0])),
            max_tokens=most,
            ignore_eos=True,
            logprobs=int(rng.choice([0, 3])),
            prompt_logprobs=0 if rng.random() < 0.12 else None,
            skip_reading_prefix_cache=bool(rng.random() < 0.05),
            structured_outputs=shape,
        )

    def _with_state(self, prompt: Prompt) -> tuple[Prompt, str | None]:
        """Return a prompt, and its form if it has one of its own. Recurrent layers mostly get one that has a state."""
        prefix, chunks, question = prompt
        if not self._rig.recurrent or (how := self.rng.random()) < 0.02:
            return prompt, None
        if how < 0.3:
            return Prompt((), (), sum(prompt.parts, ())), None
        if sum(map(bool, chunks)) < 2:
            return prompt, None
        return (prompt, "joined") if how < 0.6 else (Prompt(prefix, (sum(chunks, ()),), question), None)

    def _choose(self, prompt: Prompt, sampling: SamplingParams, salt: str | None, priority: int) -> Choose:
        rng = self.rng
        by_text = can_be_text(prompt.parts) and rng.random() < 0.5
        score = "relevance" if by_text and rng.random() < 0.5 else "likelihood"
        if len(prompt.question) < 2:
            prompt = prompt._replace(question=prompt.question * 2)
        focus = Focus(int(rng.choice([1, 1, 2, 3])), self._some(MODES), score)
        if self._rig.recurrent:
            focus = Focus(1, "only", score)  # a question behind several has no state
        return Choose(prompt, "text" if by_text else "ids", sampling, salt, priority, focus)

    def _score(self, salt: str | None, priority: int) -> Score:
        rng = self.rng
        query, items = self.alphabet.query()
        algorithm = self._some(("prefill_extend", "prefill_extend", "packed_segment", "packed_dense", "serial"))
        rerank = rng.random() < 0.2 and max(map(max, filter(None, [query, *items]))) < WORDS
        each = not rerank and rng.random() < 0.4  # every item has labels of its own
        lists = [tuple(rng.integers(0, WORDS, self._some(_LABELS)).tolist()) for _ in (items if each else [0])]
        labels = RERANK_LABELS if rerank else tuple(lists) if each else lists[0]
        item_first = algorithm == "packed_dense" if rerank else rng.random() < 0.1
        if item_first:
            algorithm = {"packed_dense": "auto", "packed_segment": "serial"}.get(algorithm, algorithm)
        return Score(query, items, labels, algorithm, item_first, rerank, salt, priority)

    def _salt(self) -> str | None:
        return SALTS[int(self.rng.choice(len(SALTS), p=[0.7, 0.2, 0.1]))]

    def _write(self) -> None:
        """Have a long text written alone or beside one or two: in runs of as many decodes as the engine allows."""
        self.session.drain()
        self._hear_others()
        for _ in range(self._some((1, 1, 2, 3))):
            prompt, form = self._with_state(self.alphabet.prompt())
            sampling = self._sampling(self._rig.long)
            ask = Generate(prompt, form or self._some(prompt.forms), sampling, self._salt(), 0)
            self._asked.append((self.session.positions, ask))
            self.session.send(ask)
        for _ in range(self._some((2, 4, 6))):
            self.session.step()

    def _step(self) -> None:
        self.session.stalled &= self.rng.random() < 0.8
        self.session.step()

    def _abort(self) -> None:
        self.session.leave(self._some(self.session.in_flight))

    def _preempt(self) -> None:
        if running := self.session.core.scheduler.running:
            self.session.core.scheduler.preempt(self._some(running))

    def _evict(self) -> None:
        self.session.core.scheduler.trie.evict_all()

    def _unpin(self) -> None:
        if pins := self.session.core.pins:
            self.session.core.unpin([self._some(pins)])

    def _look_up(self) -> None:
        ask = Precompute(*self.alphabet.documents(), salt=self._salt())
        self.session.look_up(ask, forget=bool(self.rng.random() < 0.6))

    def _fail(self) -> None:
        """Have a step raise once its work is done, or be interrupted."""
        runner, stage = self.session.core.runner, self._some(("forward", "sample", "copy_pages", "decode", "read_decodes"))
        owner = runner.pool if stage == "copy_pages" else runner
        error = RuntimeError("injected") if self.rng.random() < 0.7 else KeyboardInterrupt("injected")
        original = getattr(owner, stage)

        def failing(*args: object, **options: object) -> None:
            original(*args, **options)
            raise error

        setattr(owner, stage, failing)
        try:
            self.session.step()
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        finally:
            delattr(owner, stage)

    def _damage(self) -> None:
        """Have a step compute one row from a wrong token, and find that row not finite."""
        core, damaged = self.session.core, list[int]()
        build, forward, read = core.builder.build, core.runner.forward, core.runs.read

        def build_wrongly(spans: list[Span]) -> Step:
            step = build(spans)
            row, token_ids = int(self.rng.integers(step.num_rows)), step.arrays.token_ids
            if any(_is_cached(span, row - rows.start) for span, rows in step.rows() if rows.start <= row < rows.stop):
                return step  # a token that was finite is so again
            token_ids[row] = (token_ids[row] + 1) % WORDS
            self.session.damaged |= {s.sample.request.request_id for s, rows in step.rows() if rows.start <= row < rows.stop}
            damaged.append(row)
            return step

        def forward_and_find(arrays: StepArrays) -> tuple[jax.Array, jax.Array]:
            hidden, finite = forward(arrays)
            return hidden, finite.at[np.asarray(damaged, int)].set(False)

        def read_and_find(run: Run) -> RunResult:
            result = read(run)
            rows = [row for row, tokens in enumerate(result.tokens) if tokens and run.rows[row].is_current]
            if not rows:
                return result
            row = self._some(rows)
            good = int(self.rng.integers(len(result.tokens[row])))
            tokens = [found[: good + (place != row)] for place, found in enumerate(result.tokens)]
            self.session.damaged.add(run.rows[row].sample.request.request_id)
            damaged.append(row)
            return replace(result, number=good + 1, tokens=tokens, finite=np.arange(len(tokens)) != row)

        core.ahead.drop()  # the step is built wrongly and run at once
        with (
            patch.object(core.builder, "build", build_wrongly),
            patch.object(core.runner, "forward", forward_and_find),
            patch.object(core.runs, "read", read_and_find),
            patch.object(core.ahead, "plan", lambda *_: None),
        ):
            self.session.step()
        self.counts["damaged"] += len(damaged)

    def _poison(self) -> None:
        """Have every step raise that computes requests of one call."""
        builder, victim = self.session.core.builder, self._some(self.session.in_flight)
        original = type(builder).build

        def build(spans: list[Span]) -> Step:
            if any(span.sample.request.request_id in victim.open for span in spans):
                raise RuntimeError("injected")
            return original(builder, spans)

        builder.build = build

    def _stall(self) -> None:
        """Have the disk stall for a few steps."""
        self.session.stalled = True

    def _reset(self) -> None:
        self.session.reset()

    def _stop(self) -> None:
        """End the texts of a call, as stop strings do."""
        if writing := [c for c in self.session.in_flight if isinstance(c.ask, Generate) and not isinstance(c.ask, Choose)]:
            self.session.stop(self._some(writing))

    def _spoil(self) -> None:
        """Damage some of the states in the K/V store."""
        if self.session.core.disk is None:
            return
        store = self.session.core.disk.store
        chosen = [entry.key for entry in store.entries() if entry.kind == "state" and self.rng.random() < 0.5]
        spoil(store, chosen)
        self.counts["spoilt states"] += len(chosen)

    def _restart(self) -> None:
        """Finish or abort what runs, close the engine and start another, perhaps with other positions."""
        if self.rng.random() < 0.5:
            for call in self.session.in_flight:
                self.session.leave(call)
        self.session.drain()
        self._hear_others()
        self._end()
        self._start()


def _is_cached(span: Span, number: int) -> bool:
    """Return whether the K/V of a token of a span is computed again, for a state of recurrent layers."""
    if span.move is None:
        return False
    part = span.sample.parts[span.move.part]
    block, offset = divmod(span.start + number - part.start, span.sample.request.plan.block_size)
    return part.blocks[block].filled > offset


def spoil(store: KVStore, keys: Iterable[bytes]) -> None:
    """Damage the first array of entries of a K/V store, unless the store is full."""
    for key in keys:
        first = key + struct.pack(">I", 0)
        with suppress(lmdb.MapFullError), store._env.begin(write=True) as txn:
            raw = bytearray(txn.get(first, db=store._env.data))
            raw[len(raw) // 2] ^= 4
            txn.put(first, bytes(raw), db=store._env.data)


_OPERATIONS: dict[str, float] = {
    "call": 30,
    "step": 55,
    "write": 3,
    "abort": 2,
    "preempt": 3,
    "evict": 1,
    "unpin": 2,
    "look_up": 3,
    "fail": 1.5,
    "poison": 0.3,
    "damage": 1.5,
    "stall": 2,
    "reset": 0.5,
    "restart": 0.5,
}
_OF_STATES = {"stop": 2.0, "spoil": 0.5}
"""Further operations of models with recurrent layers."""
_IDLE = {
    name: weight for name, weight in _OPERATIONS.items() if name not in ("step", "abort", "preempt", "fail", "poison", "damage")
}
