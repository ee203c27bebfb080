"""`FairThreads`: threads for CPU work of many clients. Clients take turns, and the work of a client that left ends early."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from chunkattn.fair_shares import OWNER, FairShares

P = ParamSpec("P")
T = TypeVar("T")


class AbandonedError(Exception):
    """The caller of this work has left."""


class _Work(Generic[T]):
    """One call of a function.

    Attributes:
        owner: client whose turn the call takes.
        call: the call.
        context: context variables of the caller.
        future: the caller's future.
        abandoned: whether the caller has left.
    """

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.owner, self.call, self.context = OWNER.get(), call, copy_context()
        self.loop, self.future = loop, loop.create_future()
        self.abandoned = False


_LOCAL = threading.local()
"""Slot for the `_Work` that the present thread runs."""


def check_wanted() -> None:
    """Raise `AbandonedError` if the caller of the present work has left. Long work calls it between its parts."""
    if (work := getattr(_LOCAL, "work", None)) is not None and work.abandoned:
        raise AbandonedError


class FairThreads:
    """Daemon threads for one event loop.

    The owners of waiting work take turns, and one owner occupies at most half of the threads. An owner with much work
    therefore delays only itself. Daemon threads do not keep a process alive at its end.

    Args:
        threads: number of threads; None takes two more than there are CPUs, and at least four.

    Attributes:
        threads: number of threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or max(4, (os.cpu_count() or 1) + 2)
        self._turns = FairShares(max(1, self.threads // 2), self.threads)
        self._started = 0
        self._handed: SimpleQueue[_Work[Any] | None] = SimpleQueue()

    @property
    def busy(self) -> int:
        """Return the number of threads that work, for callers that have left too."""
        return self._turns.total

    async def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a function in a thread, in its owner's turn. Cancelling the caller ends the work at its next `check_wanted`.

        Args:
            function: function to run, with the caller's context variables.
            *args: positional arguments of the function.
            **options: keyword arguments of the function.

        Raises:
            Exception: any error of the function.
        """
        work = _Work(lambda: function(*args, **options), asyncio.get_running_loop())
        await self._turns.take(work.owner)
        if self._started < min(self.threads, self.busy):
            self._started += 1
            threading.Thread(target=self._work, name=f"chunkattn-{self._started}", daemon=True).start()
        self._handed.put(work)
        try:
            return await work.future
        finally:
            work.abandoned = True
            del work  # an error's traceback holds this frame, and the future holds the error

    def close(self) -> None:
        """End the idle threads. Work that runs ends at its next `check_wanted`."""
        for _ in range(self._started):
            self._handed.put(None)
        self._started = 0

    def _work(self) -> None:
        while (work := self._handed.get()) is not None:
            _LOCAL.work, result, error = work, None, None
            try:
                if not work.abandoned:
                    result = work.context.run(work.call)
            except BaseException as raised:  # the caller gets it
                error = raised
            loop = work.loop
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._finish, work, result, error)
            _LOCAL.work = None
            del work, result, error  # an idle thread keeps nothing alive

    def _finish(self, work: _Work[Any], result: Any, error: BaseException | None) -> None:
        self._turns.give(work.owner)
        if not work.future.done():
            if error is None:
                work.future.set_result(result)
            elif isinstance(error, StopIteration):  # a future refuses it
                work.future.set_exception(RuntimeError("the function raised StopIteration"))
            else:
                work.future.set_exception(error)
