"""`EngineClient`, which starts the engine's process, exchanges messages with it, and restarts it when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import zmq

from chunkattn import errors
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
from chunkattn.errors import ChunkAttnError, EngineDeadError, QueueFullError, RequestError
from chunkattn.fair_threads import FairThreads
from chunkattn.remote import messages as wire
from chunkattn.remote.hosts.group_secret import read_secret
from chunkattn.remote.inflight import InflightRequests
from chunkattn.remote.process import WorkerProcess, describe_exit
from chunkattn.request_record import RECORD

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_START_SILENCE_S = 60.0
"""Longest silence while the process starts: it imports Python modules and JAX before its first heartbeat."""
_EXCUSED_S = 1800.0
"""Longest time to load weights or to compile one program."""
_LAST_WORDS_S = 0.1
_SLOW_STEPS, _SLOW_STEP_S = 3.0, 15.0
"""A step may take this many times the longest step so far, and at least this many seconds, before it counts as unresponsive."""
_LAST_WAIT_S = 5.0
_FAILED_STARTS = 3
_LONGEST_PAUSE_S = 30.0


class EngineClient:
    """The client of one engine in a process of its own. It belongs to the event loop that starts it.

    Args:
        config: the engine's configuration.
        on_ready: called with the limits whenever an engine is ready.

    Raises:
        ConfigError: the secret of a group of hosts is missing or cannot be read.

    Attributes:
        state: `"starting"`, `"ready"`, `"restarting"`, `"failed"` (three starts in a row have failed; further starts follow,
            at last every 30 s) or `"closed"`.
        reason: reason why the last engine ended.
        limits: the engine's limits; None until an engine has been ready once.
        warmup: parts of the engine's warm-up that are done and the total (see `WarmUp`); None before the first part.
        import_s: seconds that the imports of the engine's process took.
        restarts: number of engines started after the first.
        threads: threads for the CPU work of calls.
    """

    def __init__(self, config: EngineConfig, on_ready: Callable[[EngineLimits], None]) -> None:
        if config.num_hosts > 1:
            read_secret(config)  # so that what is wrong with it shows at once
        self.config, self._on_ready = config, on_ready
        self.state, self.reason = "starting", "the engine is starting"
        self.limits: EngineLimits | None = None
        self.warmup: tuple[int, int] | None = None
        self.import_s = 0.0
        self.restarts = 0
        self.threads = FairThreads()
        self._context = zmq.Context()
        self._launched: WorkerProcess | None = None
        self._worker: WorkerProcess | None = None
        self._beat = wire.Heartbeat(0.0, None)
        self._calls: set[InflightRequests] = set()
        self._owners: dict[str, InflightRequests] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._query_ids = count()
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: wire.Failed | None = None
        self._ended: str | None = None
        self._silence = self._longest_step_s = 0.0
        self._snapshot, self._snapshot_at = "", 0.0
        self._reading: asyncio.Task[None] | None = None

    # Life

    def launch(self) -> None:
        """Launch the engine's process, so that it imports its modules while the caller opens the checkpoint for `start`.

        An error shows in `start`, which launches again.
        """
        if self._launched is None and self._supervisor is None and self.state != "closed":
            with suppress(OSError):
                self._launched = WorkerProcess(self._context)

    async def start(self, checkpoint: wire.Checkpoint) -> None:
        """Start the engine and wait until it is ready. An error or a cancellation closes the client.

        Args:
            checkpoint: the checkpoint to load.

        Raises:
            ConfigError, ModelError, BackendError: the engine cannot be built.
            EngineDeadError: its process died three times, or the client is closed.
        """
        if self._supervisor is not None or self.state == "closed":
            raise EngineDeadError(
                "an engine can be started once; this one " + ("is closed" if self.state == "closed" else "runs")
            )
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._closing: asyncio.Future[float] = loop.create_future()
        self._supervisor = loop.create_task(self._supervise(checkpoint), name="engine-supervisor")
        try:
            await self._started
        except BaseException:
            await self.close()
            raise

    async def close(self, grace_s: float = 10.0) -> None:
        """End the engine. All callers get `EngineDeadError`. Repeated calls are allowed.

        Args:
            grace_s: seconds to finish the step and write to the KV store before the process is killed.
        """
        was_ready, self.state, self.reason = self.is_ready, "closed", "the engine is closed"
        self._fail_all()
        self.threads.close()
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.dispose()
            await asyncio.wait({launched.exited}, timeout=_LAST_WAIT_S)
        if self._supervisor is None:
            self._context.destroy(linger=0)
        else:
            if not self._closing.done():
                self._closing.set_result(grace_s if was_ready else 0.0)
            await asyncio.wait({self._supervisor})

    @property
    def is_ready(self) -> bool:
        """Return whether the engine takes requests."""
        return self.state == "ready"

    @property
    def is_warm(self) -> bool:
        """Return whether the engine has compiled every program ahead."""
        return self.is_ready and self.warmup is not None and self.warmup[0] == self.warmup[1]

    @property
    def compiling_s(self) -> float:
        """Return the seconds for which the engine compiles a program at this moment; 0 if it does not."""
        return self._beat.step_running_s if self._beat.busy == "compiling" else 0.0

    @property
    def unresponsive_s(self) -> float:
        """Return the seconds without a sign of life, or in one unusually long step; 0 if the engine answers.

        A step is unusually long from 15 s and three times the longest step before, or from half of `engine_hang_timeout_s` if
        that is less. An engine that compiles, writes or closes is responsive: it says so.
        """
        if not self.is_ready:
            return 0.0
        spent = 0.0 if self._beat.busy else self._beat.step_running_s
        usual = min(max(_SLOW_STEPS * self._longest_step_s, _SLOW_STEP_S), self.config.engine_hang_timeout_s / 2)
        return max(self._silence, spent if spent > usual else 0.0)

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine, or None without a process."""
        return None if self._worker is None else self._worker.pid

    # Calls

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

    async def load_adapter(self, name: str, place: str) -> None:
        """Load an adapter that a request brings, unless it is loaded; see `EngineCore.load_adapter`.

        Args:
            name: name of the adapter.
            place: its folder or hub id.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
            RequestError: the adapter cannot be loaded.
        """
        if refusal := await self._query(lambda number: wire.LoadAdapter(number, name, place)):
            raise RequestError(refusal, param="lora_request")

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

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise EngineDeadError(self._explain())

    def _explain(self) -> str:
        what = {
            "failed": f"; it has failed to start {_FAILED_STARTS} times or more in a row and is tried again",
            "restarting": "; it is being started again",
        }
        return self.reason + what.get(self.state, "")

    def _fail_all(self) -> None:
        """Fail every waiting caller with the reason."""
        text = self._explain()
        for call in list(self._calls):
            call.fail(EngineDeadError(text))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(text))

    # Supervision

    async def _supervise(self, checkpoint: wire.Checkpoint) -> None:
        failed = 0
        try:
            while not self._closing.done():
                failed = 0 if await self._run_worker(checkpoint) or self._ended else failed + 1
                if self._closing.done():
                    break
                if not self._started.done() and self._failure is not None and (kind := _ours(self._failure)):
                    self._start_failed(kind(self._failure.text))  # a restart would fail alike
                    break
                if self._ended:
                    logger.info("%s; the engine starts again and waits", self.reason)
                    continue
                logger.error("%s; starting it again", self.reason)
                if failed >= _FAILED_STARTS:
                    self.state = "failed"
                    self._start_failed(EngineDeadError(self._explain()))
                if failed:
                    await asyncio.wait({self._closing}, timeout=min(0.5 * 2 ** (failed - 1), _LONGEST_PAUSE_S))
                self.restarts += 1
        except Exception as error:
            logger.exception("the engine's supervisor fails")
            self.reason = f"the engine's supervisor failed: {error!r}"
        finally:
            self.state = "closed"
            self._fail_all()
            self._start_failed(EngineDeadError(self.reason))
            self._context.destroy(linger=0)

    def _start_failed(self, error: ChunkAttnError) -> None:
        if not self._started.done():
            self._started.set_exception(error)

    async def _run_worker(self, checkpoint: wire.Checkpoint) -> bool:
        """Run one process to its end and dispose of it. Return whether the process was ever ready."""
        self.warmup, self._beat, self._served = None, wire.Heartbeat(0.0, None), False
        self._silence = self._longest_step_s = 0.0
        self._snapshot, self._snapshot_at = "", time.perf_counter()
        if (reading := self._reading) is not None:  # of the engine before
            self._reading = None
            reading.cancel()
        self._failure, self._ended = None, None
        try:
            self._worker = worker = self._launched or WorkerProcess(self._context)
            self._launched = None
        except OSError as error:
            self.reason = f"the engine's process cannot be started: {error}"
            return False
        try:
            level = logging.getLogger("chunkattn").getEffectiveLevel()
            heartbeat = min(0.5, self.config.engine_hang_timeout_s / 4)
            worker.send([wire.Start(self.config, checkpoint, level, heartbeat)])
            reason = await self._watch(worker)
        except Exception as error:
            logger.exception("a message of the engine's process cannot be understood")
            reason = f"sent a message that cannot be understood ({error!r}) and was killed"
        finally:
            worker.dispose()
        if self.state != "closed":
            self.state = "restarting" if self._served else self.state
            self.reason = self._ended or f"the engine's process {reason}"
            self._fail_all()
            ends: set[asyncio.Future[Any]] = {worker.exited, self._closing}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._closing.done():
            await asyncio.wait({worker.exited}, timeout=_LAST_WAIT_S)
        return self._served

    async def _watch(self, worker: WorkerProcess) -> str:
        """Handle messages until the process has ended or must be killed. Return its fate for `reason`."""
        now = asyncio.get_running_loop().time
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before, until = now(), float("inf")
        frames = 0

        def take(frame: bytes) -> None:
            nonlocal frames
            frames += 1
            try:
                for message in wire.decode(frame):
                    self._take(message)
            except Exception as error:
                if not broken.done():
                    broken.set_exception(error)

        worker.listen(take)
        while now() < until:
            awaited: set[asyncio.Future[Any]] = {broken, worker.exited}
            if not self._closing.done():
                awaited.add(self._closing)
            elif until == float("inf"):
                until = now() + self._closing.result()
                worker.send([wire.Shutdown()])
            seen = frames
            await asyncio.wait(awaited, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            if worker.exited.done():
                if self.is_ready:
                    self.state, self.reason = "restarting", "the engine's process has ended"
                heard = None
                while heard != frames and not broken.done():
                    heard = frames
                    await asyncio.wait({broken}, timeout=_LAST_WORDS_S)
            if broken.done():
                broken.result()
            # Count at most two ticks: while this process itself stood still, the engine may have been alive.
            self._silence, before = self._silence + min(now() - before, 2 * _TICK_S), now()
            if frames != seen:
                self._silence = 0.0
            if worker.exited.done():
                return describe_exit(worker.exited.result()) + (f": {self._failure}" if self._failure else "")
            if reason := self._hang(self._silence):
                return f"{reason} and was killed"
        return "was closed"

    def _hang(self, silence: float) -> str | None:
        """Return the reason why the process counts as hung, or None."""
        limit = self.config.engine_hang_timeout_s
        quiet = limit if self.is_ready else max(limit, _START_SILENCE_S)
        if silence > quiet:
            return f"gave no sign of life for {quiet:g} s"
        spent, busy = self._beat.step_running_s, self._beat.busy
        if spent > (_EXCUSED_S if busy else limit):
            return f"was {busy or 'in one step'} for {spent:.1f} s (engine_hang_timeout_s is {limit:g})"
        return None

    def _take(self, message: wire.FromWorker) -> None:
        """Handle one message of the worker."""
        match message:
            case wire.Heartbeat():
                before, self._beat = self._beat, message
                if message.step_running_s < before.step_running_s and before.busy is None:  # that step has ended
                    self._longest_step_s = max(self._longest_step_s, before.step_running_s)
            case wire.Snapshot(metrics):
                self._keep(metrics)
            case wire.WarmupProgress(done, total):
                self.warmup = done, total
            case wire.Ready(limits, import_s):
                self._served = True
                self.limits, self.import_s = limits, import_s
                self._on_ready(limits)
                if not self._closing.done():
                    self.state, self.reason = "ready", ""
                    if not self._started.done():
                        self._started.set_result(None)
            case wire.Failed():
                self._failure = message
            case wire.Ended(reason):
                self._ended = reason
            case wire.Reply(query_id, value):
                if (query := self._queries.get(query_id)) is not None and not query.done():
                    query.set_result(value)
            case TokenOutput() | PromptLogprobsOutput() | ScoreResult() | PrecomputeResult() | RequestFailed():
                if (call := self._owners.get(message.request_id)) is not None:  # otherwise aborted
                    call.receive(message)


def _ours(failure: wire.Failed) -> type[ChunkAttnError] | None:
    """Return the `ChunkAttnError` class that a worker failed with, or None for another error."""
    kind = getattr(errors, failure.error_type, None)
    return kind if isinstance(kind, type) and issubclass(kind, ChunkAttnError) else None
