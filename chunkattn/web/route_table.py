"""Answers to paths and methods that no route has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.types import Scope

from chunkattn.web.errors import ApiError
from chunkattn.web.middleware import route_path

_LONGEST_PATH = 200
"""Characters of an unknown path that are compared and shown."""
_SCHEMA = "/openapi.json"


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
        methods = {method for route in self._routes if route.path_regex.match(path) for method in route.methods or ()}
        methods |= {"GET"} if path == _SCHEMA else set()
        return sorted(methods | ({"HEAD"} if "GET" in methods else set()))

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
