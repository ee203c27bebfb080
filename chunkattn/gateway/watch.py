"""`Watch`: asks every replica for its state, and tells the policy what has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from chunkattn.gateway.options import GatewayOptions
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.replicas import ReplicaGoneError, Replicas, Report

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WAITING_S = 0.2
"""Period of the reports in seconds while requests wait for a replica."""
DOCUMENT_SHARE = 0.9
"""Share of a cache that holds documents; questions, answers and the unused ends of pages take the rest."""
DEFAULT_BYTES_PER_TOKEN = 4.0
_GONE_S = 60.0
"""Seconds after which a replica that is down has no say in the default method of decisions. A restart takes less."""


@dataclass
class ReplicaState:
    """State of a replica as last told.

    Attributes:
        report: last report; None before the first.
        reported: time of the last report, in seconds of the monotonic clock.
        heard: that time, or a later one at which its silence was acted on.
        lost: whether a connection, or two reports, failed since.
        down: whether the replica refused or broke the connection of a report since, or has hung.
        failures: reports that failed since the last one.
    """

    report: Report | None = None
    reported: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    lost: bool = False
    down: bool = False
    failures: int = 0

    @property
    def is_ready(self) -> bool:
        """Return whether the replica takes requests."""
        return self.report is not None and self.report.ready and not self.lost

    @property
    def is_gone(self) -> bool:
        """Return whether the replica has been down for so long that it may not come back."""
        return self.down and time.monotonic() - self.reported > _GONE_S

    @property
    def decide_method(self) -> str | None:
        """Return the replica's default method of decisions, as last told; None if unknown."""
        return None if self.report is None else self.report.decide_method

    @property
    def is_responsive(self) -> bool:
        """Return whether the engine of the replica answers, as last told."""
        return self.report is not None and self.report.responsive


