"""Errors as HTTP answers in OpenAI's format, and their description by status."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from chunkattn.errors import (
    CapacityError,
    ChunkAttnError,
    DeadlineExceededError,
    EngineDeadError,
    MissingError,
    NonFiniteError,
    NotRenderedError,
    QueueFullError,
    RequestError,
)
from chunkattn.web.paths import ANTHROPIC_PATHS

logger = logging.getLogger(__name__)

_PASSING = (429, 503)
"""Statuses of requests that may succeed a second later."""
_REQUEST_CODES = {
    CapacityError: "context_length_exceeded",
    MissingError: "missing_required_parameter",
    NotRenderedError: "message_not_rendered",
    RequestError: "invalid_value",
}
"""Codes of errors in a request; a class comes before its base."""
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MESSAGES_TYPES = _TYPES | {
    403: "permission_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_WHEN = {
    400: "The request is malformed, or can never fit.",
    401: "The API key is missing or wrong.",
    403: "A server without an API key answers only to the names of its own machine.",
    404: "The named model, document, route or file does not exist.",
    413: "The body exceeds max_body_bytes.",
    422: "A field is malformed, or can never fit.",
    429: "The queue is full, or the API key holds its share of the queue; try again.",
    500: "The request failed in the server.",
    503: "The server accepts no work now; try again.",
    504: "The request took longer than request_timeout_s.",
}
_LONGEST_TEXT = 500
UNKNOWN_FIELD = "unknown_field"
"""Type of pydantic's error for a name that the body has no field for; the context holds the name."""
UNSUPPORTED_KIND = "unsupported_kind"
"""Type of pydantic's error for an object of a kind that the server does not read."""
_STATELESS = ": the server stores no answers; send the whole conversation as input"
_INSTEAD = {
    "chat_template": ": a template is a program, and may run forever; start the server with --chat-template",
    "conversation": _STATELESS,
    "previous_response_id": _STATELESS,
    **{f"guided_{name}": f'; send structured_outputs: {{"{name}": ...}}' for name in ("json", "regex", "choice", "grammar")},
}
"""Advice for fields of other servers that this one has no field for."""
_WORD = re.compile(r"\w+")
_FIELD = re.compile(r"[a-z_][a-z0-9_]*|\d+")
_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "none", "dict", "list"})


class ErrorDetail(BaseModel):
    """Description of one error."""

    message: Annotated[str, Field(description="Text for people.")]
    type: Literal["invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="Name of the request field at fault.")]
    code: Annotated[str | None, Field(description="Identifier for programs.")]


class ErrorResponse(BaseModel):
    """Body of every error answer, in OpenAI's format; that of `/v1/messages` excepted."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """Description of one error, of Anthropic's types."""

    message: Annotated[str, Field(description="Text for people.")]
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ]
    param: Annotated[str | None, Field(description="Name of the request field at fault.")]
    code: Annotated[str | None, Field(description="Identifier for programs.")]


class MessagesErrorResponse(BaseModel):
    """Body of an error answer of `/v1/messages`, in Anthropic's format, with `param` and `code` as OpenAI's has them."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: Annotated[str, Field(description="Id of the request.")]


class ApiError(Exception):
    """Error that a route answers with.

    Args:
        status: HTTP status.
        message: text for people.
        param: name of the request field at fault.
        code: identifier for programs.
        headers: additional response headers.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers
        if status in _PASSING:
            headers.setdefault("Retry-After", "1")

    @property
    def body(self) -> dict[str, Any]:
        """Return the response body, `{"error": {...}}`."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _clean(self.param)
        return {"error": {"message": _clean(self.message), "type": kind, "param": param, "code": self.code}}


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error answer, in the format of the route's API.

    Args:
        error: the error.
        path: path of the request, with or without the `root_path` of the server.
        request_id: id of the request.
    """
    body = error.body
    if not path.endswith(ANTHROPIC_PATHS):
        return body
    kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": body["error"] | {"type": kind}, "request_id": request_id}


def api_error(error: Exception, request_id: str) -> ApiError:
    """Return the answer to an error. Internal defects are logged; their answer holds the request id alone.

    Args:
        error: any exception.
        request_id: id of the HTTP request.
    """
    match error:
        case ApiError():
            return error
        case RequestError():
            code = next(code for kind, code in _REQUEST_CODES.items() if isinstance(error, kind))
            return ApiError(400, _short(error), param=error.param, code=code)
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case DeadlineExceededError():
            return ApiError(504, str(error), code="timeout")
        case EngineDeadError():
            return ApiError(503, "the engine is not ready; try again", code="engine_not_ready")
        case NonFiniteError():
            return ApiError(500, str(error), code="non_finite")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), code=_code(error.status_code), **(error.headers or {}))
        case RequestValidationError():
            return _validation_error(error.errors())
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the request failed in the server; its id is {request_id}", code="internal_error")


