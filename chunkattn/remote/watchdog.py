"""The clock that distinguishes a long compilation from a hang."""

from __future__ import annotations

import threading
import time

from chunkattn.engine.compile_clock import on_compilations
from chunkattn.remote.messages import Heartbeat


class StepClock:
    """The time that the creating thread has spent in its current step. Any thread may read it.

    Each end of a compilation restarts the clock, so that a step that hangs after compiling is still detected.
    """

    def __init__(self) -> None:
        self._thread, self._open = threading.get_ident(), 0
        self._work: str | None = None
        self._excused_at = 0.0
        self._state: tuple[float, str | None] | None = None  # replaced as a whole, because readers take no lock
        on_compilations(lambda: self._compile(1), lambda: self._compile(-1))

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

    def _compile(self, change: int) -> None:
        """Count a compilation that begins (1) or ends (-1) in any thread."""
        if threading.get_ident() == self._thread and self._state is not None:
            self._open = max(self._open + change, 0)
            self._state = time.monotonic(), self._work or ("compiling" if self._open else None)
