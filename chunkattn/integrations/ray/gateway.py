"""The gateway as a deployment of Ray Serve: `Ingress` behind Ray's HAProxy, `Listening` with the server's own HTTP front."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from chunkattn.errors import ConfigError
from chunkattn.gateway.app import Gateway
from chunkattn.integrations.ray.keys import ReloadsKeys
from chunkattn.integrations.ray.logs import set_up_logs
from chunkattn.integrations.ray.options import CHANNEL, AppOptions, check_environment
from chunkattn.integrations.ray.transport import ServeReplicas
from chunkattn.routing.document_records import DocumentRecords
from chunkattn.server.listening import Listener, listen
from chunkattn.server.options import ServerConfig

_START_S = 30.0
"""Seconds that a new gateway waits for the port and the records of its predecessor."""


class _Served(ReloadsKeys):
    """The gateway's application over the replicas of a deployment."""

    _gateway: Gateway

    async def _open(self, engine: DeploymentHandle[Any], args: Mapping[str, Any], config: ServerConfig) -> None:
        options = AppOptions.of(args)
        check_environment(options)
        set_up_logs(config.log_format)
        made = options.gateway_options
        records = await _open_records(made.document_store)
        stores = options.gateways == 1
        self._gateway = Gateway(ServeReplicas(engine, CHANNEL), made, config, records, stores_documents=stores)
        self.start_reloading(self._gateway.keys, self._gateway.documents.delete_owned)
        await self._gateway.open()

    async def _close(self) -> None:
        self.stop_reloading()
        await self._gateway.close()


@serve.ingress()
class Ingress(_Served):
    """Gateway behind HAProxy, which connects to the HTTP server that Ray runs in this process.

    Args:
        engine: handle of the replicas' deployment.
        args: see `chunkattn.integrations.ray.options.AppOptions`.
    """

    async def __init__(self, engine: DeploymentHandle[Any], args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        config = ServerConfig(**AppOptions.of(args).server)
        await self._open(engine, args, replace(config, host="0.0.0.0"))  # clients name the host of HAProxy

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application. Ray calls this method; an application given to `ingress` would be pickled."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a bound method for ASGI 2
            await self._answer(scope, receive, send)

        return app

    async def check_health(self) -> None:
        """Ray calls this method; its answer shows that the event loop runs."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and leave the header with the request's id to Ray, which adds the same one."""

        async def relayed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [h for h in message["headers"] if h[0].lower() != b"x-request-id"]}
            await send(message)

        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        else:
            await self._gateway.app(scope, receive, relayed)

    async def __del__(self) -> None:
        """Close the gateway. Ray calls this method after the running requests."""
        if hasattr(self, "_gateway"):
            await self._close()


class Listening(_Served):
    """Gateway that listens itself, with a server's limits on connections, headers and rates.

    Args:
        engine: handle of the replicas' deployment.
        args: see `chunkattn.integrations.ray.options.AppOptions`.
        config: options of the server, with the address to listen on.
    """

    async def __init__(  # type: ignore[misc]
        self, engine: DeploymentHandle[Any], args: Mapping[str, Any], config: ServerConfig
    ) -> None:
        listening = await asyncio.wait_for(asyncio.to_thread(listen, config), _START_S)
        await self._open(engine, args, replace(config, host=listening.getsockname()[0]))
        self._listener = Listener(self._gateway.app, config, self._gateway.state, listening)
        self._listener.start()

    async def check_health(self) -> None:
        """Raise if the HTTP server has ended.

        Raises:
            RuntimeError: it has.
        """
        if self._listener.serving is None or self._listener.serving.done():
            raise RuntimeError("the gateway's HTTP server has ended")

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones, at most `drain_timeout_s`."""
        state = self._gateway.state
        state.draining = True
        until = asyncio.get_running_loop().time() + state.config.drain_timeout_s
        while state.metrics.running and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)

    async def __del__(self) -> None:
        """Stop to listen, and close the gateway."""
        if hasattr(self, "_listener"):
            self._listener.stop()
            await self._close()


async def _open_records(path: str | None) -> DocumentRecords:
    """Open the records of stored documents, when the predecessor of this gateway has closed them.

    Raises:
        ConfigError: the file cannot be opened.
    """
    until = asyncio.get_running_loop().time() + _START_S
    while True:
        try:
            return await asyncio.to_thread(DocumentRecords, path)
        except ConfigError:
            if asyncio.get_running_loop().time() > until:
                raise
            await asyncio.sleep(0.2)


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
