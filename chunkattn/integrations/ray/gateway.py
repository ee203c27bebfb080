"""The gateway as a deployment of Ray Serve: `Ingress` behind Ray's HAProxy, `Listening` with the server's own HTTP front."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from chunkattn.gateway.app import Gateway
from chunkattn.integrations.ray.exposure import ANY, check_http, http_host, warn_of_open_ports
from chunkattn.integrations.ray.handover import Handover, open_records
from chunkattn.integrations.ray.keys import ReloadsKeys, reload_everywhere
from chunkattn.integrations.ray.logs import set_up_logs
from chunkattn.integrations.ray.options import CHANNEL, AppOptions, check_environment
from chunkattn.integrations.ray.transport import ServeReplicas
from chunkattn.web.http import LONGEST_HEAD, head_too_long
from chunkattn.web.listening import Listener, listen
from chunkattn.web.options import ServerConfig

_START_S = 30.0
"""Seconds that a new gateway waits for the port of its predecessor."""
_FIRST_S = 10.0
"""Seconds that a new gateway waits for the first replica, because Ray sends it requests as soon as it has started."""


class _Served(ReloadsKeys):
    """The gateway's application over the replicas of a deployment."""

    _gateway: Gateway

    async def _open(self, engine: DeploymentHandle[Any], args: Mapping[str, Any], config: ServerConfig) -> None:
        self._engine, options = engine, AppOptions.of(args)
        check_environment(options)
        set_up_logs(config.log_format)
        gateway = options.gateway_options
        records = await open_records(gateway.document_store)
        self._handover = Handover(records)
        stores = options.gateways == 1
        self._gateway = Gateway(ServeReplicas(engine, CHANNEL), gateway, config, records, stores_documents=stores)
        self.start_reloading(self._gateway.state.keys, self._gateway.documents.registry.delete_owned)
        await self._gateway.open()
        self._handover.start()
        until = asyncio.get_running_loop().time() + _FIRST_S
        while not self._gateway.watch.ready() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)

    async def _close(self) -> None:
        self.stop_reloading()
        self._handover.stop()
        await self._gateway.close()


@serve.ingress()
class Ingress(_Served):
    """Gateway behind HAProxy, which connects to the HTTP server that Ray runs in this process.

    Args:
        engine: handle of the replicas' deployment.
        args: see `chunkattn.integrations.ray.options.AppOptions`.
    """

    async def __init__(self, engine: DeploymentHandle[Any], args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        options, host = AppOptions.of(args), await asyncio.to_thread(http_host)
        check_http(options.server_config, host, allowed=options.allow_unauthenticated)
        await self._open(engine, args, replace(options.server_config, host=host or ANY))  # clients name the host of HAProxy
        warn_of_open_ports(ray.util.get_node_ip_address())

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application. Ray calls this method; an application given to `ingress` would be pickled."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a bound method for ASGI 2
            await self._answer(scope, receive, send)

        return app

    async def reconfigure(self, user_config: Any) -> None:
        """Read the key file again here and at every replica.

        Ray takes a replica whose own `user_config` changes out of the routing for a moment, so only the gateway has one.

        Args:
            user_config: see `ReloadsKeys.reconfigure`.
        """
        await super().reconfigure(user_config)
        await reload_everywhere(self._engine)

    async def check_health(self) -> None:
        """Note that this gateway is still wanted. Ray calls this method until it stops the gateway."""
        self._handover.note_wanted()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and leave the header with the request's id to Ray, which adds the same one.

        A server's own HTTP front refuses long heads; Ray's accepts them.
        """

        async def relayed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [h for h in message["headers"] if h[0].lower() != b"x-request-id"]}
            await send(message)

        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        elif scope["type"] == "http" and _head_size(scope) > LONGEST_HEAD:
            error = head_too_long()
            await JSONResponse(error.body, error.status, {"X-Content-Type-Options": "nosniff"})(scope, receive, send)
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
        self._listener = Listener(self._gateway.app, self._gateway.state, listening)
        self._listener.start()

    async def check_health(self) -> None:
        """Raise if the HTTP server has ended.

        Raises:
            RuntimeError: it has.
        """
        self._handover.note_wanted()
        if self._listener.serving is None or self._listener.serving.done():
            raise RuntimeError("the gateway's HTTP server has ended")

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones, at most `drain_timeout_s`."""
        await self._gateway.state.drain()

    async def __del__(self) -> None:
        """Stop to listen, and close the gateway."""
        if hasattr(self, "_listener"):
            self._listener.stop()
            await self._close()


def _head_size(scope: Scope) -> int:
    """Return the bytes of the request line and the headers, as the client sent them."""
    target = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    return (
        len(scope["method"])
        + target
        + len("  HTTP/1.1\r\n")
        + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    )


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
