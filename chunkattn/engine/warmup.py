"""`WarmUp`: compiles the programs that requests may need before they need them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import chain

from chunkattn.engine.batch import BatchBuilder
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.runner import Runner

logger = logging.getLogger(__name__)


class WarmUp:
    """Warm-up of the step variants, the readouts and the copying of pages; the backends that requests name are left out.

    Args:
        runner: runner whose programs are compiled.
        batches: builder of the step variants.
        meter: meter that is given one timed step of every token bucket.
        with_store: whether to compile the programs that copy pages to and from a KV store.
    """

    def __init__(self, runner: Runner, batches: BatchBuilder, meter: RateMeter, *, with_store: bool) -> None:
        self._runner, self._batches, self._meter, self._with_store = runner, batches, meter, with_store
        self._running: Iterator[int] | None = None
        self._compiled: int | None = None

    @property
    def late_compiles(self) -> int:
        """Return the number of programs compiled after the warm-up ended."""
        return 0 if self._compiled is None else self._runner.compiles.total() - self._compiled

    def run(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every program.

        Args:
            progress: called with the number of step variants compiled and the total number.

        Returns:
            Duration of the warm-up in seconds.
        """
        began, total, reported = time.perf_counter(), len(self._batches.variants), -1
        logger.info("warm-up: %d step variants, compiled at the first start and loaded later", total)
        if progress:
            progress(0, total)
        for done in self._programs():
            if progress and reported < done < total:
                progress(reported := done, total)
        if progress:
            progress(total, total)
        seconds = time.perf_counter() - began
        logger.info("warm-up: %d step variants in %.1f s", total, seconds)
        return seconds

    def advance(self) -> bool:
        """Compile one program, between two steps. Return whether programs are left."""
        if self._running is None:
            self._running = self._programs()
        return next(self._running, None) is not None

    def stop(self) -> None:
        """Stop the warm-up."""
        self._running = iter(())

    def _programs(self) -> Iterator[int]:
        """Compile one program per iteration, and yield the number of step variants compiled."""
        sizes = self._batches.variants
        for done, (rows, width) in enumerate(sizes, 1):
            self._meter.forget()
            hidden = self._runner.forward(self._batches.empty(rows, width))
            if width == sizes[0][1]:
                self._runner.warm_picks(hidden)
                hidden.block_until_ready()
                self._meter.add(time.perf_counter(), rows, 0)
                hidden = self._runner.forward(self._batches.empty(rows, width))
            hidden.block_until_ready()
            self._meter.finish()
            yield done
        for _ in chain(self._runner.warm_readouts(), self._runner.pool.warm_up(with_store=self._with_store)):
            yield len(sizes)
        self._compiled = self._runner.compiles.total()
