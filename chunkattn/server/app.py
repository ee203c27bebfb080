"""Construction of the ASGI app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

import chunkattn
from chunkattn.documents.routes import documents_router
from chunkattn.errors import ConfigError
from chunkattn.server.routes import (
    decisions,
    generation,
    messages,
    page,
    reports,
    responses,
    scoring,
    status,
    systemone,
    tokens,
)
from chunkattn.server.state import ServerState
from chunkattn.web import errors
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.cors import cors_options
from chunkattn.web.keys import API_KEY_HEADER
from chunkattn.web.middleware import METRICS_PATH, Gate, HeadAsGet
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import ANTHROPIC_PATHS
from chunkattn.web.route_table import RouteTable

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer. With `stream`: server-sent events of JSON; completions and chats end with `[DONE]`.",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    }
}


class _App(FastAPI):
    """FastAPI app. Its schema lists 400 where FastAPI lists its own 422, and the API key if the server needs a key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the router takes `root_path` off paths that begin with it."""
        if root_path := self.state.server.config.root_path:
            scope["root_path"] = root_path
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema of the routes."""
        schema = super().openapi()
        for operations in schema["paths"].values():
            for operation in operations.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        schemes: dict[str, Any] = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
        security: list[dict[str, list[str]]] = [{name: []} for name in schemes]
        if self.state.server.keys.needed:
            header = {API_KEY_HEADER: {"type": "apiKey", "in": "header", "name": API_KEY_HEADER}}
            schema["components"]["securitySchemes"] = schemes | header
            schema["security"] = security
            for path in ANTHROPIC_PATHS:
                schema["paths"][path]["post"]["security"] = [*security, {API_KEY_HEADER: []}]
        elif self.state.server.config.metrics_key is not None:
            schema["components"]["securitySchemes"] = schemes
            schema["paths"][METRICS_PATH]["get"]["security"] = security
        return schema


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """Return the app that serves an engine. The caller opens and closes the engine.

    Args:
        llm: engine that serves the routes. Routes that need it answer 503 until it has started.
        config: options of the server. The app ignores `port`; `host` decides which Host headers it accepts.

    Raises:
        ConfigError: the options of server and engine contradict each other, the key file is invalid, or the document store
            cannot be opened.
    """
    state = ServerState(llm, config or ServerConfig())
    if state.config.ready_when_warm and llm.config.warmup is False:
        raise ConfigError("ready_when_warm needs the warm-up, and warmup is False; leave one of the two out")
    app = _App(
        title="chunkattn",
        version=chunkattn.__version__,
        description="LLM inference for prompts made of many independent pieces.",
        docs_url=None,  # the docs pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the address of this server, whatever is in front
        telemetry={"tracing": False},  # the gate makes the spans, with and without FastAPI; versions before 0.142 ignore this
        responses=errors.error_responses(401, 403, 413, 500),
    )
    app.state.server, app.state.bodies = state, state.bodies
    app.state.documents = state.documents  # opens the document store
    documents = documents_router(JsonRoute)
    generating = [generation.router, responses.router]
    routers = [*generating, messages.router, scoring.router, decisions.router, systemone.router, documents]
    routers += [module.router for module in (tokens, status, page)]
    routers += [reports.router] if state.config.report_documents else []
    errors.install(app, RouteTable(routers).refusal)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Gate, state=state)
    if cors := cors_options(state.config):
        app.add_middleware(CORSMiddleware, **cors)
    work = errors.error_responses(400, 404, 429, 503, 504)
    for router in generating:
        app.include_router(router, responses=_STREAM | work)
    statuses = (400, 401, 403, 404, 413, 429, 500, 503, 504)
    described = errors.error_responses(*statuses, model=errors.MessagesErrorResponse)
    app.include_router(messages.router, responses=_STREAM | described)
    for router in (scoring.router, decisions.router, systemone.router, documents):
        app.include_router(router, responses=work)
    app.include_router(tokens.router, responses=errors.error_responses(400, 404, 503))
    if state.config.report_documents:
        app.include_router(reports.router, responses=errors.error_responses(400))
    for module in (status, page):
        app.include_router(module.router)
    return app
