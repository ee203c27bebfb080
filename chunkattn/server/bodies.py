"""JSON request bodies. msgspec decodes large bodies, because the event loop waits during decoding."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

_LARGE = 1 << 16
"""Size in bytes up to which `json` decodes a body: its errors name the position of the fault."""


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _LARGE:
            return await super().json()
        # Collections would walk through millions of new objects again and again, until the body is validated.
        gc.disable()
        asyncio.get_running_loop().call_soon(gc.enable)
        try:
            return msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """Route for large JSON bodies; pass the class to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped so that the request decodes its own body."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return answer
