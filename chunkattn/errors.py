"""Every error chunkattn raises on purpose.

All derive from `ChunkAttnError`. Those about a caller's input also derive from
`ValueError`, so generic callers can catch them without importing this module.
"""

from __future__ import annotations


class ChunkAttnError(Exception):
    """Base of all deliberate errors of this package."""


class ConfigError(ChunkAttnError, ValueError):
    """An engine option is unknown, malformed or contradicts another."""


class RequestError(ChunkAttnError, ValueError):
    """A prompt, scoring request or sampling parameter cannot be served.

    The error's text is the part's name, directly followed by the message.

    Args:
        message: what is wrong. Behind a part it begins with the space or the colon that separates them.
        param: name of the offending argument, for API error bodies.
        part: name of the offending part of that argument, such as "chunk 3", "prefix" or "item 2".
    """

    def __init__(self, message: str, *, param: str | None = None, part: str | None = None) -> None:
        super().__init__((part or "") + message)
        self.message, self.param, self.part = message, param, part

    def renamed(self, part: str | None, param: str | None) -> RequestError:
        """Return the same error about the part and the argument as the caller knows them."""
        return type(self)(self.message, param=param, part=part)


class CapacityError(RequestError):
    """The request is well formed but can never fit the configured limits."""


class ModelError(ChunkAttnError, ValueError):
    """A checkpoint is unsupported, incomplete or malformed."""


class BackendError(ChunkAttnError, ValueError):
    """An attention backend is unknown or refuses the requested setting."""


class OutOfPagesError(ChunkAttnError):
    """More KV pages were asked for than are free; the scheduler should have known."""


class EngineError(ChunkAttnError, RuntimeError):
    """A step failed while it computed a request; the engine goes on without that request."""


class EngineDeadError(EngineError):
    """The engine's process died, hung or is not ready; it is being started again unless it was closed."""


class QueueFullError(ChunkAttnError):
    """As many requests as `max_queued_requests` allows are on their way; send this one again later."""


class DeadlineExceededError(ChunkAttnError, TimeoutError):
    """The request's `timeout` passed before it ended; it has been aborted."""
