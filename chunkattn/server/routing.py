"""Answers to paths and methods that no route has, and HEAD for every route that has GET."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chunkattn.server.errors import ApiError

_LONGEST_PATH = 200
"""Characters of an unknown path that are compared and shown."""
_SCHEMA = "/openapi.json"


def route_path(scope: Scope) -> str:
    """Return the path of a request below `root_path`, as the router sees it.

    Args:
        scope: ASGI scope of the request.
    """
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class RouteTable:
    """Paths of the server's routes, with their methods.

    Args:
        routers: routers of the app.
    """

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._paths = [*dict.fromkeys(route.path for route in self._routes), _SCHEMA]

    def methods(self, path: str) -> list[str]:
        """Return the methods of a path, HEAD included where GET is; an empty list for an unknown path."""
        found = {method for route in self._routes if route.path_regex.match(path) for method in route.methods or ()}
        found |= {"GET"} if path == _SCHEMA else set()
        return sorted(found | ({"HEAD"} if "GET" in found else set()))

    def refusal(self, status: int, scope: Scope) -> ApiError:
        """Return the answer to a request that no route takes.

        Args:
            status: 404 for an unknown path, 405 for an unknown method.
            scope: ASGI scope of the request.
        """
        method, path = scope["method"], route_path(scope)
        shown = ascii(path[:_LONGEST_PATH])[1:-1]
        if status == 405 and (methods := self.methods(path)):
            text = f"{shown} takes {' or '.join(methods)}, not {ascii(method)[1:-1]}"
            return ApiError(405, text, code="method_not_allowed", Allow=", ".join(methods))
        near = difflib.get_close_matches(path[:_LONGEST_PATH], self._paths, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}? {_SCHEMA} lists all routes" if near else f"{_SCHEMA} lists all routes"
        return ApiError(404, f"there is no route {shown}; {hint}", code="not_found")


class HeadAsGet:
    """ASGI middleware that answers HEAD with the status and headers of GET, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to the app."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def headers_alone(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        own = {**scope, "method": "GET"}
        try:
            await self.app(own, receive, headers_alone)
        finally:
            if "route" in own:  # the outer middleware labels its metrics by route
                scope["route"] = own["route"]
