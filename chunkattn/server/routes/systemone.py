"""Route of `/v1/systemone`: named typed questions about one state."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response

from chunkattn.schema.systemone import SystemOneBody
from chunkattn.server.routes.decisions import decide
from chunkattn.server.state import CallerOf, State
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.errors import ApiError, error_responses


class SystemOneRoute(JsonRoute):
    """Route that answers a fault in a field with 422, as TypeSafe's server does. A body that is no JSON stays a 400."""

    field_status = 422

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of `JsonRoute`, which refuses bodies with assets by name."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if request.headers.get("content-type", "").startswith("multipart/form-data"):
                text = "assets are not supported: this server reads text alone, sent as application/json"
                raise ApiError(400, text, param="assets", code="unsupported_parameter")
            return await handler(request)

        return answer


router = APIRouter(route_class=SystemOneRoute, tags=["decisions"])


@router.post("/v1/systemone", responses=error_responses(422))
async def systemone(body: SystemOneBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer named typed questions about one state, in TypeSafe's format."""
    return await decide(body, request, state, caller)
