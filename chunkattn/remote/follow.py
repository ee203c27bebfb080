"""The process of a host that follows: it keeps an engine that computes what host 0 tells it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chunkattn.config import EngineConfig, make_config
from chunkattn.errors import EngineDeadError
from chunkattn.models.loader import open_files
from chunkattn.remote.client import EngineClient
from chunkattn.remote.messages import Checkpoint


def follow(options: Mapping[str, Any]) -> None:
    """Follow host 0 until a signal stops the process. The engine starts again when host 0 or another host has ended.

    Args:
        options: fields of `EngineConfig`, including the model.

    Raises:
        ConfigError, ModelError, BackendError: the engine cannot be built, or host 0 refuses this host.
        EngineDeadError: the engine's process died three times during start.
    """
    fields = dict(options)
    asyncio.run(_follow(make_config(fields.pop("model", None), fields)))


async def _follow(config: EngineConfig) -> None:
    name = f"host {config.host_index} of {config.num_hosts}"
    client = EngineClient(config, lambda limits: print(f"{name} follows {config.coordinator}", flush=True))
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    waiting, starting = asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(_start(client, config))
    try:
        await asyncio.wait({waiting, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=1)
            if client.state == "closed":
                raise EngineDeadError(client.reason)
    finally:
        starting.cancel()
        await asyncio.wait({starting})
        await client.close()


async def _start(client: EngineClient, config: EngineConfig) -> None:
    client.launch()
    files = await asyncio.to_thread(open_files, replace(config, skip_tokenizer_init=True))
    await client.start(Checkpoint.of(files))
