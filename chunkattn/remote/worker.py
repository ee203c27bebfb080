"""The engine's process, `python -m chunkattn.remote.worker ADDRESS`, which `EngineClient` starts and drives by messages."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import zmq

from chunkattn.engine.messages import CachedTokens, GenerateRequest, PrecomputeRequest, RequestFailed, ScoreRequest
from chunkattn.errors import ChunkAttnError, ConfigError, RequestError
from chunkattn.logs import make_handler, since_start
from chunkattn.remote import messages as wire
from chunkattn.remote.hosts.first_host import FirstHost
from chunkattn.remote.hosts.group_messages import End
from chunkattn.remote.hosts.other_host import OtherHost
from chunkattn.remote.watchdog import StepClock

if TYPE_CHECKING:
    from chunkattn.engine.core import EngineCore

logger = logging.getLogger(__name__)

_FIRST_HEARTBEATS_S = 0.5
_LAST_WORDS_S = 2
_LAST_WORDS_LEAVE_S = 0.2
"""Seconds that a message gets to leave a process that ends in the middle of work."""
_GONE_S = 1.5
"""Seconds after a failed step in which the connection of a host that is gone shows that."""
_FIRST_ENDED = "host 0 has ended"
_INBOX_S = 0.05
_DISK_WAIT_S = 600
_COMPILING_MS = 50
"""Milliseconds that an idle engine waits for a message while threads compile programs."""
_WARM_PAUSE_S = 1.0
"""Seconds of steps between two programs compiled beside them."""


class Worker:
    """The loop that passes messages to an `EngineCore` and sends its outputs, one frame a step.

    Args:
        context: ZeroMQ context, for the connections to other hosts.
        inbox: socket of the client's messages.
        outbox: socket to the client.
        clock: clock that the heartbeats read.

    Attributes:
        group: connections to the other hosts of the model; None on a single host.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], clock: StepClock
    ) -> None:
        self._context, self._inbox, self._outbox, self._clock = context, inbox, outbox, clock
        self.group: FirstHost | OtherHost | None = None
        self._closing = self._warms = False
        self._warmed_at = 0.0
        self._sent_at: float | None = None
        self.core: EngineCore

    def start(self) -> float:
        """Wait for `Start` and build the engine. Return the requested seconds between heartbeats."""
        self._clock.begin("loading")
        from chunkattn.engine.build import build_core, take_gpu_memory  # a slow import, so after the first heartbeat

        import_s = since_start()
        self._clock.idle()
        (start,) = wire.decode(self._inbox.recv())
        if not isinstance(start, wire.Start):
            raise TypeError(f"the first message must be Start, got {type(start).__name__}")
        logging.getLogger("chunkattn").setLevel(start.log_level)
        take_gpu_memory(start.config)
        first = self._join(start)
        self._clock.begin("loading")
        self.core = build_core(start.config, start.checkpoint.files(), first.tell if first else None)
        self._warms = start.config.warmup is not False and start.config.host_index == 0
        for _ in range(self.core.warm_ups.first if self._warms else 0):
            # Each program counts as one step. The clock does not see what other threads compile.
            self._clock.begin("compiling" if self.core.warm_ups.is_waiting else None)
            self._warms = self.core.warm_ups.advance()
        _freeze()
        self._send([wire.Ready(self.core.limits, import_s), *self._progress(), wire.Snapshot(self.core.metrics_text())])
        return start.heartbeat_s

    def _join(self, start: wire.Start) -> FirstHost | None:
        """Wait for the other hosts of the model, if there are any. Return their connections on the host that schedules."""
        config = start.config
        if config.num_hosts == 1:
            return None
        if config.host_index == 0:
            self.group = first = FirstHost(self._context, config, start.checkpoint)
            first.gather()
            return first
        self.group = other = OtherHost(self._context, config, start.checkpoint)
        other.join()
        return None

    def _progress(self) -> list[wire.FromWorker]:
        warm_ups = self.core.warm_ups
        return [wire.WarmupProgress(warm_ups.done, warm_ups.total)] if warm_ups.done else []

    def serve(self) -> None:
        """Run until a `Shutdown` arrives, or the host that schedules ends."""
        if isinstance(self.group, OtherHost):
            self._follow(self.group)
        while not self._closing:
            if not self.core.has_work and not self._warm_beside(pause_s=0.0):
                self._clock.idle()
                self._inbox.poll()
            self._clock.begin()
            self._take_messages()
            if self.core.has_work and not self._closing:
                outputs = self.core.step()
                self._send(outputs)
                self._let_disk_catch_up()
                self._warm_beside(_WARM_PAUSE_S)
        self._clock.begin("closing")
        self.core.close_disk()

    def _follow(self, first: OtherHost) -> None:
        """Make the calls of the host that schedules until it ends or a `Shutdown` arrives."""
        from chunkattn.engine.follower import Follower  # imported with the engine

        follower, poller = Follower(self.core), zmq.Poller()
        for socket in (first.calls, self._inbox):
            poller.register(socket, zmq.POLLIN)
        while not self._closing:
            self._clock.idle()
            poller.poll()
            self._clock.begin()
            self._take_messages()
            for call in first.receive():
                self._clock.begin()
                if isinstance(call, End):
                    self._send([wire.Ended(_FIRST_ENDED)])
                    self._closing = True
                else:
                    follower.run(call)

    def _warm_beside(self, pause_s: float) -> bool:
        """Compile one program if the last program is `pause_s` seconds ago. Return whether programs remain."""
        if self._warms and time.monotonic() - self._warmed_at >= pause_s:
            if self.core.warm_ups.is_waiting:
                if not pause_s:
                    self._clock.idle()
                    self._inbox.poll(_COMPILING_MS)
                return True
            self._clock.begin()
            self._warms = self.core.warm_beside()
            self._warmed_at = time.monotonic()
            self._send([*self._progress(), wire.Snapshot(self.core.metrics_text())])
            if not self._warms:
                _freeze()
        return self._warms

    def _send(self, messages: Iterable[wire.FromWorker]) -> None:
        if batch := list(messages):
            self._outbox.send(wire.encode(batch))

    def _take_messages(self) -> None:
        """Handle the messages that have arrived, without waiting, so that aborted requests are gone before the next step.

        A flood of messages delays a step by `_INBOX_S` seconds, and one frame, at most.
        """
        until = time.monotonic() + _INBOX_S
        while not (self.core.has_work and time.monotonic() > until):
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)  # faster than a poll
            except zmq.Again:
                break
            replies: list[wire.FromWorker] = []
            for message in wire.decode(frame):
                self._clock.begin()
                reply = self._handle(message)
                replies += [] if reply is None else [reply]
            self._send(replies)

    def _handle(self, message: wire.ToWorker) -> wire.FromWorker | None:
        match message:
            case GenerateRequest() | ScoreRequest() | PrecomputeRequest():
                try:
                    self.core.add(message, checked=True, arrived_at=self._sent_at)
                except RequestError as error:
                    return RequestFailed(message.request_id, str(error), error.param)
            case wire.Sent(at):
                self._sent_at = min(at, time.perf_counter())
            case wire.Abort(request_id):
                self.core.abort(request_id)
            case wire.Stop(request_id, sample):
                self.core.stop(request_id, sample)
            case wire.Unpin(request_ids):
                self.core.unpin(request_ids)
            case wire.ResetCache(query_id):
                return wire.Reply(query_id, self.core.reset_prefix_cache())
            case wire.CacheQuery(query_id, requests, forget):
                return wire.Reply(query_id, tuple(self._look_up(r, forget) for r in requests))
            case wire.LoadAdapter(query_id, name, folder):
                return wire.Reply(query_id, self._load_adapter(name, folder))
            case wire.LoadVocabulary(query_id, vocabulary):
                self.core.shapes.know(vocabulary)
                return wire.Reply(query_id, True)
            case wire.MetricsQuery(query_id):
                return wire.Reply(query_id, self.core.metrics_text())
            case wire.Shutdown():
                self._closing = True
            case _:
                raise TypeError(f"{type(message).__name__} is not a message for a worker")
        return None

    def _look_up(self, request: PrecomputeRequest, forget: bool) -> CachedTokens:
        try:
            return self.core.look_up(request, forget=forget)
        except RequestError:  # a request that this engine cannot compute is not cached
            return CachedTokens(0, (0,) * request.layout.num_chunks, 0)

    def _load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter, and return why it is refused; an empty text if it is not."""
        self._clock.begin("loading")
        try:
            self.core.load_adapter(name, folder)
        except ChunkAttnError as error:
            return str(error)
        return ""

    def _let_disk_catch_up(self) -> None:
        """Wait for the K/V store until a message arrives; see `EngineCore.disk_is_behind`."""
        if (disk := self.core.disk) is not None and self.core.disk_is_behind:
            self._clock.begin("writing")
            for _ in range(_DISK_WAIT_S * 10):
                if disk.catch_up(timeout=0.1) or self._inbox.poll(0):
                    return


def _freeze() -> None:
    """Make later garbage collections skip the modules, the model and the compiled programs."""
    gc.collect()
    gc.freeze()


class _Heart:
    """A thread that sends heartbeats over a socket of its own, and ends the process when its parent or another host is gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, clock: StepClock, worker: Worker) -> None:
        self.interval = _FIRST_HEARTBEATS_S
        self._context, self._address, self._clock, self._worker = context, address, clock, worker
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._beat()
        except Exception:
            # Without this thread, nobody notices that another host is gone.
            logger.exception("the engine's process ends: its heartbeat fails")
            _leave(self._address)

    def _beat(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.connect(f"{self._address}/outputs")
            while not self._stop.wait(self.interval):
                if os.getppid() != self._parent:
                    _leave(self._address)
                group = self._worker.group
                if group is not None and group.hear(busy=self._clock.is_busy):
                    self._clock.excuse()  # the step waits for that host
                if isinstance(group, OtherHost) and group.has_ended:
                    # The main thread may compute with that host's devices, which wait for ever.
                    socket.send(wire.encode([wire.Ended(_FIRST_ENDED)]))
                    time.sleep(_LAST_WORDS_LEAVE_S)
                    _leave(self._address, 0)
                if group is not None and (reason := group.lost()):
                    # The main thread may wait for that host's devices for ever.
                    logger.error("the engine's process ends: %s", reason)
                    kind = "HostLost" if group.failure is None else group.failure.error_type
                    socket.send(wire.encode([wire.Failed(kind, reason)]))
                    time.sleep(_LAST_WORDS_LEAVE_S)
                    _leave(self._address)
                if socket.poll(0, zmq.POLLOUT):
                    socket.send(wire.encode([self._clock.read()]))

    def close(self) -> None:
        """Stop the thread, so that the context can be closed."""
        self._stop.set()
        self._thread.join()


def _leave_with_parent(address: str) -> None:
    """Exit when the other end of stdin closes (the parent has died), even if the main thread is busy."""
    while os.read(0, 1):
        pass
    _leave(address)


def _leave(address: str, status: int = 1) -> None:
    """Exit at once and remove the sockets, which no other process would remove."""
    shutil.rmtree(address.removeprefix("ipc://"), ignore_errors=True)
    os._exit(status)


def main(address: str) -> int:
    """Serve one engine over the sockets in `address`. Return the exit status."""
    # A signal to all processes, such as a service manager's SIGTERM, also reaches the parent, which decides.
    # SIGTTOU would stop this process at a log line if the terminal lets only the foreground write (stty tostop).
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(address,), name="parent", daemon=True).start()
    logging.basicConfig(handlers=[make_handler()])
    context = zmq.Context()
    inbox, outbox, clock = context.socket(zmq.PULL), context.socket(zmq.PUSH), StepClock()
    inbox.rcvhwm = outbox.sndhwm = 0  # the client bounds the frames in flight
    inbox.bind(f"{address}/requests")
    outbox.connect(f"{address}/outputs")
    worker = Worker(context, inbox, outbox, clock)
    heart = _Heart(context, address, clock, worker)
    try:
        heart.interval = worker.start()
        worker.serve()
    except Exception as error:
        if worker.group is not None:
            time.sleep(_GONE_S)  # if a host is gone, the heart's thread says so and ends the process
        logger.error("the engine's process fails", exc_info=not isinstance(error, ConfigError))
        failure = wire.Failed(type(error).__name__, str(error).encode(errors="replace").decode())
        outbox.send(wire.encode([failure]))
        if isinstance(worker.group, OtherHost):
            heart.close()  # it uses the same socket
            worker.group.fail(failure)
        return 1
    finally:
        heart.close()
        if worker.group is not None:
            worker.group.end()
        inbox.close(linger=0)
        outbox.close(linger=_LAST_WORDS_S * 1000)
        context.term()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; JAX's teardown would take a second, or wait for hosts that are gone
