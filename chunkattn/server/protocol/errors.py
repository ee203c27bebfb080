"""What every error looks like, and which a route can give."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

_WHEN = {
    400: "The request is malformed, or can never fit.",
    401: "The API key is missing or wrong.",
    403: "A server without a key answers to this machine's own names alone.",
    404: "What the request names is not here.",
    413: "The body exceeds max_body_bytes.",
    429: "Too many requests are on their way, in all or of one API key; try again.",
    500: "The request failed in the server.",
    503: "The server takes no work now; try again.",
    504: "request_timeout_s has passed.",
}


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: Annotated[str, Field(description="For people.")]
    type: Literal["invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="The field of the request it is about.")]
    code: Annotated[str | None, Field(description="For programs.")]


class ErrorResponse(BaseModel):
    """Every answer that is an error, as OpenAI's are."""

    error: ErrorDetail


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors of these statuses, for OpenAPI."""
    return {status: {"model": ErrorResponse, "description": _WHEN[status]} for status in statuses}
