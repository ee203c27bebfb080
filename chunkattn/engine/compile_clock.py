"""`COMPILING`: the time in which the engine's thread compiled programs, and its requests waited."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax.monitoring

COMPILE_EVENTS = "/jax/core/compile/"
"""Beginning of the names of JAX's events about tracing, lowering and compiling, or loading a compiled program."""
_MOST_INTERVALS = 4096
_GAP_S = 0.001
"""Seconds between two intervals up to which they count as one: the tracing and the compilation of one program."""


def on_compilations(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call functions at the beginning and the end of every tracing, lowering and compilation, in its thread.

    JAX announces a beginning as a scalar and an end as a duration. It has no way to take a listener back.

    Args:
        begin: called at a beginning.
        end: called at an end. An exception that ends a compilation is not announced.
    """

    def listener(act: Callable[[], None]) -> Callable[..., None]:
        return lambda event, *_, **__: act() if event.startswith(COMPILE_EVENTS) else None

    jax.monitoring.register_scalar_listener(listener(begin))
    jax.monitoring.register_event_duration_secs_listener(listener(end))


class CompileClock:
    """Clock of the compilations of each thread. Times are in seconds on the clock of `time.perf_counter`."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Count a block of the present thread as compilation."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def settle(self) -> None:
        """Drop a compilation that has begun in the present thread: an exception has ended it, of which JAX announces no end."""
        self._local.depth = 0

    @property
    def count(self) -> int:
        """Return a number that grows with every compilation that this thread has ended."""
        return getattr(self._local, "count", 0)

    def seconds(self, since: float) -> float:
        """Return the seconds in which the present thread compiled.

        Args:
            since: time from which compilations count.
        """
        spent = 0.0
        for began, ended in reversed(getattr(self._local, "intervals", ())):
            if ended <= since:
                break
            spent += ended - max(began, since)
        return spent

    def enter(self) -> None:
        """Begin a compilation, perhaps within another."""
        local = self._local
        if not getattr(local, "depth", 0):
            local.began, local.depth = time.perf_counter(), 0
        local.depth += 1

    def leave(self) -> None:
        """End the latest compilation."""
        local = self._local
        if not getattr(local, "depth", 0):
            return
        local.depth -= 1
        if local.depth:
            return
        if not hasattr(local, "intervals"):
            local.intervals, local.count = deque[tuple[float, float]](maxlen=_MOST_INTERVALS), 0
        began = local.began
        if local.intervals and began - local.intervals[-1][1] <= _GAP_S:
            began = local.intervals.pop()[0]
        local.intervals.append((began, time.perf_counter()))
        local.count += 1


COMPILING = CompileClock()
"""Clock of this process."""
on_compilations(COMPILING.enter, COMPILING.leave)
