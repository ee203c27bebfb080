"""Access of pages of other origins (CORS)."""

from __future__ import annotations

from typing import Any

from chunkattn.web.options import ServerConfig
from chunkattn.web.request_log import TIMING_HEADER, TOKENS_HEADER

EXPOSED = ("X-Request-Id", "Retry-After", "X-Chunkattn-Replica", TIMING_HEADER, TOKENS_HEADER)
"""Headers of an answer that such pages may read."""


def cors_options(config: ServerConfig) -> dict[str, Any] | None:
    """Return the arguments of Starlette's `CORSMiddleware`; None if pages of other origins have no access.

    The middleware goes around `Gate`, because a preflight request carries no API key.

    Args:
        config: options of the server.
    """
    if not config.allowed_origins:
        return None
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": config.allowed_methods,
        "allow_headers": config.allowed_headers,
        "allow_credentials": config.allow_credentials,
        "expose_headers": EXPOSED,
    }
