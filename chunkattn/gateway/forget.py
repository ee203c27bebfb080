"""Route `/v1/cache/forget` of the gateway: every replica forgets, because copies may be anywhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from chunkattn.gateway.bodies import decoded_json, expanded_body, read_body
from chunkattn.gateway.relay import outgoing_headers
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.routing.keys import keys_of
from chunkattn.routing.policy import Policy
from chunkattn.server.errors import ApiError

FORGET = "/v1/cache/forget"
_STORED = "/v1/cache/documents"


async def forget(
    scope: Scope, receive: Receive, replicas: Replicas, policy: Policy, max_body_bytes: int, timeout_s: float
) -> Response:
    """Send a request to all replicas, and return the answer of the first one.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI channel of its body.
        replicas: connection to the replicas.
        policy: policy whose record drops the documents.
        max_body_bytes: limit on the bytes of its body.
        timeout_s: time limit in seconds.

    Raises:
        ApiError: a replica has refused the request, or 503 with the names of those that cannot be reached.
    """
    body = await read_body(scope, receive, max_body_bytes, timeout_s)
    request = Outgoing(scope["method"], FORGET, scope.get("query_string", b""), outgoing_headers(scope), body)
    names = list(replicas.names())

    async def tell(name: str) -> tuple[int, bytes] | None:
        try:
            async with asyncio.timeout(timeout_s), aclosing(replicas.send(name, request)) as messages:  # type: ignore[type-var]
                start = await anext(messages)
                return start["status"], b"".join([message.get("body", b"") async for message in messages])
        except (ReplicaGoneError, TimeoutError, StopAsyncIteration):
            return None

    answers = dict(zip(names, await asyncio.gather(*map(tell, names)), strict=True))
    given = decoded_json(expanded_body(body, scope["headers"], max_body_bytes))
    authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    if isinstance(given, dict):
        documents, own = given.get("documents"), keys_of(_STORED, given, authorization).pieces
        count = len(documents) if isinstance(documents, list) else 0
        policy.forget([key for key, _ in own[max(0, len(own) - count) :]])
    if missed := [name for name, answer in answers.items() if answer is None or answer[0] >= 500]:
        text = f"replicas that cannot be reached may still hold the documents: {', '.join(missed)}; send the request again"
        raise ApiError(503, text, code="engine_not_ready", **{"Retry-After": "1"})
    told = [answer for answer in answers.values() if answer is not None]
    if not told:
        raise ApiError(503, "there is no replica; try again", code="no_replica", **{"Retry-After": "1"})
    status, content = next((answer for answer in told if answer[0] >= 400), told[0])
    return Response(content, status, media_type=JSONResponse.media_type)
