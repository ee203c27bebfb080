"""Format of error answers, and their description by status."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

_WHEN = {
    400: "The request is malformed, or can never fit.",
    401: "The API key is missing or wrong.",
    403: "A server without an API key answers only to the names of its own machine.",
    404: "The named model, document, route or file does not exist.",
    413: "The body exceeds max_body_bytes.",
    429: "The queue is full, or the API key holds its share of the queue; try again.",
    500: "The request failed in the server.",
    503: "The server accepts no work now; try again.",
    504: "The request took longer than request_timeout_s.",
}


class ErrorDetail(BaseModel):
    """Description of one error."""

    message: Annotated[str, Field(description="Text for people.")]
    type: Literal["invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="Name of the request field at fault.")]
    code: Annotated[str | None, Field(description="Identifier for programs.")]


class ErrorResponse(BaseModel):
    """Body of every error answer, in OpenAI's format."""

    error: ErrorDetail


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error answers.

    Args:
        *statuses: HTTP statuses that a route can answer with.
    """
    return {status: {"model": ErrorResponse, "description": _WHEN[status]} for status in statuses}
