"""The process of `chunkattn route`: start, signals, draining and shutdown of the gateway."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

from chunkattn.gateway.app import Gateway
from chunkattn.gateway.http_replicas import HttpReplicas
from chunkattn.gateway.options import GatewayOptions
from chunkattn.web.listening import prepared, run_service, url_of
from chunkattn.web.options import ServerConfig


def route(urls: Sequence[str], options: GatewayOptions, config: ServerConfig) -> None:
    """Serve the gateway until a signal stops the process. Requests get a 503 until a replica is ready.

    Args:
        urls: base URLs of the replicas.
        options: options of the gateway.
        config: options of its HTTP server.

    Raises:
        ConfigError: an option is invalid, or the address cannot be bound.
    """
    key, resolve, timeout_s = options.replica_key, options.resolve, options.connect_timeout_s
    replicas = HttpReplicas(urls, key=key, resolve=resolve, connect_timeout_s=timeout_s)
    run_service("chunkattn-gateway", config, partial(_route, replicas, options))


async def _route(replicas: HttpReplicas, options: GatewayOptions, config: ServerConfig, listening: socket.socket) -> None:
    gateway = Gateway(replicas, options, config)
    async with prepared(gateway.app, gateway.state, listening, gateway.documents.registry.delete_owned) as listener:
        await gateway.open()
        try:
            print(f"chunkattn route is ready at {url_of(listening)} in front of {len(replicas.names())} replicas", flush=True)
            await listener.start()
        finally:
            listener.stop()
            await gateway.close()
