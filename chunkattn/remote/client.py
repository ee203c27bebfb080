"""`EngineClient`, which exchanges messages with the engine's process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from chunkattn.config import EngineConfig
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import (
    CachedTokens,
    Message,
    PrecomputeRequest,
    PrecomputeResult,
    PromptLogprobsOutput,
    RequestFailed,
    ScoreResult,
    TokenOutput,
)
from chunkattn.engine.vocabulary import Vocabulary
from chunkattn.errors import EngineDeadError, QueueFullError, RequestError
from chunkattn.fair_threads import FairThreads
from chunkattn.remote import messages as wire
from chunkattn.remote.inflight import InflightRequests
from chunkattn.remote.shape_checker import ShapeChecker
from chunkattn.remote.supervisor import Supervisor
from chunkattn.request_record import RECORD
from chunkattn.structured_outputs import StructuredOutputsParams


class EngineClient(Supervisor):
    """The client of one engine in a process of its own, with the calls that wait for it. See `Supervisor`.

    Attributes:
        threads: threads for the CPU work of calls.
    """

    def __init__(self, config: EngineConfig, on_ready: Callable[[EngineLimits], None]) -> None:
        super().__init__(config, on_ready)
        self.threads = FairThreads()
        self._checks, self._checker, self._knows_vocabulary = FairThreads(1), ShapeChecker(), False
        self._calls: set[InflightRequests] = set()
        self._owners: dict[str, InflightRequests] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._query_ids = count()
        self._adapters: dict[str, str] = {}  # folders of the adapters that calls have brought to this engine, by name
        self._snapshot, self._snapshot_at = "", 0.0
        self._reading: asyncio.Task[None] | None = None

    async def close(self, grace_s: float = 10.0) -> None:
        """End the engine and the threads; see `Supervisor.close`."""
        self.threads.close()
        self._checks.close()
        self._checker.close()
        await super().close(grace_s)

    def call(self, timeout: float | None = None) -> InflightRequests:
        """Return a new set of in-flight requests. The set takes one of `max_queued_requests` places until its context exits.

        Args:
            timeout: seconds until the requests fail with `DeadlineExceededError`; None sets no limit.

        Raises:
            EngineDeadError: the engine is not ready.
            QueueFullError: all places are taken.
        """
        self._check_ready()
        if len(self._calls) >= self.config.max_queued_requests:
            raise QueueFullError(
                f"{len(self._calls)} requests are on their way, max_queued_requests is {self.config.max_queued_requests}; "
                "try again later"
            )
        record = RECORD.get()
        made = InflightRequests(self, timeout, None if record is None else record.new_call())
        self._calls.add(made)
        return made

    def hold(self, call: InflightRequests) -> None:
        """Count a call toward `max_queued_requests` again, because it sends more requests."""
        self._calls.add(call)

    def release(self, call: InflightRequests) -> None:
        """Stop counting a call toward `max_queued_requests`."""
        self._calls.discard(call)

    def send_requests(self, call: InflightRequests, requests: Sequence[Message]) -> None:
        """Send requests and deliver their outputs to a call.

        Args:
            call: receiver of the outputs.
            requests: the requests to run.

        Raises:
            EngineDeadError: the engine is not ready.
            RequestError: a value cannot be sent.
        """
        self._check_ready()
        self._send([wire.Sent(time.perf_counter()), *requests])
        self._owners |= {r.request_id: call for r in requests}

    def forget(self, request_id: str) -> None:
        """Stop delivering outputs of a request."""
        self._owners.pop(request_id, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Stop delivering outputs of requests and abort the requests in the engine."""
        aborts = [wire.Abort(r) for r in request_ids]
        for message in aborts:
            self.forget(message.request_id)
        self.tell(aborts)

    def stop(self, request_id: str, sample: int) -> None:
        """End sample number `sample` of a request."""
        self.tell([wire.Stop(request_id, sample)])

    def unpin(self, request_ids: Iterable[str]) -> None:
        """Let the cache evict the blocks that these precompute requests pinned. A restarted engine holds no pins."""
        if names := tuple(request_ids):
            self.tell([wire.Unpin(names)])

    def tell(self, messages: Sequence[wire.ToWorker]) -> None:
        """Send messages that need no answer, if the engine is ready."""
        if self.is_ready and messages:
            self._send(messages)

    async def metrics(self) -> str:
        """Return the engine's metrics in Prometheus' text format.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
        """
        return await self._query(wire.MetricsQuery)

    async def recent_metrics(self, wait_s: float) -> tuple[str, float]:
        """Return the engine's metrics and their age in seconds: those of now, or the last ones if the engine is busy.

        Args:
            wait_s: seconds to wait for the metrics of now.

        Raises:
            EngineDeadError: the engine is not ready.
        """
        self._check_ready()
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_metrics())
        if (await asyncio.wait({self._reading}, timeout=wait_s))[0]:
            self._check_ready()
        return self._snapshot, time.perf_counter() - self._snapshot_at

    async def _read_metrics(self) -> None:
        try:
            self._keep(await self.metrics())
        except EngineDeadError:
            pass  # the next reader asks the next engine
        finally:
            if self._reading is asyncio.current_task():
                self._reading = None

    def _keep(self, metrics: str) -> None:
        self._snapshot, self._snapshot_at = metrics, time.perf_counter()

    async def look_up(self, requests: Sequence[PrecomputeRequest], *, forget: bool) -> Sequence[CachedTokens]:
        """Return the tokens of each request that are cached in memory; see `EngineCore.look_up`.

        Args:
            requests: the requests to look up.
            forget: see `EngineCore.look_up`.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
            RequestError: a value cannot be sent.
        """
        return await self._query(lambda number: wire.CacheQuery(number, tuple(requests), forget))

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter that a request brings, unless this engine knows it; see `EngineCore.load_adapter`.

        Args:
            name: name of the adapter.
            folder: local folder of the adapter.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
            RequestError: the adapter cannot be loaded.
        """
        if (known := self._adapters).get(name) == folder:
            return
        if refusal := await self._query(lambda number: wire.LoadAdapter(number, name, folder)):
            raise RequestError(refusal, param="lora_request")
        known[name] = folder

    async def check_shape(self, shape: StructuredOutputsParams, vocabulary: Vocabulary) -> None:
        """Check that the engine can compile a shape, in a process that may fail, and give the engine the vocabulary.

        Args:
            shape: shape of a text.
            vocabulary: vocabulary of the model.

        Raises:
            RequestError: the shape is refused.
            EngineDeadError: the engine is not ready, or dies.
        """
        await self._checks.run(self._checker.check, shape, vocabulary)
        if not self._knows_vocabulary:
            self._knows_vocabulary = await self._query(lambda number: wire.LoadVocabulary(number, vocabulary))

    async def reset_cache(self) -> bool:
        """Empty the cache and return whether every page is free.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
        """
        return await self._query(wire.ResetCache)

    async def _query(self, kind: Callable[[int], wire.ToWorker]) -> Any:
        self._check_ready()
        number = next(self._query_ids)
        self._queries[number] = asyncio.get_running_loop().create_future()
        try:
            self._send([kind(number)])
            return await self._queries[number]
        finally:
            del self._queries[number]

    def _send(self, messages: Sequence[wire.ToWorker]) -> None:
        assert self._worker is not None
        try:
            self._worker.send(messages)
        except (UnicodeEncodeError, OverflowError) as error:
            raise RequestError(f"the request holds a value that cannot be sent to the engine: {error}") from None

    def _fail_all(self) -> None:
        """Fail every waiting caller with the reason."""
        text = self._explain()
        for call in list(self._calls):
            call.fail(EngineDeadError(text))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(text))

    def _begin(self) -> None:
        """See `Supervisor`."""
        self._snapshot, self._snapshot_at, self._adapters = "", time.perf_counter(), {}
        self._knows_vocabulary = False
        if (reading := self._reading) is not None:  # of the engine before
            self._reading = None
            reading.cancel()

    def _receive(self, message: wire.FromWorker) -> None:
        """See `Supervisor`."""
        match message:
            case wire.Snapshot(metrics):
                self._keep(metrics)
            case wire.Reply(query_id, value):
                if (query := self._queries.get(query_id)) is not None and not query.done():
                    query.set_result(value)
            case TokenOutput() | PromptLogprobsOutput() | ScoreResult() | PrecomputeResult() | RequestFailed():
                if (call := self._owners.get(message.request_id)) is not None:  # otherwise aborted
                    call.receive(message)
