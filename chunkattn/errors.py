"""Exceptions that chunkattn raises on purpose.

All derive from `ChunkAttnError`. Errors about a caller's input also derive from `ValueError`, so generic callers can catch
them without importing this module.
"""

from __future__ import annotations

from typing import Any


class ChunkAttnError(Exception):
    """Base class of all deliberate errors of this package."""


class ConfigError(ChunkAttnError, ValueError):
    """Unknown, malformed or contradictory option."""


class RequestError(ChunkAttnError, ValueError):
    """Prompt, scoring request or sampling parameter that cannot be served.

    The text of the error is the part's name, directly followed by the message.

    Args:
        message: description of the fault. After a part, the message begins with the space or colon that separates the two.
        param: name of the argument at fault, for API error bodies.
        part: name of the part of that argument at fault, such as "chunk 3", "prefix" or "item 2".
    """

    def __init__(self, message: str, *, param: str | None = None, part: str | None = None) -> None:
        super().__init__((part or "") + message)
        self.message, self.param, self.part = message, param, part


class MissingError(RequestError):
    """Request without an argument that it needs."""


class NotRenderedError(RequestError):
    """Chat message that the chat template leaves out, so the model would not see it."""


class CapacityError(RequestError):
    """Well-formed request that can never fit the configured limits."""


class ModelError(ChunkAttnError, ValueError):
    """Unsupported, incomplete or malformed checkpoint."""


class BackendError(ChunkAttnError, ValueError):
    """Unknown attention backend, or setting that the backend refuses."""


class OutOfPagesError(ChunkAttnError):
    """Demand for more KV pages than are free: a defect of the scheduler, which checks first."""


class EngineError(ChunkAttnError, RuntimeError):
    """Failure of a step that computed this request; the engine continues without the request."""


class NonFiniteError(EngineError):
    """Request with a value that is NaN or infinite; the engine continues without the request and keeps nothing it computed."""


class EngineDeadError(EngineError):
    """Engine process that died, hung or is not ready. The process is restarted unless the engine was closed."""


class QueueFullError(ChunkAttnError):
    """Queue that holds `max_queued_requests` requests already; send the request again later."""


class DeadlineExceededError(ChunkAttnError, TimeoutError):
    """Request that was aborted because its `timeout` passed."""


def shown(value: Any) -> str:
    """Return a short text of a value, for error messages.

    Python writes no integer of more than 4,300 digits and no deeply nested list, so both are described.

    Args:
        value: any value.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float, str, type(None))):
        return repr(value[:40] if isinstance(value, str) else value)
    return f"a value of type {type(value).__name__}" if not isinstance(value, (list, dict)) else f"a {type(value).__name__}"
