"""`Admission`: makes requests of messages, and places those that wait."""

from __future__ import annotations

import time
from pathlib import Path

from chunkattn.adapter_salt import split
from chunkattn.engine.adapters import LoadedAdapters, LostAdapterError
from chunkattn.engine.isolation import stuck
from chunkattn.engine.lifetimes import Lifetimes
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import Message, RequestFailed
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.readout import request_stats
from chunkattn.engine.request import Request
from chunkattn.engine.scheduler import Scheduler
from chunkattn.errors import RequestError


class Admission:
    """Way of a request from its message to its place in the cache.

    Args:
        limits: limits of the engine.
        scheduler: scheduler of the requests.
        lifetimes: requests that have not ended.
        metrics: metrics, which measure how long requests wait.
        adapters: adapters that requests may name; None for an engine without.
    """

    def __init__(
        self,
        limits: EngineLimits,
        scheduler: Scheduler,
        lifetimes: Lifetimes,
        metrics: EngineMetrics,
        adapters: LoadedAdapters | None,
    ) -> None:
        self._limits, self._scheduler, self._lifetimes = limits, scheduler, lifetimes
        self._metrics, self._adapters = metrics, adapters
        self._arrivals = 0

    def add(self, message: Message, *, checked: bool, arrived_at: float | None) -> None:
        """Queue a request; see `EngineCore.add`."""
        lifetimes = self._lifetimes
        if message.request_id in lifetimes.requests or message.request_id in lifetimes.pins:
            raise RequestError(f"request_id {message.request_id!r} is already in use", param="request_id")
        request = self.request(message, self._arrivals + 1, checked=checked)
        compiles = lifetimes.shapes.begin(request)
        self._arrivals += 1
        request.added_at = time.perf_counter() if arrived_at is None else arrived_at
        lifetimes.requests[request.request_id] = request
        if not compiles:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Queue a request, after its parts have been read from disk."""
        disk = self._lifetimes.disk
        if disk is None or not disk.read_ahead(request, self._scheduler.placement.look_up):
            self._scheduler.add(request)

    def request(self, message: Message, arrival: int = 0, *, checked: bool) -> Request:
        """Return the request of a message, with its adapter.

        Args:
            message: the message.
            arrival: number of the request among those of one priority.
            checked: whether the message has been checked.

        Raises:
            RequestError: as `EngineLimits.check`, or the adapter is not loaded.
        """
        if not checked:
            self._limits.check(message)
        if self._adapters is None and split(message.salt_key)[0] is not None:
            raise RequestError("this engine has no adapters; build it with lora_modules or enable_lora", param="model")
        adapter = None if self._adapters is None else self._adapters.digest(message.salt_key)
        return Request(message, self._limits, arrival=arrival, adapter=adapter)

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter that a request brings, unless its name is known; see `LoadedAdapters.load`."""
        if self._adapters is None:
            raise RequestError("this engine has no adapters; build it with enable_lora", param="lora_request")
        self._adapters.load(name, Path(folder), self._scheduler.holders())

    def take_compiled(self, timeout: float = 0.0) -> None:
        """Queue the requests whose grammars are compiled, and end those whose grammars are refused.

        Args:
            timeout: seconds to wait for one at most.
        """
        for request, error in self._lifetimes.shapes.take(timeout):
            if error is None:
                self._queue(request)
            else:
                self._lifetimes.refuse_shape(request, str(error))

    def take_read(self, timeout: float = 0.0) -> None:
        """Queue the requests whose parts have been read from disk.

        Args:
            timeout: seconds to wait for one at most.
        """
        for request in [] if (disk := self._lifetimes.disk) is None else disk.take_read(timeout):
            self._scheduler.add(request)

    def close_disk(self) -> None:
        """Write pending parts to the K/V store and close it. The requests that it reads for are queued."""
        if (disk := self._lifetimes.disk) is not None:
            self._lifetimes.disk = None
            for request in disk.close():
                self._scheduler.add(request)

    def place(self, placed: list[Request]) -> None:
        """Place the waiting requests that fit, and end those that can never be placed.

        Args:
            placed: list to which each request is added before its parts are fetched from disk.
        """
        self._admit(placed)
        while request := self._scheduler.stuck:
            self._lifetimes.fail(request, stuck(request, lacks_states=self._scheduler.placement.lacks_states))
            self._admit(placed)

    def _admit(self, placed: list[Request]) -> None:
        while request := self._next():
            placed.append(request)
            if request.admitted_at is None:
                request.admitted_at = time.perf_counter()
                self._metrics.queue_time.observe(request.admitted_at - request.added_at)
            if self._lifetimes.disk is not None:
                self._lifetimes.disk.load(request)

    def _next(self) -> Request | None:
        """Place the next waiting request and return it; None if it has to wait. A request that has lost its adapter fails."""
        while True:
            try:
                return self._scheduler.admit()
            except LostAdapterError as error:
                name, stats = error.request.request_id, request_stats(error.request)
                self._lifetimes.fail(error.request, RequestFailed(name, str(error), "lora_request", stats=stats))
