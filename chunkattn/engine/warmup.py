"""`WarmUp`: compiles the programs that requests may need before they need them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import jax

from chunkattn.engine.rates import RateMeter
from chunkattn.engine.runner import Program, Runner
from chunkattn.engine.scheduler import SMALLEST_STEP
from chunkattn.engine.step import StepBuilder

logger = logging.getLogger(__name__)


class WarmUp:
    """Warm-up of the step variants, the readouts and the copying of pages; the backends that requests name are left out.

    The programs run in the order of their likelihood: a small decode step with greedy sampling, the largest step, other
    readouts of few rows, the other steps of short prompts, readouts of many rows, copies, and steps of longer prompts.

    Args:
        runner: runner whose programs are compiled.
        builder: builder of the step variants.
        meter: meter that is given one timed step of every token bucket.
        with_store: whether to compile the programs that copy pages to and from a KV store.

    Attributes:
        total: number of parts: programs to compile, and steps to time.
        done: number of parts done so far.
        first: number of parts that a server does before it is ready: the programs of a greedy answer to a short prompt.
    """

    def __init__(self, runner: Runner, builder: StepBuilder, meter: RateMeter, *, with_store: bool) -> None:
        self._runner, self._builder, self._meter, self._with_store = runner, builder, meter, with_store
        self._parts = deque(self._plan())
        self.total = len(self._parts)
        self.done, self._seconds, self._compiled = 0, 0.0, -1

    @property
    def is_warm(self) -> bool:
        """Return whether every program has been compiled."""
        return self._compiled >= 0

    @property
    def late_compiles(self) -> int:
        """Return the number of programs compiled after the warm-up ended."""
        return self._runner.compiles.total() - self._compiled if self.is_warm else 0

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
        """
        if not self._parts:
            return False
        began = time.perf_counter()
        try:
            jax.block_until_ready((self._parts[0](), self._runner.pool.caches))  # type: ignore[no-untyped-call]
        except BaseException:
            self._parts.clear()
            raise
        self._parts.popleft()
        self.done += 1
        self._seconds += time.perf_counter() - began
        if not self._parts:
            self._compiled = self._runner.compiles.total()
            logger.info("warm-up: every program compiled or loaded, in %.1f s", self._seconds)
        return bool(self._parts)

    def _plan(self) -> list[Program]:
        """Return the parts, the likeliest first. Timing is a part of its own, so that a request waits less."""
        width, *wider = self._builder.width_buckets
        sizes = self._builder.token_buckets
        short = next(size for size in sizes if size >= SMALLEST_STEP)
        decodes, others = [size for size in sizes if size < short], [size for size in sizes if size > short]
        steps = {rows: [partial(self._first_step, rows, width), partial(self._timed_step, rows, width)] for rows in sizes}
        greedy, *readouts = self._readouts(self._runner.row_sizes[0])
        parts: list[Program] = [*(steps[rows][0] for rows in (*decodes, short)), greedy]
        self.first = len(parts)
        parts += [steps[rows][1] for rows in (*decodes, short)] + [part for rows in others[-1:] for part in steps[rows]]
        parts += readouts
        parts += [part for rows in others[:-1] for part in steps[rows]]
        parts += [part for size in self._runner.row_sizes[1:] for part in self._readouts(size)]
        parts += self._runner.pool.copies()
        parts += [partial(self._step, rows, width) for width in wider for rows in self._builder.token_buckets]
        return parts + (self._runner.pool.transfers() if self._with_store else [])

    def _readouts(self, size: int) -> list[Program]:
        return [partial(self._runner.warm_readout, size, number) for number in range(self._runner.num_readouts(size))]

    def _step(self, rows: int, width: int) -> jax.Array:
        """Run a step of padding rows, and return its hidden states."""
        return self._runner.forward(self._builder.empty(rows, width))[0]

    def _first_step(self, rows: int, width: int) -> None:
        """Compile a step and the programs that pick its rows, which do not depend on the width."""
        self._runner.warm_picks(self._step(rows, width))

    def _timed_step(self, rows: int, width: int) -> None:
        """Time a compiled step for the rate meter."""
        self._meter.forget()
        self._meter.add(time.perf_counter(), rows, 0)
        self._step(rows, width).block_until_ready()
        self._meter.finish()
