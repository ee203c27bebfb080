"""`ReplicaAnswer`: whole answer of a replica to a request of the gateway."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import error_code
from chunkattn.web.errors import ApiError

_UNKNOWN_ROUTE = (404, 405)


class ReplicaAnswer(NamedTuple):
    """Whole answer of a replica.

    Attributes:
        status: HTTP status.
        body: decoded JSON body; None for a body that is no JSON.
    """

    status: int
    body: Any

    @property
    def is_unknown_route(self) -> bool:
        """Return whether the replica has no such route, as vLLM's servers."""
        return self.status in _UNKNOWN_ROUTE and error_code(self.body) not in ("document_not_found", "model_not_found")

    @property
    def is_final(self) -> bool:
        """Return whether the replica needs no further request of the same kind."""
        return self.status < 500 and self.status != 429


async def answer_of(replicas: Replicas, name: str, request: Outgoing, timeout_s: float) -> ReplicaAnswer:
    """Return the whole answer of a replica.

    Args:
        replicas: the replicas.
        name: name of the replica.
        request: request to the replica.
        timeout_s: time limit in seconds.

    Raises:
        ReplicaGoneError: the replica is gone, or has not answered in time.
    """
    status, body = 0, bytearray()
    try:
        async with asyncio.timeout(timeout_s), aclosing(replicas.send(name, request)) as messages:  # type: ignore[type-var]
            async for message in messages:
                status = message.get("status", status)
                body += message.get("body", b"")
    except TimeoutError:
        raise ReplicaGoneError(f"replica {name} has not answered within {timeout_s:g} s") from None
    try:
        return ReplicaAnswer(status, json.loads(bytes(body) or b"null"))
    except ValueError:
        return ReplicaAnswer(status, None)


def refusal_of(answer: ReplicaAnswer, numbers: Sequence[int]) -> ApiError:
    """Return the refusal of a replica, whose text names documents by their places in the client's request.

    Args:
        answer: answer of the replica.
        numbers: places of the documents of the request to the replica.
    """

    def place(match: re.Match[str]) -> str:
        number = int(match[2])
        return f"{match[1]}{numbers[number]}" if number < len(numbers) else match[0]

    error = answer.body.get("error") if isinstance(answer.body, Mapping) else None
    error = error if isinstance(error, Mapping) else {}
    text = re.sub(r"\b(documents\.|document )(\d{1,9})\b", place, str(error.get("message", "a replica refuses the documents")))
    return ApiError(answer.status, text, param=error.get("param"), code=error.get("code"))
