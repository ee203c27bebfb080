"""One engine process as its parent sees it."""

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

from chunkattn.remote.wire import WireMessage, encode

_AT_ONCE = 16
"""Frames, before others of the event loop have their turn."""
_RECONNECT_MS = 20
_LONGEST_FOLDER = 90
"""Bytes: a Unix socket's path holds little more than a hundred."""


class WorkerProcess:
    """A process just started, and the sockets to it. Belongs to the running event loop.

    Attributes:
        exited: the exit status as `subprocess` gives it, as soon as the process is gone and reaped.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._folder = _private_folder()
        self._requests, self._outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        try:
            # Nothing waits for the process: how much can be on its way is bounded by the requests there can be.
            self._requests.sndhwm = self._outputs.rcvhwm = 0
            # The process binds this one: who connects can send at once, before there is anybody at the other end.
            self._requests.reconnect_ivl = _RECONNECT_MS
            self._requests.connect(f"ipc://{self._folder}/requests")
            self._outputs.bind(f"ipc://{self._folder}/outputs")
            # Its stdin closes when this process dies. No PR_SET_PDEATHSIG: that fires when the *thread* that started it ends.
            # A group of its own: Ctrl-C in the terminal does not reach it. Not a session: Linux gives each an equal share of
            # the processors (sched(7), autogroup), and one thread here would count as much as all of the engine's together.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "chunkattn.remote.worker", f"ipc://{self._folder}"],
                stdin=subprocess.PIPE,
                stdout=2,
                env=_environment(),
                process_group=0,
            )
        except BaseException:
            self._release()
            raise
        threading.Thread(target=self._reap, args=(self._loop,), name="engine-reaper", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, messages: Sequence[WireMessage]) -> None:
        """Send one frame, without waiting.

        Raises:
            UnicodeEncodeError, OverflowError: see `chunkattn.remote.wire.encode`.
        """
        self._requests.send(encode(messages), zmq.NOBLOCK)

    def listen(self, take: Callable[[bytes], None]) -> None:
        """Call `take`, which must not raise, with every frame as it comes in."""

        # Not `zmq.asyncio`, whose futures cost more than what is in a frame.
        def drain() -> None:
            for _ in range(_AT_ONCE):
                try:
                    frame = self._outputs.recv(zmq.NOBLOCK)
                except zmq.ZMQError:  # there is none, or the socket is closed
                    return
                take(frame)
            # The descriptor tells of a frame that comes when none is left, and of no other.
            self._loop.call_soon(drain)

        self._loop.add_reader(self._outputs.fileno(), drain)
        drain()

    def kill(self) -> None:
        """End the process and any of its own, stopped ones too."""
        if not self.exited.done():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet its group's leader, or just gone
                self._process.kill()

    def dispose(self) -> None:
        """Kill it if it lives, close the sockets."""
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

        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(note)


def describe_exit(status: int) -> str:
    """What a `subprocess` exit status means, for messages."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _private_folder() -> Path:
    """A new folder that only this user can enter, its name short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="chunkattn-"))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="chunkattn-", dir="/tmp"))
    return folder


def _environment() -> dict[str, str]:
    """This process's, with this package where the worker finds it even if the caller has changed `sys.path`."""
    home = str(Path(__file__).parents[2])
    environment = dict(os.environ)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH"), home) if p)
    return environment
