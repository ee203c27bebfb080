"""`ChunkEndpoints`: plugin of vLLM's server, for `documents` in chats and chunks in completions."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from pydantic import StrictBool, model_validator
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import api_router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMValidationError

from chunkattn.errors import ConfigError
from chunkattn.integrations.vllm.chunk_options import CONNECTOR, check_parallel, server_options
from chunkattn.integrations.vllm.engine_client import ChunkEngineClient
from chunkattn.integrations.vllm.rendering import ChunkRenderer

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient
    from vllm.tasks import SupportedTask


class ChunkChatRequest(ChatCompletionRequest):
    """Body of `/v1/chat/completions`, whose `documents` may be texts, token ids or objects with a text."""

    documents: list[Any] | None = None  # ChunkRenderer checks the entries
    focus: Any = None  # ChunkRenderer refuses it
    chunk_mode: Any = None  # ChunkRenderer refuses "joined"


class ChunkCompletionRequest(CompletionRequest):
    """Body of `/v1/completions`, with `chunks` instead of a prompt, and `chunk_aware`."""

    chunks: Any = None  # ChunkRenderer checks them
    chunk_aware: StrictBool | None = None
    focus: Any = None  # ChunkRenderer refuses it
    chunk_mode: Any = None  # ChunkRenderer refuses "joined"

    @model_validator(mode="before")
    @classmethod
    def _take_chunks(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("chunks") is None:
            return data
        if data.get("prompt"):
            raise VLLMValidationError("prompt and chunks exclude each other; leave prompt out or empty", parameter="chunks")
        return {**data, "prompt": [0]}  # vLLM wants a prompt; ChunkRenderer reads the chunks


class ChunkEndpoints:
    """Endpoint plugin `chunkattn`: entry point of the group `vllm.endpoint_plugins`, loaded if `VLLM_PLUGINS` names it.

    It widens the bodies of two routes, and puts `ChunkRenderer` and `ChunkEngineClient` between vLLM's handlers and its engine.
    """

    name = "chunkattn"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Replace the routes of chats and completions by routes with wider bodies. Their handlers are vLLM's."""

        @app.post("/v1/chat/completions", dependencies=[Depends(validate_json_request)], responses=_responses(chat_router))
        async def create_chat_completion(request: ChunkChatRequest, raw_request: Request) -> Any:
            return await chat_router.create_chat_completion(request, raw_request)

        @app.post("/v1/completions", dependencies=[Depends(validate_json_request)], responses=_responses(completion_router))
        async def create_completion(request: ChunkCompletionRequest, raw_request: Request) -> Any:
            return await completion_router.create_completion(request, raw_request)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Connect the handlers.

        Raises:
            ConfigError: the server has no `ChunkConnector`, or an option cannot be served.
        """
        if engine_client is None:
            return
        config = engine_client.vllm_config
        transfer = config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            raise ConfigError(f"the plugin chunkattn needs the KV connector {CONNECTOR}; see chunkattn.integrations.vllm.serve")
        check_parallel(config.parallel_config.data_parallel_size)
        model = config.model_config
        options = server_options(model.model, transfer.kv_connector_extra_config, model.revision)
        tokenizer = None if model.skip_tokenizer_init else engine_client.renderer.get_tokenizer()
        client = ChunkEngineClient(engine_client, options)
        renderer = ChunkRenderer(state.online_renderer, options.parser(tokenizer))
        for handler in list(vars(state)["_state"].values()):
            if getattr(handler, "engine_client", None) is engine_client:
                handler.engine_client = client
        for handler in (state.openai_serving_chat, state.openai_serving_completion):
            handler.online_renderer = renderer


def _responses(module: Any) -> dict[int | str, dict[str, Any]]:
    """Return the documented responses of the one POST route in a module of vLLM's routes."""
    return next(route.responses for route in module.router.routes if "batch" not in route.path and "POST" in route.methods)
