"""Route `/v1/cache/forget` of the gateway: every replica forgets, because copies may be anywhere."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from chunkattn.gateway.document_places import DOCUMENTS, FORGET, Answer, ask
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.relay import outgoing_headers
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import is_passing, retried
from chunkattn.schema.piece_keys import keys_of
from chunkattn.web.bodies import Bodies, UnreadableError
from chunkattn.web.errors import ApiError
from chunkattn.web.time_limit import TimeLimitError, time_limit


async def forget(
    scope: Scope,
    receive: Receive,
    replicas: Replicas,
    policy: Policy,
    *,
    bodies: Bodies,
    timeout_s: float,
    patience_s: float,
) -> Response:
    """Send a request to all replicas, and return the answer of the first one.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI channel of its body.
        replicas: connection to the replicas.
        policy: policy whose record drops the documents.
        bodies: reader of the body.
        timeout_s: time limit of all replicas together in seconds.
        patience_s: time in seconds for which a replica that starts or stops is asked again. One that leaves has forgotten.

    Raises:
        ApiError: a replica has refused the request, the client has left, or 503 with the names of the replicas that cannot be
            reached or have not answered in time.
    """
    body, keys = await bodies.receive(scope, receive), list[int]()
    authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    with suppress(UnreadableError):  # the replicas answer
        keys = await bodies.decode(scope, body, lambda value: _document_keys(value, authorization))
    request = Outgoing(scope["method"], FORGET, scope.get("query_string", b""), outgoing_headers(scope), body)

    async def known() -> list[str]:
        return list(replicas.names())

    answers: dict[str, Answer | None] = {}

    async def tell(name: str) -> None:
        answers[name] = None
        answers[name] = await retried(lambda: tell_once(name), lambda answer: is_told(name, answer), patience_s)

    def is_told(name: str, answer: Answer | None) -> bool:
        return name not in replicas.names() if answer is None else not is_passing(answer.status, answer.body)

    async def tell_once(name: str) -> Answer | None:
        with suppress(ReplicaGoneError):
            return await ask(replicas, name, request, timeout_s)
        return None

    with suppress(TimeLimitError):  # then the replicas that have not answered are named
        async with time_limit(receive, timeout_s):
            await asyncio.gather(*map(tell, await retried(known, bool, patience_s)))
    policy.forget(keys)
    left = replicas.names()
    if missed := [n for n, answer in answers.items() if (n in left if answer is None else answer.status >= 500)]:
        text = f"replicas that cannot be reached may still hold the documents: {', '.join(missed)}; send the request again"
        raise ApiError(503, text, code="engine_not_ready", **{"Retry-After": "1"})
    told = [answer for answer in answers.values() if answer is not None]
    if not told:
        raise ApiError(503, "there is no replica; try again", code="no_replica", **{"Retry-After": "1"})
    first = next((answer for answer in told if answer.status >= 400), told[0])
    return JSONResponse(first.body, first.status)


def _document_keys(body: Any, authorization: str) -> list[int]:
    """Return the routing keys of the documents of a body."""
    documents = body.get("documents") if isinstance(body, dict) else None
    if not isinstance(documents, list):
        return []
    pieces = keys_of(DOCUMENTS, body, authorization).pieces
    return [key for key, _ in pieces[max(0, len(pieces) - len(documents)) :]]