class Watch:
    """Watcher of all replicas.

    Args:
        replicas: connection to the replicas.
        policy: policy that records what they hold.
        options: options of the gateway.
        drop: function that ends the running requests of a replica that hangs.

    Attributes:
        states: state of each replica by name.
        bytes_per_token: bytes of text per token of KV cache.
        on_change: functions that are called with the names of replicas that came, went, restarted or are silent for
            `hang_timeout_s`.
    """

    def __init__(
        self, replicas: Replicas, policy: Policy, options: GatewayOptions, drop: Callable[[str], None] = lambda name: None
    ) -> None:
        self._replicas, self._policy, self._options, self._drop = replicas, policy, options, drop
        self.states: dict[str, ReplicaState] = {}
        self.bytes_per_token = DEFAULT_BYTES_PER_TOKEN
        self.on_change: list[Callable[[Collection[str]], None]] = []
        self._changed: list[str] = []
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._looked = 0.0
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to watch."""
        self._update()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop to watch."""
        tasks = [t for t in (self._task, *self._asking.values()) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def adapters(self) -> set[str]:
        """Return the names of all adapters of the replicas, as last told."""
        return {name for state in self.states.values() if state.report is not None for name in state.report.adapters}

    @property
    def decide_method(self) -> str | None:
        """Return the default method of decisions of most replicas, as last told; None if none tells it.

        Those that have been down for long do not count. Of methods of equally many, the first by name does, so that gateways
        which have heard the same agree.
        """
        told = Counter(state.decide_method for state in self.states.values() if not state.is_gone)
        return min(filter(None, told), key=lambda method: (-told[method], method), default=None)

    def deciding_otherwise(self) -> set[str]:
        """Return the names of the replicas whose default method of decisions is known and not `decide_method`."""
        method = self.decide_method
        return {name for name, state in self.states.items() if state.decide_method not in (None, method)}

    def ready(self) -> list[str]:
        """Return the names of the replicas that take requests and whose engines answer."""
        return [name for name, state in self.states.items() if state.is_ready and state.is_responsive]

    def candidates(self, may: Callable[[str], bool] = lambda name: True, others: Collection[str] = ()) -> list[str]:
        """Return the names of the replicas to send to: those that take requests, or else those that may be alive.

        Of these the ones whose engines answer, if there are any: an engine may be in one long step. A replica may report late
        because it has much to do, and one failed connection tells little.

        Args:
            may: whether a replica may be named.
            others: names of replicas that do not count, whatever their state.
        """
        states = {name: state for name, state in self.states.items() if name not in others}
        taking = [n for n, s in states.items() if s.is_ready]
        taking = taking or [n for n, s in states.items() if not s.down and s.report is not None and s.report.ready]
        names = list(filter(may, taking))
        return [name for name in names if states[name].is_responsive] or names

    async def until(self, find: Callable[[], T], timeout_s: float) -> T:
        """Return the first true result of a function that reads the states, or its last one.

        Args:
            find: the function, called again after each change of a state.
            timeout_s: time limit in seconds.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (result := find()):
                    if time.monotonic() - self._looked > _WAITING_S:
                        self._look()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_WAITING_S):
                            await self._news.wait()
                return result
        return find()

    def note_lost(self, name: str) -> None:
        """Note that a connection to a replica has failed: it gets no requests until it reports again."""
        if (state := self.states.get(name)) is not None and not state.lost:
            state.lost = True
            logger.warning("replica %s is lost or refuses requests; it gets no requests until it reports again", name)
            self._ask(name)

    async def _run(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self._options.report_period_s)

    def _look(self) -> None:
        """Take the replicas that exist now, and ask each for its state."""
        self._looked = time.monotonic()
        self._update()
        for name in self.states:
            self._ask(name)

    def _announce(self) -> None:
        """Wake what waits in `until`."""
        self._news.set()
        self._news = asyncio.Event()

    def _update(self) -> None:
        """Take the replicas that exist now."""
        names = list(dict.fromkeys(self._replicas.names()))
        for name in self.states.keys() - set(names):
            del self.states[name]
            logger.info("replica %s has left", name)
            if (task := self._asking.pop(name, None)) is not None:
                task.cancel()
            self._changed.append(name)
        for name in names:
            self.states.setdefault(name, ReplicaState())
        self._policy.set_replicas(names)
        if self._changed:
            self._tell(self._changed)
            self._changed = []

    def _tell(self, names: Collection[str]) -> None:
        for call in self.on_change:
            call(names)

    def _ask(self, name: str) -> None:
        asked = self._asking.get(name)
        if asked is None or asked.done():  # done: its callback below is still to run
            task = self._asking[name] = asyncio.create_task(self._hear(name))
            task.add_done_callback(lambda done: self._asking.pop(name, None) if self._asking.get(name) is done else None)

    async def _hear(self, name: str) -> None:
        """Ask a replica for its state and take the answer."""
        try:
            async with asyncio.timeout(self._options.report_timeout_s):
                report = await self._replicas.report(name)
        except (ReplicaGoneError, TimeoutError) as error:
            self._note_failure(name, error)
            return
        except Exception:
            logger.exception("the report of replica %s cannot be read", name)
            self._note_failure(name, ReplicaGoneError("its report cannot be read"))
            return
        if (state := self.states.get(name)) is None:
            return
        before, was_ready, was_responsive = state.report, state.is_ready, state.is_responsive
        former_method = state.decide_method
        state.reported = state.heard = time.monotonic()
        state.report, state.lost, state.down, state.failures = report, False, False, 0
        restarted = before is not None and before.generation != report.generation
        if restarted:
            logger.warning("replica %s has restarted; its cache is empty", name)
            self._policy.clear(name)
        if report.capacity is not None:
            self._policy.set_capacity(name, DOCUMENT_SHARE * report.capacity * self.bytes_per_token)
        self._policy.note(name, report.held.items(), time.monotonic())
        if state.is_ready != was_ready:
            logger.info("replica %s is %s", name, "ready" if state.is_ready else "not ready")
        if state.is_ready and was_ready and state.is_responsive != was_responsive:
            logger.info("the engine of replica %s %s", name, "answers again" if state.is_responsive else "does not answer")
        if state.decide_method != former_method and (others := self.deciding_otherwise()):
            logger.warning(
                "most replicas decide by %s, and %s by another method: they get no decisions by the default; set decide_method",
                *(self.decide_method, ", ".join(sorted(others))),
            )
        if restarted or (state.is_ready and not was_ready):
            self._tell([name])
        self._announce()

    def _note_failure(self, name: str, error: BaseException) -> None:
        if (state := self.states.get(name)) is None:
            return
        state.failures += 1
        state.down |= isinstance(error, ReplicaGoneError)
        if state.is_ready and (state.failures > 1 or state.down):
            logger.warning("replica %s does not report: %s", name, error or "it took too long")
            state.lost = True
        if time.monotonic() - state.heard > self._options.hang_timeout_s:
            state.heard, state.down = time.monotonic(), True
            self._drop(name)
            self._tell([name])  # its pinned documents are wanted elsewhere
