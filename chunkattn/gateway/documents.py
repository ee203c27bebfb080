"""Stored documents of a gateway: its registry, the routes over it, and ids replaced by texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from chunkattn.documents.records import DocumentRecord, DocumentRecords, Scope
from chunkattn.documents.registry import Registry
from chunkattn.documents.routes import documents_router
from chunkattn.gateway.bodies import expanded_body, read_body
from chunkattn.gateway.document_ids import salt_of, with_texts
from chunkattn.gateway.replica_keeper import Owners, ReplicaKeeper
from chunkattn.gateway.replicas import Replicas
from chunkattn.web import errors
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.middleware import HeadAsGet
from chunkattn.web.options import ServerConfig
from chunkattn.web.route_table import RouteTable


class GatewayDocuments:
    """Documents that clients store at a gateway, each computed and pinned at the replica that owns it.

    The records are the gateway's own. Prompts hold texts when they reach a replica, so every replica can answer them.

    Args:
        replicas: connection to the replicas.
        policy: routing policy.
        records: records of the documents, which survive the gateway if they have a file.
        config: limits of the registry, `max_body_bytes` and `request_timeout_s`.
        keys: API keys. Without named ones, clients are told apart by their Authorization headers.
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
        config: ServerConfig,
        keys: Keys,
        patience_s: float = 0.0,
    ) -> None:
        self.keeper = ReplicaKeeper(replicas, policy, records, config, keys, patience_s)
        self.registry = Registry(records, self.keeper, config, keys)
        router = documents_router(BodyRoute)
        app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry={"tracing": False})
        app.include_router(router)
        app.state.documents = self.registry
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

    def resolve(self, path: str, body: Any, authorization: str = "") -> Any:
        """Return a body with the contents of stored documents in the places of their ids; the same object if it names none.

        Args:
            path: path of the request.
            body: decoded JSON body.
            authorization: Authorization header of the request.

        Raises:
            ApiError: as `with_texts`.
        """
        if not isinstance(body, Mapping):
            return body
        scope = Scope(self.keeper.owner_of(authorization), salt_of(path, body))
        self.keeper.note(scope.owner, authorization)

        def find(name: str, place: str) -> DocumentRecord:
            return self.registry.get(scope, name, place)

        return with_texts(path, body, find)


class BodyRoute(APIRoute):
    """Route whose body is a JSON object, read within the gateway's bounds."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a decoded body."""
        handler, field = super().get_route_handler(), self.body_field

        async def answer(request: Request) -> Response:
            if field is not None:
                config = request.app.state.documents.config
                most, headers = config.max_body_bytes, request.scope["headers"]
                body = request._body = await read_body(request.scope, request.receive, most, config.request_timeout_s)
                if body and "json" in request.headers.get("content-type", ""):
                    plain = await asyncio.to_thread(expanded_body, body, headers, most)
                    request._json, faults = field.validate(_decoded(plain), {}, loc=("body",))
                    if faults:
                        raise RequestValidationError(faults)
            return await handler(request)

        return answer


def _decoded(body: bytes) -> Any:
    """Return the value of a JSON body.

    Raises:
        ApiError: 400, the body is malformed.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


async def _raise(request: Request, error: Exception) -> Response:
    """Leave an unforeseen error to the gate, which answers it with the request's id."""
    raise error