def error_responses(*statuses: int, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error answers.

    Args:
        *statuses: HTTP statuses that a route can answer with.
        model: body of the answers.
    """
    return {status: {"model": model, "description": _WHEN[status]} for status in statuses}


def renamed(error: ChunkAttnError | ApiError, names: Mapping[str, str]) -> ChunkAttnError | ApiError:
    """Return an error under a client's own names of arguments, in its `param` and in its message.

    Args:
        error: the error. One that names no argument is returned as it is.
        names: own names by the names of the arguments.
    """
    message = getattr(error, "message", None)
    if message is None or not names or not isinstance(error, (RequestError, ApiError)):
        return error
    for name, new_name in names.items():
        # A name without an underscore is also a word of the language, and stands for the argument at the beginning alone.
        message = re.sub(rf"\b{name}\b" if "_" in name else rf"^{name}\b", new_name, message)
    param = names.get(error.param or "", error.param)
    if isinstance(error, RequestError):
        return type(error)(message, param=param, part=error.part)
    return ApiError(error.status, message, param=param, code=error.code, **error.headers)


def too_large(most: int) -> ApiError:
    """Return the refusal of a body.

    Args:
        most: limit on the bytes of a body.
    """
    return ApiError(413, f"the body exceeds max_body_bytes {most}", code="request_too_large")


def _code(status: int) -> str | None:
    return {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(status)


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """Return the answer to pydantic's errors: one error, with the field's name and its place in the body.

    Args:
        errors: the errors; every branch of a union reports its own.
    """
    kind = next((error for error in errors if error["type"] == UNSUPPORTED_KIND), None)
    if kind is not None:
        place = _place(kind["loc"])
        text = f"{'.'.join(map(str, place))}: {kind['msg']}"
        return ApiError(400, _short(text), param=str(place[0]), code="unsupported_parameter")
    unknown = next((error for error in errors if error["type"] in ("extra_forbidden", UNKNOWN_FIELD)), None)
    if unknown is not None:
        is_named = unknown["type"] == UNKNOWN_FIELD
        field = str(unknown["ctx"]["name"] if is_named else unknown["loc"][-1])
        path = ".".join(map(str, [*_place(unknown["loc"] if is_named else unknown["loc"][:-1]), field]))
        hint = _INSTEAD.get(field, "")
        return ApiError(
            400, _short(f"{path} is not supported by this server{hint}"), param=_short(field), code="unsupported_parameter"
        )
    first = errors[0]
    name = next(iter(_place(first["loc"])), None)
    if name is None and first["type"] == "missing":
        return ApiError(400, "the request has no body", code="missing_required_parameter")
    if name is None and first["type"] in ("model_attributes_type", "dict_type"):
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    # Each branch of a union reports an error. The branch that read furthest matches the form that the client sent.
    places = [(place, error) for error in errors if next(iter(place := _place(error["loc"])), None) == name]
    where = max((place for place, _ in places), key=lambda place: ([p for p in place if isinstance(p, int)], len(place)))
    path = ".".join(map(str, where))
    deepest = [error for place, error in places if place == where]
    if all(error["type"] == "missing" for error in deepest):
        return ApiError(400, f"{path} is missing", param=str(name), code="missing_required_parameter")
    texts = dict.fromkeys(error["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for error in deepest)
    text = " or ".join(texts).replace("a valid dictionary or object to extract fields from", "an object")
    if deepest[0]["msg"].startswith("Input should be "):
        text = f"Input should be {text}"
    if name is None:  # a check of several fields: its text begins with the field at fault
        fields = deepest[0].get("input")
        param = next((w for w in _WORD.findall(text) if w in fields), None) if isinstance(fields, dict) else None
        return ApiError(400, _short(text), param=param, code="invalid_value")
    return ApiError(400, _short(f"{path}: {text}"), param=str(name), code="invalid_value")


def _place(parts: Sequence[str | int]) -> list[str | int]:
    """Return the fields and indices that lead to an error, without the names of a union's branches."""
    # The first part is "body", "query" or "path". Branches are named after types: `str`, `list[int]`, `DocumentOrId`.
    fields = list[str | int]()
    for before, part in pairwise(parts):
        is_field = isinstance(part, int) or (_FIELD.fullmatch(part) and part not in _TYPE_NAMES)
        if is_field or before == "questions":  # questions have names that the client gave
            fields.append(part)
    return fields


def _clean(text: str) -> str:
    """Replace lone surrogates: JSON can escape them, UTF-8 cannot encode them."""
    return text.encode("utf-8", "replace").decode()


def _short(error: object) -> str:
    text = str(error)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def _release(error: BaseException) -> None:
    """Clear the frames of an answered error: they keep the request body alive, and some keep the error alive."""
    pending: list[Any] = [error]
    if isinstance(error, RequestValidationError):  # pydantic keeps the validators' exceptions in `ctx`
        pending += [detail.get("ctx", {}).get("error") for detail in error.errors()]
    while pending:
        exception = pending.pop()
        if isinstance(exception, BaseException) and exception.__traceback__ is not None:
            traceback.clear_frames(exception.__traceback__)
            exception.__traceback__ = None
            pending += [exception.__cause__, exception.__context__]


def install(app: FastAPI, refuse_route: Callable[[int, Scope], ApiError]) -> None:
    """Register handlers that answer every error of a route in the format of `ApiError`.

    Args:
        app: the app.
        refuse_route: returns the answer to a request that no route takes, from status and ASGI scope.
    """

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            refusal = refuse_route(error.status_code, request.scope)
        else:
            refusal = api_error(error, request.state.request_id)
        _release(error)
        status = refusal.status
        if status == 400 and refusal.param is not None:  # a fault in a field
            status = getattr(request.scope.get("route"), "field_status", status)
        body = error_body(refusal, request.scope["path"], request.state.request_id)
        return JSONResponse(body, status, refusal.headers)

    for kind in (ApiError, ChunkAttnError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)
