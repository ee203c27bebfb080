"""Stored documents of a gateway: its registry, the routes over it, and ids replaced by texts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

from chunkattn.documents.records import DocumentRecords, Scope
from chunkattn.documents.registry import Registry
from chunkattn.documents.routes import documents_router
from chunkattn.gateway.document_ids import Find, bytes_of_ids, salt_of, with_texts
from chunkattn.gateway.document_requests import Owners
from chunkattn.gateway.replica_keeper import ReplicaKeeper
from chunkattn.gateway.replicas import Replicas
from chunkattn.web import errors
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.http_state import HttpState
from chunkattn.web.middleware import HeadAsGet
from chunkattn.web.route_table import RouteTable


class GatewayDocuments:
    """Documents that clients store at a gateway, each computed and pinned at the replica that owns it.

    The records are the gateway's own. Prompts hold texts when they reach a replica, so every replica can answer them.

    Args:
        replicas: connection to the replicas.
        policy: routing policy.
        records: records of the documents, which survive the gateway if they have a file.
        state: options, keys and bounds of the gateway's HTTP server. Without named keys, clients are told apart by their
            Authorization headers.
        patience_s: time in seconds for which a POST, a PATCH or a forget asks again while no replica takes documents.

    Attributes:
        registry: the documents.
        keeper: keeper of their K/V.
        app: ASGI application of the routes.
    """

    def __init__(
        self,
        replicas: Replicas,
        policy: Owners,
        records: DocumentRecords,
        state: HttpState,
        patience_s: float = 0.0,
    ) -> None:
        self.keeper = ReplicaKeeper(replicas, policy, records, state.config, state.keys, patience_s)
        self.registry = Registry(records, self.keeper, state.config, state.keys)
        router = documents_router(JsonRoute)
        app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry={"tracing": False})
        app.include_router(router)
        app.state.documents, app.state.bodies = self.registry, state.bodies
        errors.install(app, RouteTable([router]).refusal)
        app.add_exception_handler(Exception, _raise)
        self.app: ASGIApp = HeadAsGet(app)
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Restore the documents, and start to tell replicas what they miss. The replicas must be open."""
        await self.registry.restore()
        self._running = asyncio.create_task(self.keeper.run())

    async def close(self) -> None:
        """End the work in the background and close the records."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self.registry.close()

    def on_change(self, names: Collection[str]) -> None:
        """Note that replicas came, went or restarted; pinned documents are posted to their owners again.

        Args:
            names: names of these replicas.
        """
        self.keeper.lose(names)

    def note(self, authorization: str) -> None:
        """Remember the Authorization header of a request whose owner has documents."""
        self.keeper.headers.note(authorization)

    def added_bytes(self, path: str, body: Any, authorization: str = "") -> int:
        """Return the bytes of the contents that `resolve` puts into a body. May run in a thread."""
        return bytes_of_ids(path, body, self._finder(path, body, authorization)) if isinstance(body, Mapping) else 0

    def resolve(self, path: str, body: Any, authorization: str = "") -> Any:
        """Return a body with the contents of stored documents in the places of their ids; the same object if it names none.

        May run in a thread.

        Args:
            path: path of the request.
            body: decoded JSON body.
            authorization: Authorization header of the request.

        Raises:
            ApiError: as `with_texts`.
        """
        return with_texts(path, body, self._finder(path, body, authorization)) if isinstance(body, Mapping) else body

    def _finder(self, path: str, body: Mapping[str, Any], authorization: str) -> Find:
        scope = Scope(self.keeper.headers.owner_of(authorization), salt_of(path, body, self.keeper.adapters()))
        return lambda name, place: self.registry.get(scope, name, place)


async def _raise(request: Request, error: Exception) -> Response:
    """Leave an unforeseen error to the gate, which answers it with the request's id."""
    raise error
