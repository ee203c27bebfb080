"""Listening side of an HTTP process: sockets, limits, signals, draining and logs. It needs no engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import uvicorn

try:
    import uvloop
except ImportError:  # uvloop does not support Windows
    uvloop = None  # type: ignore[assignment]
from chunkattn import logs
from chunkattn.errors import ConfigError
from chunkattn.web.connection_limits import ConnectionLimits
from chunkattn.web.http import BoundedHttp
from chunkattn.web.http_state import HttpState
from chunkattn.web.keys import KeyReloader
from chunkattn.web.options import ServerConfig
from chunkattn.web.tracing import set_up_tracing

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ACCEPTS = 64
"""Connections accepted in one pass of the event loop. uvloop accepts one per listening socket, so the socket is duplicated."""
_OTHER_FILES = 128
"""Files and sockets that a server needs beside its connections."""


class Server(uvicorn.Server):
    """HTTP server that drains at the first signal and stops at the second.

    A draining server finishes running requests. Each of its answers ends its connection, so clients go elsewhere.
    """

    def __init__(self, config: uvicorn.Config, state: HttpState, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._state, self._limits = state, limits
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; stop at the second."""
        if self._state.draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._state.draining = self._limits.draining = True
        logger.warning("draining: %d requests are being answered", self._state.metrics.running)
        asyncio.get_running_loop().call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._stop_when_drained())

    async def _stop_when_drained(self) -> None:
        await self._state.drain()
        self.should_exit = True
        self.force_exit = bool(self._state.metrics.running)


class Listener:
    """HTTP server of one application on one socket, with the limits of `BoundedHttp`.

    Args:
        app: ASGI application.
        state: state of the application, which drains.
        listening: bound socket.

    Attributes:
        server: the HTTP server.
        serving: task that ends when the server has stopped; None before `start`.
    """

    def __init__(self, app: Any, state: HttpState, listening: socket.socket) -> None:
        most = raise_file_limit(state.config.max_connections)
        self._limits = ConnectionLimits(state.config, most, state.keys, state.shares)
        http = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            http=partial(BoundedHttp, limits=self._limits),  # type: ignore[arg-type]
        )
        self.server = Server(http, state, self._limits)
        self._sockets = [listening, *(listening.dup() for _ in range(_ACCEPTS - 1))]
        self.serving: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the server and return `serving`."""
        self.serving = asyncio.create_task(self.server.serve(self._sockets))
        self._watching = asyncio.create_task(self._limits.watch(self.server.server_state.connections))
        return self.serving

    def stop(self) -> None:
        """Ask the server to stop; `serving` ends soon."""
        self.server.should_exit = True
        if self.serving is not None:
            self._watching.cancel()


@asynccontextmanager
async def prepared(
    app: Any, state: HttpState, listening: socket.socket, delete_owned: Callable[[Set[str]], int]
) -> AsyncIterator[Listener]:
    """Make the listener of an application, and read its key file again at SIGHUP, until a `with` statement ends.

    Args:
        app: ASGI application.
        state: its state, which drains at SIGTERM.
        listening: bound socket.
        delete_owned: see `KeyReloader`.

    Yields:
        The listener, which is to be started.
    """
    reloader = KeyReloader(state.keys, delete_owned)
    if hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    reloading, listener = asyncio.create_task(reloader.run()), Listener(app, state, listening)
    try:
        yield listener
    finally:
        reloading.cancel()
        listener.stop()


def run_service(name: str, config: ServerConfig, main: Callable[[ServerConfig, socket.socket], Coroutine[Any, Any, T]]) -> T:
    """Run an HTTP process to its end: its logs, its spans, its socket, and a coroutine in the event loop.

    Args:
        name: name of the service in spans.
        config: options of the server.
        main: function that returns the coroutine, from the options with the resolved host and from the bound socket.

    Raises:
        ConfigError: the address cannot be bound.
    """
    set_up_logs(config.log_format)
    set_up_tracing(name)
    with listen(config) as listening:
        return run(main(replace(config, host=listening.getsockname()[0]), listening))


def url_of(listening: socket.socket) -> str:
    """Return the URL of a bound socket."""
    address, port = listening.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in uvloop's event loop where there is one."""
    return asyncio.run(main) if uvloop is None else uvloop.run(main)


def raise_file_limit(connections: int) -> int:
    """Raise the limit on open files to the hard limit; return how many connections the limit allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or files >= connections + _OTHER_FILES:
        return connections
    most = max(1, files - _OTHER_FILES)
    logger.warning("max_connections %d is lowered to %d: this process may open %d files (ulimit -n)", connections, most, files)
    return most


def listen(config: ServerConfig) -> socket.socket:
    """Return the listening socket of a server.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server((config.host, config.port), family=family, backlog=2048)
        # Connections inherit TCP_NODELAY. asyncio sets it only on sockets it made; without it events wait for an ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}") from None


def set_up_logs(log_format: str) -> None:
    """Log the package's messages to stderr in one of `chunkattn.logs.LOG_FORMATS`."""
    os.environ[logs.VARIABLE] = log_format
    logging.basicConfig(handlers=[logs.make_handler()], level=logging.WARNING, force=True)
    logging.getLogger("chunkattn").setLevel(logging.INFO)
