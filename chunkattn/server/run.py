"""The serving process: start of engine and HTTP server, signals, draining and shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from chunkattn import logs
from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import ChunkAttnError
from chunkattn.server.app import create_app
from chunkattn.server.state import ServerState
from chunkattn.web.listening import prepared, run_service, url_of
from chunkattn.web.options import ServerConfig

logger = logging.getLogger(__name__)

_IMPORT_S = logs.since_start()
"""Seconds that this process's imports took."""


def serve(options: Mapping[str, Any], config: ServerConfig) -> None:
    """Serve until a signal stops the process. Requests get a 503 until the engine is ready.

    Args:
        options: arguments of `AsyncLLM`, including the model.
        config: options of the server.

    Raises:
        ConfigError, ModelError, BackendError: the engine cannot be built, or the address cannot be bound.
        EngineDeadError: the engine process died three times during start.
    """
    busy = run_service("chunkattn", config, lambda config, listening: _serve(AsyncLLM(**options), config, listening))
    if busy:  # work of clients that left; a thread in native code may crash an interpreter that ends around it
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


async def _serve(llm: AsyncLLM, config: ServerConfig, listening: socket.socket) -> int:
    """Serve, and return the number of threads that still work for clients that left."""
    app = create_app(llm, config)
    state: ServerState = app.state.server
    async with prepared(app, state, listening, state.documents.delete_owned) as listener:
        serving, starting = listener.start(), asyncio.create_task(llm.open())
        try:
            await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.exception():
                gc.collect()
                gc.freeze()  # later collections skip the long-lived modules and model
                asking = asyncio.create_task(find_decide_method(llm))
                await asyncio.wait({serving, asking}, return_when=asyncio.FIRST_COMPLETED)
                asking.cancel()
                restoring = asyncio.create_task(state.documents.restore())
                await asyncio.wait({serving, restoring}, return_when=asyncio.FIRST_COMPLETED)
                if config.ready_when_warm:
                    warming = asyncio.create_task(_wait_until_warm(llm))
                    await asyncio.wait({serving, warming}, return_when=asyncio.FIRST_COMPLETED)
                    warming.cancel()
                if not serving.done():
                    _log_start(llm)
                    print(f"{state.model_name} is ready at {url_of(listening)}", flush=True)
                await serving
        finally:
            listener.stop()
            if not starting.done():
                starting.cancel()
            ended = await asyncio.gather(starting, serving, return_exceptions=True)
            await llm.close()
            state.documents.close()
    if isinstance(ended[0], Exception):
        raise ended[0]
    state.bodies.decoder.close()
    return llm.threads.busy + state.bodies.decoder.busy


async def find_decide_method(llm: AsyncLLM) -> None:
    """Choose the method of decisions before the server is ready, so that no request waits for it.

    Args:
        llm: the engine, which has started.
    """
    try:
        await llm.find_decide_method()
    except ChunkAttnError as error:
        logger.warning("decide_method auto: the first decision asks the model, because the start could not: %s", error)


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
