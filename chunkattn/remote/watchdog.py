"""The clock that distinguishes a long compilation from a hang."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax.monitoring

from chunkattn.remote.messages import Heartbeat

_COMPILE_EVENTS = "/jax/core/compile/"


class StepClock:
    """The time that the creating thread has spent in its current step. Any thread may read it.

    JAX announces the beginning (a scalar) and the end (a duration) of every tracing, lowering and compilation. Between the two
    the thread is compiling. Each end restarts the clock, so that a step that hangs after compiling is still detected.
    """

    def __init__(self) -> None:
        self._thread, self._open = threading.get_ident(), 0
        self._work: str | None = None
        self._excused_at = 0.0
        self._state: tuple[float, str | None] | None = None  # replaced as a whole, because readers take no lock
        jax.monitoring.register_scalar_listener(self._begun)
        jax.monitoring.register_event_duration_secs_listener(self._ended)

    def begin(self, work: str | None = None) -> None:
        """Start the clock for a step, or for `work` that may take long."""
        self._work, self._open = work, 0
        self._state = time.monotonic(), work

    def idle(self) -> None:
        """Stop the clock while there is no work."""
        self._state = None

    def excuse(self) -> None:
        """Count a running step from now on. Work that may take long keeps its own limit. Any thread may call this."""
        self._excused_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Return whether the thread does what may take long, such as compiling."""
        return (state := self._state) is not None and state[1] is not None

    def read(self) -> Heartbeat:
        """Return the current heartbeat."""
        if (state := self._state) is None:
            return Heartbeat(0.0, None)
        began, work = state
        return Heartbeat(time.monotonic() - (max(began, self._excused_at) if work is None else began), work)

    def _begun(self, event: str, value: float | int, **_: Any) -> None:
        if event.startswith(_COMPILE_EVENTS) and threading.get_ident() == self._thread and self._state is not None:
            self._open += 1
            self._state = time.monotonic(), self._work or "compiling"

    def _ended(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(_COMPILE_EVENTS) and threading.get_ident() == self._thread and self._state is not None:
            self._open = max(self._open - 1, 0)
            self._state = time.monotonic(), self._work or ("compiling" if self._open else None)
