"""The serving process: start of engine and HTTP server, signals, draining and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

try:
    import uvloop
except ImportError:  # uvloop does not support Windows
    uvloop = None  # type: ignore[assignment]
from chunkattn import logs
from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import ConfigError
from chunkattn.server.app import create_app
from chunkattn.server.http import BoundedHttp, ConnectionLimits
from chunkattn.server.keys import KeyReloader
from chunkattn.server.options import ServerConfig
from chunkattn.server.state import ServerState

logger = logging.getLogger(__name__)

_IMPORT_S = logs.since_start()
"""Seconds that this process's imports took."""

_KEEP_ALIVE_S = 75
"""Idle time in seconds before the server closes a connection, longer than clients keep a connection (httpx: 5 s).

A server that closes first may lose a request that the client is about to send.
"""


_ACCEPTS = 16
"""Connections accepted in one pass of the event loop. uvloop accepts one per listening socket, so the socket is duplicated."""
_OTHER_FILES = 128
"""Files and sockets that a server needs beside its connections."""


class Server(uvicorn.Server):
    """HTTP server that drains at the first signal and stops at the second. A draining server finishes running requests."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; stop at the second."""
        if self._state.draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._state.draining = True
        logger.warning("draining: %d requests are being answered", self._state.metrics.running)
        asyncio.get_running_loop().call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._wait_for_requests())

    async def _wait_for_requests(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._state.config.drain_timeout_s
        while self._state.metrics.running and loop.time() < until:
            await asyncio.sleep(0.05)
        self.should_exit = True
        self.force_exit = bool(self._state.metrics.running)


def serve(options: Mapping[str, Any], config: ServerConfig) -> None:
    """Serve until a signal stops the process. Requests get a 503 until the engine is ready.

    Args:
        options: arguments of `AsyncLLM`, including the model.
        config: options of the server.

    Raises:
        ConfigError, ModelError, BackendError: the engine cannot be built, or the address cannot be bound.
        EngineDeadError: the engine process died three times during start.
    """
    _set_up_logs(config.log_format)
    listening, llm = _listen(config), AsyncLLM(**options)
    try:
        run = asyncio.run if uvloop is None else uvloop.run
        busy = run(_serve(llm, config, listening))
    finally:
        listening.close()
    if busy:  # work of clients that left; a thread in native code may crash an interpreter that ends around it
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


async def _serve(llm: AsyncLLM, config: ServerConfig, listening: socket.socket) -> int:
    """Serve, and return the number of threads that still work for clients that left."""
    address, port = listening.getsockname()[:2]
    app = create_app(llm, replace(config, host=address))  # resolved, so the app knows whether it is a loopback address
    reloader = KeyReloader(app.state.server.keys, app.state.server.documents.delete_owned)
    if hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    limits = ConnectionLimits(config, _raise_file_limit(config.max_connections))
    http = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=_KEEP_ALIVE_S,
        http=partial(BoundedHttp, limits=limits),  # type: ignore[arg-type]
    )
    server = Server(http, app.state.server)
    sockets = [listening, *(listening.dup() for _ in range(_ACCEPTS - 1))]
    serving = asyncio.create_task(server.serve(sockets))
    starting = asyncio.create_task(llm.open())
    watching = asyncio.create_task(limits.watch(server.server_state.connections))
    reloading = asyncio.create_task(reloader.run())
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not starting.exception():
            gc.collect()
            gc.freeze()  # later collections skip the long-lived modules and model
            shown = f"[{address}]" if ":" in address else address
            restoring = asyncio.create_task(app.state.server.documents.restore())
            await asyncio.wait({serving, restoring}, return_when=asyncio.FIRST_COMPLETED)
            if config.ready_when_warm:
                warming = asyncio.create_task(_wait_until_warm(llm))
                await asyncio.wait({serving, warming}, return_when=asyncio.FIRST_COMPLETED)
                warming.cancel()
            if not serving.done():
                _log_start(llm)
                print(f"{app.state.server.model_name} is ready at http://{shown}:{port}", flush=True)
            await serving
    finally:
        watching.cancel()
        reloading.cancel()
        server.should_exit = True
        if not starting.done():
            starting.cancel()
        ended = await asyncio.gather(starting, serving, return_exceptions=True)
        await llm.close()
        app.state.server.documents.close()
    if isinstance(ended[0], Exception):
        raise ended[0]
    app.state.server.decoder.close()
    return llm.threads.busy + app.state.server.decoder.busy


async def _wait_until_warm(llm: AsyncLLM) -> None:
    while not llm.is_warm:
        await asyncio.sleep(0.1)


def _log_start(llm: AsyncLLM) -> None:
    """Log how long the start took, and the part of the imports, which run in both processes one after the other."""
    engine = llm.client.import_s
    logger.info(
        "ready after %.1f s; the imports took %.1f s of them, %.1f s in this process and then %.1f s in the engine's",
        *(logs.since_start(), _IMPORT_S + engine, _IMPORT_S, engine),
    )


def _raise_file_limit(connections: int) -> int:
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


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server((config.host, config.port), family=family, backlog=2048)
        # Connections inherit TCP_NODELAY. asyncio sets it only on sockets it made; without it events wait for an ACK.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}") from None


def _set_up_logs(log_format: str) -> None:
    os.environ[logs.VARIABLE] = log_format
    logging.basicConfig(handlers=[logs.make_handler()], level=logging.WARNING, force=True)
    logging.getLogger("chunkattn").setLevel(logging.INFO)
