"""Parts that the request bodies of `/v1/decisions` and `/v1/systemone` share: options, JSON as text, and the usage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from chunkattn.calls.decide import DecideOptions
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.errors import RequestError
from chunkattn.outputs import ScoreUsage
from chunkattn.parsers.states import OneState
from chunkattn.schema.base import Body, CacheSalt, E, TemplateOptions
from chunkattn.schema.generation import ChunkMode, PromptDocuments, with_stored
from chunkattn.web.errors import UNSUPPORTED_KIND


class DecideBody(Body):
    """Fields of both routes that the routes' own SDKs do not have: options of `LLM.decide`."""

    system: str | None = None
    """Content of a system message before the state."""
    method: Literal["auto", "letters", "likelihood", "separate", "head"] = "auto"
    """Method by which options become prompts."""
    calibrate: bool | Literal["fitted"] = False
    """Divide the probability of each label by its probability behind the state "N/A"; or use a fit."""
    documents: PromptDocuments | None = None
    """Chunks before the state: texts, token ids, objects with a text, or `{"id"}` of a stored document."""
    chunk_mode: ChunkMode = "isolated"
    """Documents as `isolated` chunks, or one `joined` chunk."""
    cache_salt: CacheSalt = None
    priority: int = 0
    chat_template_kwargs: TemplateOptions

    @property
    def salt(self) -> str | None:
        """Return the request's cache salt."""
        return self.cache_salt

    @property
    def num_values(self) -> int:
        """Return the number of probabilities in the answer."""
        raise NotImplementedError

    def call(self) -> tuple[OneState, list[Question]]:
        """Return the state and the questions that the model is asked.

        Raises:
            RequestError: a text is no JSON.
        """
        raise NotImplementedError

    def answer(self, output: DecisionOutput, min_mass: float) -> dict[str, Any]:
        """Return the fields of the answer that depend on the questions.

        Args:
            output: answers to the questions of `call`.
            min_mass: label mass below which an answer becomes a refusal, on routes that have refusals.
        """
        raise NotImplementedError

    def part(self, part: str) -> str:
        """Return the request's own name of a part that an error names, such as `"question 3"`."""
        return part

    def options(self, salt: str | None, stored: Mapping[int, Any]) -> DecideOptions:
        """Return the options of `LLM.decide`.

        Args:
            salt: the engine's cache salt.
            stored: token ids of the documents named by id, by their place.
        """
        return DecideOptions(
            documents=with_stored(self.documents or (), stored),
            chunk_mode=self.chunk_mode,
            system=self.system,
            method=self.method,
            calibrate=self.calibrate,
            cache_salt=salt,
            priority=self.priority,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def own_error(self, error: E) -> E:
        """Return an error of `LLM.decide` under the request's own names."""
        renamed = super().own_error(error)
        if isinstance(renamed, RequestError):
            renamed = type(renamed)(renamed.message, param=renamed.param, part=renamed.part and self.part(renamed.part))
        return renamed


def usage_of(usage: ScoreUsage) -> dict[str, Any]:
    """Return token counts in OpenAI's format. The state counts once."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens,
        "computed_tokens": usage.computed_tokens,
    }


def compact(value: Any) -> str:
    """Return a JSON value as a compact text.

    Raises:
        ValueError: the value is no JSON, such as NaN, or holds a lone surrogate.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode()
    return text


class Kinds:
    """Annotation of a union of models that a text in the object tells apart: its `type`, or the `role` of a message.

    The literals of the models' fields `type` and `role` name them. The error for another text names the text.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the union."""
        models: tuple[type[BaseModel], ...] = get_args(source) or (source,)
        names: dict[str, str] = {}
        for model in models:
            field = model.model_fields.get("role") or model.model_fields["type"]
            names |= dict.fromkeys(get_args(field.annotation), model.__name__)
        has_messages = any("role" in model.model_fields for model in models)

        def text_of(value: dict[str, Any]) -> tuple[str, Any]:
            """Return the name of the field that tells the models apart, and its value."""
            kind = value.get("type")
            return ("role", value.get("role")) if has_messages and kind in (None, "message") else ("type", kind)

        def check(value: Any) -> Any:
            if not isinstance(value, dict):
                raise PydanticCustomError("dict_type", "Input should be an object")
            name, kind = text_of(value)
            if not isinstance(kind, str):
                fault = "is missing" if kind is None else "should be a text"
                raise PydanticCustomError("kind", "{name} {fault}", {"name": name, "fault": fault})
            if kind not in names:
                shown = repr(kind[:80].encode("utf-8", "replace").decode())
                text = "{name} {kind} is not supported by this server"
                raise PydanticCustomError(UNSUPPORTED_KIND, text, {"name": name, "kind": shown})
            return value

        choices = {model.__name__: handler.generate_schema(model) for model in models}
        union = core_schema.tagged_union_schema(choices, lambda value: names[text_of(value)[1]])
        return core_schema.no_info_before_validator_function(check, union if len(models) > 1 else handler(source))
