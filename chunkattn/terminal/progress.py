"""Progress of long commands and benchmarks on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps(ExitStack):
    """Progress of a command on stderr: a bar on a terminal, elsewhere a line at every tenth.

    Args:
        name: plural name of the counted items, such as `answers`.
        total: number of items.
    """

    def __init__(self, name: str, total: int) -> None:
        super().__init__()
        self._name, self._total, self._done, self._began = name, total, 0, time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            bar.add_task(name, total=total)
            self._bar = self.enter_context(bar)

    def advance(self, count: int) -> None:
        """Count further items as done."""
        before, self._done = self._done, self._done + count
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif (tenth := 10 * self._done // self._total) > 10 * before // self._total:
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            say(f"{self._done} of {self._total} {self._name}, {10 * tenth}%, about {left / 60:.1f} minutes left")


class Rounds(ExitStack):
    """Progress of a benchmark on stderr: the round under way on a terminal, elsewhere a line with the seconds of each round.

    A call returns the context manager of one round.
    """

    def __init__(self) -> None:
        super().__init__()
        status = Console(stderr=True).status("measuring", spinner="dots")
        self._status = self.enter_context(status) if sys.stderr.isatty() else None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one round.

        Args:
            name: case and round, such as `decode 1, round 2 of 3`.
        """
        if self._status:
            self._status.update(name)
            yield
        else:
            with timed(name):
                yield


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print the seconds of a block on stderr when it has ended; an exception prints nothing.

    Args:
        name: case and round, such as `decode 1, round 2 of 3`.
    """
    began = time.perf_counter()
    yield
    say(f"{name}: {time.perf_counter() - began:.1f} s")


def say(text: str) -> None:
    """Print a line on stderr at once."""
    print(text, file=sys.stderr, flush=True)
