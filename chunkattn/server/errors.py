"""Errors as HTTP answers, all in OpenAI's shape."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from chunkattn.errors import (
    CapacityError,
    ChunkAttnError,
    DeadlineExceededError,
    EngineDeadError,
    QueueFullError,
    RequestError,
)

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST_TEXT = 500


class ApiError(Exception):
    """An answer other than the one asked for.

    Args:
        status: of HTTP.
        message: for people.
        param: the field of the request it is about.
        code: for programs.
        headers: beside the usual.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": ...}`."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _clean(self.param)
        return {"error": {"message": _clean(self.message), "type": kind, "param": param, "code": self.code}}


def api_error(error: Exception, request_id: str) -> ApiError:
    """What a client is told of an error; of defects only the request's id."""
    match error:
        case ApiError():
            return error
        case CapacityError():
            return ApiError(400, _short(error), param=error.param, code="context_length_exceeded")
        case RequestError():
            return ApiError(400, _short(error), param=error.param, code="invalid_value")
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", **{"Retry-After": str(_RETRY_AFTER_S)})
        case DeadlineExceededError():
            return ApiError(504, str(error), code="timeout")
        case EngineDeadError():
            text = "the engine is not ready; try again"
            return ApiError(503, text, code="engine_not_ready", **{"Retry-After": str(_RETRY_AFTER_S)})
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), code=_code(error.status_code), **(error.headers or {}))
        case RequestValidationError():
            return _validation_error(error.errors())
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the request failed in the server; its id is {request_id}", code="internal_error")


def _code(status: int) -> str | None:
    return {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(status)


def _validation_error(found: Sequence[Any]) -> ApiError:
    """The first thing wrong with a body, by the field's name."""
    first = next((error for error in found if error["type"] == "extra_forbidden"), found[0])
    where = [str(part) for part in first["loc"][1:]]  # behind "body", "query" or "path"
    # Of a union every branch complains; the first names are the fields, what follows the branches.
    name = where[0] if where else None
    match first["type"]:
        case "json_invalid":
            reason = first.get("ctx", {}).get("error", "")
            return ApiError(400, f"the body is no valid JSON: {reason}", code="invalid_json")
        case "missing" if name is None:
            return ApiError(400, "the request has no body", code="missing_required_parameter")
        case "missing":
            return ApiError(400, f"{'.'.join(where)} is missing", param=name, code="missing_required_parameter")
        case "extra_forbidden":
            unknown = where[-1]
            return ApiError(400, f"{unknown} is not supported by this server", param=unknown, code="unsupported_parameter")
        case "model_attributes_type" | "dict_type" if name is None:
            return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    text = first["msg"].removeprefix("Value error, ")
    return ApiError(400, _short(f"{'.'.join(where)}: {text}" if where else text), param=name, code="invalid_value")


def _clean(text: str) -> str:
    """Without lone surrogates, which JSON can bring in and UTF-8 cannot bring out."""
    return text.encode("utf-8", "replace").decode()


def _short(error: object) -> str:
    text = str(error)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def _release(error: BaseException) -> None:
    """Clear the frames of an error that has been answered: they hold the request's body, and some hold the error itself."""
    found: list[Any] = [error]
    if isinstance(error, RequestValidationError):  # the validators' own errors
        found += [detail.get("ctx", {}).get("error") for detail in error.errors()]
    while found:
        one = found.pop()
        if isinstance(one, BaseException) and one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            found += [one.__cause__, one.__context__]


def install(app: FastAPI) -> None:
    """Let every error of a route end as `ApiError` does."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        told = api_error(error, request.state.request_id)
        _release(error)
        return JSONResponse(told.body, told.status, told.headers)

    for kind in (ApiError, ChunkAttnError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)
