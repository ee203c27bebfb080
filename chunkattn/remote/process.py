"""One engine process, as seen by its parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from chunkattn.remote.messages import ToWorker, encode

_AT_ONCE = 16
"""Frames read before the event loop runs other callbacks."""
_RECONNECT_MS = 20
_LONGEST_FOLDER = 90
"""Maximum number of bytes of the folder's path: a Unix socket's path holds little more than a hundred."""


class WorkerProcess:
    """A new process and the sockets to it. It belongs to the running event loop.

    Attributes:
        exited: exit status as `subprocess` gives it, set once the process is reaped.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._folder = _private_folder()
        self._requests, self._outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        try:
            # Sends never wait: the limit on requests bounds the frames in flight.
            self._requests.sndhwm = self._outputs.rcvhwm = 0
            # The worker binds this socket: a connecting socket can send before its peer exists.
            self._requests.reconnect_ivl = _RECONNECT_MS
            self._requests.connect(f"ipc://{self._folder}/requests")
            self._outputs.bind(f"ipc://{self._folder}/outputs")
            # The worker's stdin closes when this process dies. PR_SET_PDEATHSIG would fire when the starting *thread* ends.
            # A process group of its own keeps Ctrl-C in the terminal away. A session of its own would hurt: Linux gives each
            # session an equal share of the processors (sched(7), autogroup), so one thread here would weigh as much as all
            # threads of the engine.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "chunkattn.remote.worker", f"ipc://{self._folder}"],
                stdin=subprocess.PIPE,
                stdout=2,
                env=environment(),
                process_group=0,
            )
        except BaseException:
            self._release()
            raise
        threading.Thread(target=self._reap, args=(self._loop,), name="engine-reaper", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, messages: Sequence[ToWorker]) -> None:
        """Send one frame without waiting.

        Raises:
            UnicodeEncodeError, OverflowError: see `chunkattn.remote.messages.encode`.
        """
        self._requests.send(encode(messages), zmq.NOBLOCK)

    def listen(self, take: Callable[[bytes], None]) -> None:
        """Call `take`, which must not raise, with every arriving frame."""

        # The futures of `zmq.asyncio` cost more than handling a frame.
        def drain() -> None:
            for _ in range(_AT_ONCE):
                try:
                    frame = self._outputs.recv(zmq.NOBLOCK)
                except zmq.ZMQError:  # no frame, or the socket is closed
                    return
                take(frame)
            # ZeroMQ's descriptor is edge-triggered: it fires only when an empty queue receives a frame.
            self._loop.call_soon(drain)

        self._loop.add_reader(self._outputs.fileno(), drain)
        drain()

    def kill(self) -> None:
        """Kill the process and its children, including stopped children."""
        if not self.exited.done():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet its group's leader, or already gone
                self._process.kill()

    def dispose(self) -> None:
        """Kill the process if it is alive, and close the sockets."""
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._release()

    def _release(self) -> None:
        if not self._outputs.closed:
            self._loop.remove_reader(self._outputs.fileno())
        for socket in (self._requests, self._outputs):
            socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()

        def note() -> None:
            if not self.exited.done():
                self.exited.set_result(status)

        with suppress(RuntimeError):  # the loop is closed, so no task waits
            loop.call_soon_threadsafe(note)


def describe_exit(status: int) -> str:
    """Describe a `subprocess` exit status for messages."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _private_folder() -> Path:
    """Make a folder that only this user can enter, with a name short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="chunkattn-"))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="chunkattn-", dir="/tmp"))
    return folder


def environment() -> dict[str, str]:
    """Return this process's environment, with this package on the path even if the caller changed `sys.path`."""
    home = str(Path(__file__).parents[2])
    environment = dict(os.environ)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH"), home) if p)
    return environment
