"""State and helpers shared by the routes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request

from chunkattn.answer_parsers.families import find_tool_parser
from chunkattn.answer_parsers.reasoning import ReasoningParser, find_reasoning_parser
from chunkattn.answer_parsers.tool_parser import ToolParser
from chunkattn.documents.records import DocumentRecords, Scope
from chunkattn.documents.registry import Registry
from chunkattn.errors import ConfigError
from chunkattn.gguf_names import split_quant
from chunkattn.parsers import PromptParser
from chunkattn.parsers.chat_template import ChatTemplate
from chunkattn.request_record import RECORD
from chunkattn.schema.base import Body
from chunkattn.schema.documents import CacheBody, ForgetBody
from chunkattn.schema.piece_keys import keys_of
from chunkattn.server.cache_report import CacheReports
from chunkattn.server.contents import StoredDocument
from chunkattn.server.engine_gauges import EngineGauges
from chunkattn.server.engine_keeper import EngineKeeper
from chunkattn.server.texts import TokenTexts
from chunkattn.web.errors import ApiError
from chunkattn.web.http_state import HttpState
from chunkattn.web.keys import Caller
from chunkattn.web.options import ServerConfig

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

DEMO_NAME = "chunkattn-demo"
_MAX_TOKENIZED = 1 << 17
"""Limit on the tokens of a text that is only tokenized, or the model's own if it is larger. A token takes 0.5 KiB meanwhile."""


