"""`WarmUp`: compiles the programs that requests may need before they need them."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax

from chunkattn.engine.decode_program import DecodeArrays
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.runner import Runner
from chunkattn.engine.runs import Runs
from chunkattn.engine.step import StepArrays, StepBuilder
from chunkattn.engine.step_sizes import SMALLEST_STEP, bucket_for

logger = logging.getLogger(__name__)

_MOST_THREADS = 8
_WORTH_A_LINE_S = 1.0
"""Seconds from which a part has a line in the log."""


class NotCompiledError(RuntimeError):
    """A thread cannot compile a program; nothing has run, and the pool is as it was."""


class Part(NamedTuple):
    """Part of a warm-up.

    Attributes:
        kind: kind of program, as the metrics name it.
        name: what is compiled or timed, for the log.
        run: runs the program on zeros, which compiles it.
        compile: compiles the program without running it, in any thread, and returns the seconds; None for programs that compile
            fast.
    """

    kind: str
    name: str
    run: Callable[[], Any]
    compile: Callable[[], float] | None = None


class WarmUp:
    """Warm-up of the step variants, the readouts and the copying of pages; the backends that requests name are left out.

    The programs run in the order of their likelihood: a small decode step with greedy sampling, the largest step, other
    readouts of few rows, the other steps of short prompts, readouts of many rows, copies, and steps of longer prompts.

    On an accelerator, threads compile the steps, several at once, while the engine computes. On a CPU they would take the
    engine's processors. Hosts that share a model compile a program when they first run it together.

    Args:
        runner: runner whose programs are compiled.
        builder: builder of the step variants.
        runs: planner of runs of decodes, which have programs of their own.
        meter: meter that is given one timed step of every token bucket.
        with_store: whether to compile the programs that copy pages to and from a KV store.
        longest: tokens of the longest prompt whose programs are compiled; None for all.
        threads: number of threads that compile; None chooses by the platform.

    Attributes:
        total: number of parts: programs to compile, and steps to time.
        done: number of parts done so far.
        seconds: seconds that the parts took so far, by kind.
        first: number of parts that a server does before it is ready: the programs of a greedy answer to a short prompt.
    """

    def __init__(
        self,
        runner: Runner,
        builder: StepBuilder,
        runs: Runs,
        meter: RateMeter,
        *,
        with_store: bool,
        longest: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._runner, self._builder, self._runs = runner, builder, runs
        self._meter, self._with_store = meter, with_store
        self._widths = builder.width_buckets
        if longest is not None:
            pages = min(-(-longest // builder.block_size), self._widths[-1])
            self._widths = self._widths[: self._widths.index(bucket_for(pages, self._widths)) + 1]
        if threads is None:
            compiles_apart = jax.default_backend() != "cpu" and runner.tell is None
            threads = min(os.cpu_count() or 1, _MOST_THREADS) if compiles_apart else 0
        self._threads = ThreadPoolExecutor(threads, "warm-up") if threads else None
        self._parts = deque(self._plan())
        self._compiled_ahead: deque[Future[float] | None] = deque()
        self.total = len(self._parts)
        self.seconds: dict[str, float] = {}
        self.done, self._compiled = 0, -1

    @property
    def is_warm(self) -> bool:
        """Return whether every program has been compiled."""
        return self._compiled >= 0

    @property
    def late_compiles(self) -> int:
        """Return the number of programs compiled after the warm-up ended."""
        return self._runner.compiles.total() - self._compiled if self.is_warm else 0

    @property
    def is_waiting(self) -> bool:
        """Return whether a thread still compiles the next part. The first call starts the threads."""
        self._compile_ahead()
        return bool(self._compiled_ahead) and (ahead := self._compiled_ahead[0]) is not None and not ahead.done()

    def run(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Do every part that is left.

        Args:
            progress: called with the number of parts done and the total number.

        Returns:
            Duration in seconds.
        """
        began, progress = time.perf_counter(), progress or (lambda done, total: None)
        progress(self.done, self.total)
        while self._parts:
            self.advance()
            progress(self.done, self.total)
        return time.perf_counter() - began

    def advance(self) -> bool:
        """Compile one program or time one step, between two steps. Return whether parts are left.

        An exception ends the warm-up. The programs that are left are compiled when requests need them.

        Raises:
            NotCompiledError: a thread cannot compile the program.
        """
        if not self._parts:
            return False
        part, spent = self._parts[0], 0.0
        self._compile_ahead()
        try:
            if self._compiled_ahead and (ahead := self._compiled_ahead.popleft()) is not None:
                spent = self._result(ahead, part)
            began = time.perf_counter()
            jax.block_until_ready((part.run(), self._runner.caches))  # type: ignore[no-untyped-call]
        except BaseException:
            self._parts.clear()
            self._end_threads()
            raise
        self._parts.popleft()
        self.done += 1
        spent += time.perf_counter() - began
        self.seconds[part.kind] = self.seconds.get(part.kind, 0.0) + spent
        level = logging.INFO if spent >= _WORTH_A_LINE_S else logging.DEBUG
        logger.log(level, "warm-up %d/%d: %s in %.1f s", self.done, self.total, part.name, spent)
        if not self._parts:
            self._end_threads()
            self._compiled = self._runner.compiles.total()
            logger.info("warm-up: every program compiled or loaded, in %.1f s of work", sum(self.seconds.values()))
        return bool(self._parts)

    def _compile_ahead(self) -> None:
        """Let the threads compile all parts that are left, in order, unless they do already."""
        if self._threads is not None and not self._compiled_ahead and self._parts:
            self._compiled_ahead.extend(self._threads.submit(p.compile) if p.compile else None for p in self._parts)

    @staticmethod
    def _result(ahead: Future[float], part: Part) -> float:
        """Return the seconds that a thread took for a part, when it is done."""
        try:
            return ahead.result()
        except Exception as error:
            raise NotCompiledError(f"{part.name} cannot be compiled: {error}") from error

    def _end_threads(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self._compiled_ahead.clear()

    def _plan(self) -> list[Part]:
        """Return the parts, the likeliest first. Timing is a part of its own, so that a request waits less."""
        width, *wider = self._widths
        sizes = self._builder.token_buckets
        short = next(size for size in sizes if size >= SMALLEST_STEP)
        decodes, others = [size for size in sizes if size < short], [size for size in sizes if size > short]
        timed = {rows: Part("timing", f"timed step of {rows} rows", partial(self._time, rows, width)) for rows in sizes}
        steps = {rows: [self._first_step(rows, width), timed[rows]] for rows in sizes}
        likeliest, *readouts = self._readouts(self._runner.picked_sizes[0])
        runs = [self._decodes(rows, width) for rows in self._runs.sizes]
        parts: list[Part] = [*(steps[rows][0] for rows in (*decodes, short)), likeliest, *runs[:1]]
        self.first = len(parts)
        parts += [timed[rows] for rows in (*decodes, short)] + [part for rows in others[-1:] for part in steps[rows]]
        parts += [*runs[1:], *readouts]
        parts += [part for rows in others[:-1] for part in steps[rows]]
        parts += [part for size in self._runner.picked_sizes[1:] for part in self._readouts(size)]
        pools = [pool for pool in (self._runner.pool, self._runner.states) if pool is not None]
        parts += [Part("copy", "copies of pages", copy) for pool in pools for copy in pool.copies()]
        parts += [self._step(rows, width) for width in wider for rows in sizes]
        parts += [self._decodes(rows, width) for width in self._builder.run_widths[1:] for rows in self._runs.sizes]
        transfers = [transfer for pool in pools for transfer in pool.transfers()] if self._with_store else []
        return parts + [Part("pages", "copies of pages to and from the store", transfer) for transfer in transfers]

    def _readouts(self, size: int) -> list[Part]:
        numbers = range(self._runner.num_readouts(size))
        return [Part("readout", f"readout {n} of {size} rows", partial(self._runner.warm_readout, size, n)) for n in numbers]

    def _step(self, rows: int, width: int) -> Part:
        """Return a step of padding rows."""
        run, ahead = partial(self._run, rows, width), partial(self._compile, rows, width)
        return Part("step", f"step of {rows} rows, {width} pages", run, ahead)

    def _decodes(self, rows: int, width: int) -> Part:
        """Return a run of padding rows."""
        run, ahead = partial(self._run_decodes, rows, width), partial(self._compile_decodes, rows, width)
        return Part("decode", f"run of decodes of {rows} rows, {width} pages", run, ahead)

    def _first_step(self, rows: int, width: int) -> Part:
        """Return a step and the programs that pick its rows, which do not depend on the width."""
        part = self._step(rows, width)
        return part._replace(name=f"{part.name}, and the picks of its rows", run=lambda: self._runner.warm_picks(part.run()))

    def _run(self, rows: int, width: int) -> jax.Array:
        """Run a step of padding rows, and return its hidden states."""
        return self._runner.forward(self._builder.empty(rows, width))[0]

    def _run_decodes(self, rows: int, width: int) -> None:
        """Run a run of padding rows."""
        decoded = self._runner.decode(self._runs.empty(rows, width), continues=False)
        self._runner.read_decodes(decoded, with_logprobs=False)

    def _compile(self, rows: int, width: int) -> float:
        """Compile a step, and return the seconds."""
        return self._compile_for(self._builder.empty(rows, width))

    def _compile_decodes(self, rows: int, width: int) -> float:
        """Compile a run of decodes, and return the seconds."""
        return self._compile_for(self._runs.empty(rows, width))

    def _compile_for(self, arrays: StepArrays | DecodeArrays) -> float:
        began = time.perf_counter()
        self._runner.lower(arrays, self._runner.pool.num_pages).compile()
        return time.perf_counter() - began

    def _time(self, rows: int, width: int) -> None:
        """Time a compiled step for the rate meter."""
        self._meter.forget()
        self._meter.add(time.perf_counter(), rows, 0)
        self._run(rows, width).block_until_ready()
        self._meter.finish()
