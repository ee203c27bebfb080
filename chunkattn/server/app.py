"""The ASGI app."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

import chunkattn
from chunkattn.server import errors
from chunkattn.server.middleware import Gate
from chunkattn.server.options import ServerConfig
from chunkattn.server.routes import generation, page, scoring, status, tokens
from chunkattn.server.state import ServerState

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """An app over an engine, which whoever serves the app starts and closes.

    Args:
        llm: answers 503 until it is started.
        config: how to answer; host and port are not looked at.
    """
    state = ServerState(llm, config or ServerConfig())
    app = FastAPI(
        title="chunkattn",
        version=chunkattn.__version__,
        description="LLM inference for prompts made of many independent pieces.",
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = state
    errors.install(app)
    app.add_middleware(Gate, config=state.config, metrics=state.metrics)
    for module in (generation, scoring, tokens, status, page):
        app.include_router(module.router)
    return app