class ServerState(HttpState):
    """State of one server: engine, options, metrics and registries.

    Args:
        llm: the engine.
        config: options of the server.

    Attributes:
        llm: the engine.
        started: start time in seconds since the epoch.
        engine_gauges: metrics of the engine that the server knows without asking it.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        places = max(1, int(config.max_queue_share * llm.config.max_queued_requests))
        super().__init__(config, places, llm.config.max_items_per_request, self._noted)
        self.llm, self.started, self.engine_gauges = llm, int(time.time()), EngineGauges()
        find_tool_parser(config.tool_call_parser, "")
        find_reasoning_parser(config.reasoning_parser, "")
        if taken := set(llm.config.lora_names) & set(self.model_names):
            raise ConfigError(f"lora_modules names {min(taken)!r}, which is a name of the base model; choose another")

    @cached_property
    def keeper(self) -> EngineKeeper:
        """Return the keeper of the stored documents' K/V."""
        return EngineKeeper(
            self.llm, self.config, DocumentRecords(self.config.document_store), self.check_stored, self.check_model
        )

    @cached_property
    def documents(self) -> Registry:
        """Return the registry of stored documents."""
        return Registry(self.keeper.records, self.keeper, self.config, self.keys)

    def named_documents(
        self, names: Mapping[int, str], caller: Caller, cache_salt: str | None, *, field: str = "documents"
    ) -> dict[int, StoredDocument]:
        """Return the documents that a request names by id; see `EngineKeeper.named`.

        Args:
            names: ids by the place of the document in the request.
            caller: client of the request.
            cache_salt: salt that it gives.
            field: place of the documents in the request's body, for error texts.
        """
        return self.keeper.named(self.documents, names, Scope(caller.document_owner, caller.salt(cache_salt)), field)

    @cached_property
    def reports(self) -> CacheReports:
        """Return the log of what was sent, which stays empty unless `report_documents` is set."""
        return CacheReports(self.llm)

    def _noted(self, request: Request, raw: Any) -> AbstractContextManager[Any]:
        """Return the context of a request's handler, in which its pieces count as sent."""
        if not self.config.report_documents:
            return nullcontext()
        engine, authorization = self.llm.config, request.headers.get("authorization", "")
        separator = engine.chunk_separator if engine.enable_chunk_aware else None
        return self.reports.sent(
            keys_of(request.scope["path"], raw, authorization, separator=separator, adapters=engine.lora_names)
        )

    @cached_property
    def texts(self) -> TokenTexts:
        """Return the texts of the model's tokens. The engine must have been started."""
        frontend = self.llm.frontend
        return TokenTexts(frontend.tokenizer, frontend.parser.encode.leading_ids)

    @cached_property
    def tool_parser(self) -> ToolParser | None:
        """Return the form of the model's calls, or None. The engine must have been started."""
        return find_tool_parser(self.config.tool_call_parser, self._template)

    @cached_property
    def reasoning_parser(self) -> ReasoningParser | None:
        """Return the form of the model's reasoning, or None. The engine must have been started."""
        return find_reasoning_parser(self.config.reasoning_parser, self._template)

    @property
    def _template(self) -> str:
        """Return the chat template for conversations with tools; empty without one."""
        tokenizer = self.llm.frontend.tokenizer
        return "" if tokenizer is None else ChatTemplate(tokenizer, {"tools": [{}]}).text

    def shows_markers(self, calls: ToolParser | None, reasoning: ReasoningParser | None) -> bool:
        """Return whether a marker of calls or reasoning is a special token, which a text must then show.

        Args:
            calls: form of the calls that are read; None if none are.
            reasoning: form of the reasoning that is read; None if none is.
        """
        markers = () if calls is None else (*calls.openings, *calls.markers)
        markers += () if reasoning is None else (reasoning.start, reasoning.end)
        return any(self.texts.special_id(marker) is not None for marker in markers)

    @cached_property
    def model_name(self) -> str:
        """Return the model's name in answers; for a local folder or GGUF file the last part of its path."""
        model = self.llm.config.model
        name, quant = (None, None) if model is None else split_quant(model)
        if model is not None and (local := Path(model).expanduser()).exists():
            model = local.resolve().name if local.is_dir() else local.stem
        elif name is not None and (local := Path(name).expanduser()).is_dir():
            model = f"{local.resolve().name}:{quant}"
        return next(iter(self.config.served_model_name), None) or model or DEMO_NAME

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return all names that requests may give the model, the name in answers first."""
        return self.config.served_model_name or (self.model_name,)

    @cached_property
    def tokenizing_parser(self) -> PromptParser:
        """Return the parser of texts that need not fit the engine. The engine must have been started."""
        parser = self.llm.frontend.make_parser()
        most = max(_MAX_TOKENIZED, self.llm.limits.max_model_len)
        parser.bound(most, most, name="the limit of /tokenize")
        return parser

    @property
    def most_prompts(self) -> int:
        """Return how many prompts one request may hold. Each takes a place in the engine's queue."""
        return min(self.config.max_prompts_per_request, self.shares.most)

    def check_model(self, name: str | None) -> str | None:
        """Check the model name of a request, and return the adapter that it names; None is accepted.

        Args:
            name: name from the request.

        Raises:
            ApiError: 404, the server serves another model.
        """
        adapters = self.llm.config.lora_names
        if (record := RECORD.get()) is not None:
            record.model = name if name in adapters else self.model_name
        if name in adapters:
            return name
        if name is not None and name not in self.model_names:
            text = f"the model {name!r} is not served here; it is {' or '.join(map(repr, (*self.model_names, *adapters)))}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return None

    def name_for(self, caller: Caller) -> str:
        """Return the model's name in the answer to a request: that of its adapter, or of the base model."""
        return caller.adapter or self.model_name

    def check(self, body: Body, caller: Caller | None = None) -> None:
        """Check that a request can be served, and note the adapter that it names.

        Args:
            body: body of the request.
            caller: client of the request; None for a request that uses no model.

        Raises:
            ApiError: as `check_model` and `check_ready`; 400, the priority is outside `priority_range` and not the default.
        """
        adapter = self.check_model(body.model)
        if caller is not None:
            caller.adapter = adapter
        self.check_ready()
        most, field = self.config.priority_range, type(body).model_fields.get("priority")
        if field is None or (priority := getattr(body, "priority", 0)) == field.default or abs(priority) <= most:
            return
        allowed = f"must be between {-most} and {most}" if most else f"cannot be set (it is {field.default})"
        text = f"priority {allowed}, got {priority}; the server's option priority_range is {most}"
        raise ApiError(400, text, param="priority", code="invalid_value")

    def check_stored(self, body: Body | None) -> None:
        """Check a request to the routes of stored documents.

        Args:
            body: body of the request; None for a request without one.

        Raises:
            ApiError: as `check` and `check_ready`.
            RequestError: there are more than `max_items_per_request` documents.
        """
        if body is None:
            self.check_ready()
        else:
            self.check(body)
        if isinstance(body, (CacheBody, ForgetBody)):
            self.llm.limits.check_count(len(body.documents), "documents", "documents")

    def check_answer_values(self, values: int, less: str, param: str) -> None:
        """Check the size of an answer before any work.

        Args:
            values: number of scores or log-probabilities in the answer.
            less: nouns for the error message, of which the client should ask for fewer.
            param: name of the request field to change.

        Raises:
            ApiError: 400, `values` exceeds `max_answer_values`.
        """
        if values > (most := self.config.max_answer_values):
            text = f"the answer would hold {values} numbers, max_answer_values is {most}; ask for fewer {less}"
            raise ApiError(400, text, param=param, code="invalid_value")

    @property
    def readiness(self) -> str:
        """Return `"starting"` (until documents are restored), `"ready"`, `"degraded"` (an engine restarts) or `"draining"`."""
        if self.draining:
            return "draining"
        state = {"starting": "starting", "ready": "ready"}.get(self.llm.state, "degraded")
        return "starting" if state == "ready" and not self.documents.restored else state

    @property
    def health(self) -> str:
        """Return `readiness`, or `"unresponsive"` while a ready engine gives no sign of life for `unresponsive_after_s`."""
        late = self.llm.client.unresponsive_s > self.config.unresponsive_after_s
        return "unresponsive" if late and self.readiness == "ready" else self.readiness

    def probe(self, *, warm: bool) -> str:
        """Return the readiness for a health probe: `health`, or `"warming"` while programs are being compiled ahead.

        Args:
            warm: whether only a warm server counts as ready; with the option `ready_when_warm` it always does.

        Raises:
            ApiError: 400, the server never gets warm.
        """
        if warm and self.llm.config.warmup is False:
            text = "this server never gets warm, because its option warmup is False (--no-warmup); ask without warm"
            raise ApiError(400, text, param="warm", code="invalid_value")
        must_be_warm = warm or self.config.ready_when_warm
        return "warming" if must_be_warm and self.health == "ready" and not self.llm.is_warm else self.health

    def check_ready(self) -> None:
        """Check that the server accepts new work, warm or not.

        Raises:
            ApiError: 503, the server is starting, degraded or draining.
        """
        if (state := self.readiness) != "ready":
            raise ApiError(503, f"the server is {state}; try again", code=f"server_{state}")


async def get_state(request: Request) -> ServerState:  # async: FastAPI runs synchronous dependencies in a thread
    """Return the server's state."""
    return request.app.state.server


State = Annotated[ServerState, Depends(get_state)]


async def get_caller(request: Request) -> Caller:
    """Return the client of the request."""
    return request.state.caller


CallerOf = Annotated[Caller, Depends(get_caller)]


def new_id(kind: str) -> str:
    """Return a random id in OpenAI's format: `kind`, a hyphen and 32 hexadecimal digits.

    Args:
        kind: kind of the answer, such as `"cmpl"`.
    """
    return f"{kind}-{token_hex(16)}"
