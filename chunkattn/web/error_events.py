"""Events that end a stream with an error, in the form of each API, and events named by their type."""

from __future__ import annotations

from typing import Any

from chunkattn.web.errors import ApiError, error_body
from chunkattn.web.events import event_of
from chunkattn.web.paths import MESSAGES_PATH, RESPONSES_PATH

DONE = "data: [DONE]\n\n"
"""Last event of a stream of completions and chats."""


def named_event(body: dict[str, Any]) -> str:
    """Return the event that carries a JSON object, named by the object's `type`.

    Args:
        body: the object.
    """
    return f"event: {body['type']}\n{event_of(body)}"


def error_events(error: ApiError, path: str, request_id: str, number: int = 0) -> str:
    """Return the text that ends a stream with an error, in the form of the route's API.

    Args:
        error: the error.
        path: path of the request, with or without the `root_path` of the server.
        request_id: id of the request.
        number: number of the event in a stream of `/v1/responses`.
    """
    body = error_body(error, path, request_id)
    if path.endswith(MESSAGES_PATH):
        return named_event(body)
    if path.endswith(RESPONSES_PATH):
        told = {name: body["error"][name] for name in ("code", "message", "param")}
        return named_event({"type": "error", "sequence_number": number, **told, **body})  # some clients read `error` alone
    return event_of(body) + DONE
