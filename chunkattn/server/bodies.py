"""JSON bodies: large ones are decoded by msgspec, for the event loop waits while a body is decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

_LARGE = 1 << 16
"""Bytes. Up to this many, `json` tells better what is wrong and where."""


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _LARGE:
            return await super().json()
        try:
            return msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """A route for large JSON bodies; pass it to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI made, given a request of our own kind."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return answer
