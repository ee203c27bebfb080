"""Route `/v1/cache/forget` of the gateway: every replica forgets, because copies may be anywhere."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from chunkattn.gateway.bodies import decoded_json, expanded_body, read_body
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.relay import outgoing_headers
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import is_passing, retried
from chunkattn.gateway.time_limit import TimeLimitError, time_limit
from chunkattn.schema.piece_keys import keys_of
from chunkattn.web.errors import ApiError

FORGET = "/v1/cache/forget"
_STORED = "/v1/cache/documents"


async def forget(
    scope: Scope,
    receive: Receive,
    replicas: Replicas,
    policy: Policy,
    *,
    max_body_bytes: int,
    timeout_s: float,
    patience_s: float,
) -> Response:
    """Send a request to all replicas, and return the answer of the first one.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI channel of its body.
        replicas: connection to the replicas.
        policy: policy whose record drops the documents.
        max_body_bytes: limit on the bytes of its body.
        timeout_s: time limit of the body, and of all replicas together, in seconds.
        patience_s: time in seconds for which a replica that starts or stops is asked again. One that leaves has forgotten.

    Raises:
        ApiError: a replica has refused the request, the client has left, or 503 with the names of the replicas that cannot be
            reached or have not answered in time.
    """
    body = await read_body(scope, receive, max_body_bytes, timeout_s)
    request = Outgoing(scope["method"], FORGET, scope.get("query_string", b""), outgoing_headers(scope), body)

    async def known() -> list[str]:
        return list(replicas.names())

    answers: dict[str, tuple[int, bytes] | None] = {}

    async def tell(name: str) -> None:
        answers[name] = None
        answers[name] = await retried(lambda: tell_once(name), lambda answer: is_told(name, answer), patience_s)

    def is_told(name: str, answer: tuple[int, bytes] | None) -> bool:
        if answer is None:
            return name not in replicas.names()
        return not is_passing(answer[0], decoded_json(answer[1]))

    async def tell_once(name: str) -> tuple[int, bytes] | None:
        try:
            async with aclosing(replicas.send(name, request)) as messages:  # type: ignore[type-var]
                start = await anext(messages)
                return start["status"], b"".join([message.get("body", b"") async for message in messages])
        except (ReplicaGoneError, StopAsyncIteration):
            return None

    with suppress(TimeLimitError):  # then the replicas that have not answered are named
        async with time_limit(receive, timeout_s):
            await asyncio.gather(*map(tell, await retried(known, bool, patience_s)))
    given = decoded_json(expanded_body(body, scope["headers"], max_body_bytes))
    authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    if isinstance(given, dict):
        documents, own = given.get("documents"), keys_of(_STORED, given, authorization).pieces
        count = len(documents) if isinstance(documents, list) else 0
        policy.forget([key for key, _ in own[max(0, len(own) - count) :]])
    left = replicas.names()
    if missed := [n for n, answer in answers.items() if (n in left if answer is None else answer[0] >= 500)]:
        text = f"replicas that cannot be reached may still hold the documents: {', '.join(missed)}; send the request again"
        raise ApiError(503, text, code="engine_not_ready", **{"Retry-After": "1"})
    told = [answer for answer in answers.values() if answer is not None]
    if not told:
        raise ApiError(503, "there is no replica; try again", code="no_replica", **{"Retry-After": "1"})
    status, content = next((answer for answer in told if answer[0] >= 400), told[0])
    return Response(content, status, media_type=JSONResponse.media_type)
