"""The gateway as a deployment of Ray Serve: `Ingress` behind Ray's HAProxy, `Listener` with the server's own HTTP front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle

from chunkattn.integrations.ray.options import CHANNEL, AppOptions, check_environment
from chunkattn.integrations.ray.transport import ServeReplicas
from chunkattn.server.http import BoundedHttp, ConnectionLimits
from chunkattn.server.options import ServerConfig

logger = logging.getLogger(__name__)


class _Gateway:
    """The gateway's application over the replicas of a deployment."""

    async def _open(self, engine: DeploymentHandle[Any], args: Mapping[str, Any]) -> None:
        options = AppOptions.of(args)
        check_environment(options)
        self._replicas = ServeReplicas(engine, CHANNEL)
        from standin import make_app

        self._gateway = make_app(self._replicas)

    async def check_health(self) -> None:
        """Ray calls this method; its answer shows that the event loop runs."""


@serve.ingress()
class Ingress(_Gateway):
    """Gateway behind HAProxy, which connects to the HTTP server that Ray runs in this process."""

    async def __init__(self, engine: DeploymentHandle[Any], args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        await self._open(engine, args)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application. Ray calls this method; an application given to `ingress` would be pickled."""
        return self._gateway


class Listener(_Gateway):
    """Gateway that listens itself, with the limits of a server on connections, headers and rates.

    Args:
        engine: handle of the replicas' deployment.
        args: see `AppOptions`.
        config: options of the server, which hold the address and the limits.
    """

    async def __init__(self, engine: DeploymentHandle[Any], args: Mapping[str, Any], config: ServerConfig) -> None:  # type: ignore[misc]
        await self._open(engine, args)
        limits = ConnectionLimits(config, config.max_connections)
        http = uvicorn.Config(
            self._gateway, host=config.host, port=config.port, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=1, timeout_keep_alive=75, http=partial(BoundedHttp, limits=limits),
        )
        self._server = uvicorn.Server(http)
        self._serving = asyncio.create_task(self._server.serve())
        self._watching = asyncio.create_task(limits.watch(self._server.server_state.connections))

    async def drain(self) -> None:
        pass

    async def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended")
