"""Routes of models, health, metrics and version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

import chunkattn
from chunkattn.adapter_salt import folders_of
from chunkattn.errors import EngineDeadError
from chunkattn.server.state import ServerState, State
from chunkattn.web.errors import error_responses

router = APIRouter(tags=["status"])

_METRICS_WAIT_S = 0.1
"""Seconds to wait for the engine's metrics of now."""
_OPEN: dict[str, Any] = {"security": []}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The server is not ready, and why.", "content": {"application/json": {"schema": {}}}},
    **error_responses(400),
}
Warm = Annotated[bool, Query(description="Answer 503 until the server is warm.")]
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/v1/models")
async def models(state: State) -> dict[str, Any]:
    """List the served model, once for each of its names, and its adapters: `data` as OpenAI does, `models` as TypeSafe does."""
    released = datetime.fromtimestamp(state.started, UTC).date().isoformat()
    about = {"description": "Served by chunkattn.", "release_date": released}
    names = (*state.model_names, *state.llm.config.lora_names)
    models = [{"name": name, **about} for name in names]
    return {"object": "list", "data": [_model(state, name) for name in names], "models": models}


@router.get("/v1/models/{name:path}", responses=error_responses(404))
async def model(name: str, state: State) -> dict[str, Any]:
    """Return the model of a name."""
    state.check_model(name)
    return _model(state, name)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    limits, adapters = state.llm.client.limits, folders_of(state.llm.config.lora_modules)
    parent = {"parent": state.model_name} if name in adapters else {}
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "chunkattn",
        "root": adapters.get(name, state.model_name),
        **parent,
        "max_model_len": None if limits is None else limits.max_model_len,
        "decide_method": state.llm.decide_method,
    }


@router.get("/livez", openapi_extra=_OPEN)
async def livez() -> dict[str, str]:
    """Return 200 while the server runs."""
    return {"status": "alive"}


@router.get("/ping", responses=_NOT_READY, openapi_extra=_OPEN)
@router.post("/ping", responses=_NOT_READY, openapi_extra=_OPEN, include_in_schema=False)
@router.get("/readyz", responses=_NOT_READY, openapi_extra=_OPEN)
@router.get("/health", responses=_NOT_READY, openapi_extra=_OPEN)
async def readyz(state: State, warm: Warm = False) -> Response:
    """Return 200 when requests are accepted, else 503 with the reason; `warm` once every program has been compiled ahead."""
    status, client = state.probe(warm=warm), state.llm.client
    body: dict[str, Any] = {"status": status, "warm": client.is_warm}
    body |= {"engine": client.state, "engine_restarts": client.restarts, "started": state.started}
    if client.warmup is not None:
        body["warmup"] = dict(zip(("done", "total"), client.warmup))
    if client.compiling_s:
        body["compiling_s"] = round(client.compiling_s, 3)
    if status != "ready":
        body["reason"] = _reason(status, state)
    return JSONResponse(body, 200 if status == "ready" else 503)


def _reason(status: str, state: ServerState) -> str:
    """Return why a server is not ready."""
    client = state.llm.client
    match status:
        case "unresponsive":
            limit = state.config.unresponsive_after_s
            return f"the engine has not answered for {client.unresponsive_s:.1f} s (unresponsive_after_s is {limit:g})"
        case "warming" if client.warmup is not None:
            return f"{client.warmup[0]} of {client.warmup[1]} programs are compiled"
        case "draining":
            return "the server has got SIGTERM, and finishes running requests"
        case "starting" if client.is_ready and state.llm.decide_method is None:
            return "the method of decisions is being chosen"
        case "starting" if client.is_ready:
            return "stored documents are being restored"
    return client.reason


@router.get("/metrics", response_class=Response, responses=_METRICS)
async def metrics(state: State) -> Response:
    """Return the metrics of engine and server in Prometheus's text format; without an engine, the server's alone.

    While the engine is busy with one step or compilation, its metrics are the last known ones.
    """
    try:
        text, age = await state.llm.client.recent_metrics(_METRICS_WAIT_S)
    except EngineDeadError:
        text, age = "", 0.0
    server_text = state.engine_gauges.text(state.llm.client, age) + generate_latest(state.metrics.registry).decode()
    return Response(text + server_text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/info", responses=error_responses(503))
async def info(state: State) -> dict[str, Any]:
    """Describe the model and the limits in the form of text-embeddings-inference (TEI)."""
    state.check_ready()
    limits, config = state.llm.client.limits, state.llm.config
    assert limits is not None
    label = "LABEL_0"  # a reranker of TEI has one label
    return {
        "model_id": state.model_name,
        "model_sha": None,
        "model_dtype": config.dtype,
        "model_type": {"reranker": {"id2label": {"0": label}, "label2id": {label: 0}}},
        "max_concurrent_requests": config.max_queued_requests,
        "max_input_length": limits.max_model_len,
        "max_batch_tokens": config.max_num_batched_tokens,
        "max_batch_requests": config.max_num_seqs,
        "max_client_batch_size": config.max_items_per_request,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": chunkattn.__version__,
    }


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of the package."""
    return {"version": chunkattn.__version__}
