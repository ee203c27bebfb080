"""The process of `chunkattn route`: start, signals, draining and shutdown of the gateway."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace

from chunkattn.gateway.app import Gateway
from chunkattn.gateway.http_replicas import HttpReplicas
from chunkattn.gateway.options import GatewayOptions
from chunkattn.web.keys import KeyReloader
from chunkattn.web.listening import Listener, listen, run, set_up_logs, url_of
from chunkattn.web.options import ServerConfig
from chunkattn.web.tracing import set_up_tracing


def route(urls: Sequence[str], options: GatewayOptions, config: ServerConfig) -> None:
    """Serve the gateway until a signal stops the process. Requests get a 503 until a replica is ready.

    Args:
        urls: base URLs of the replicas.
        options: options of the gateway.
        config: options of its HTTP server.

    Raises:
        ConfigError: an option is invalid, or the address cannot be bound.
    """
    set_up_logs(config.log_format)
    set_up_tracing("chunkattn-gateway")
    replicas = HttpReplicas(urls, key=options.replica_key, resolve=options.resolve, connect_timeout_s=options.connect_timeout_s)
    listening = listen(config)
    try:
        run(_route(replicas, options, config, listening))
    finally:
        listening.close()


async def _route(replicas: HttpReplicas, options: GatewayOptions, config: ServerConfig, listening: socket.socket) -> None:
    gateway = Gateway(replicas, options, replace(config, host=listening.getsockname()[0]))
    reloader = KeyReloader(gateway.keys, gateway.documents.registry.delete_owned)
    if hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    listener = Listener(gateway.app, config, gateway.state, listening)
    reloading = asyncio.create_task(reloader.run())
    await gateway.open()
    serving = listener.start()
    try:
        print(f"chunkattn route is ready at {url_of(listening)} in front of {len(replicas.names())} replicas", flush=True)
        await serving
    finally:
        reloading.cancel()
        listener.stop()
        await gateway.close()
