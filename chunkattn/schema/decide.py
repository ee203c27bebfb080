"""Parts that the request bodies of `/v1/decisions` and `/v1/systemone` share: options, JSON as text, and the usage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field
from pydantic_core import PydanticCustomError

from chunkattn.calls.decide import DecideOptions
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.errors import RequestError
from chunkattn.outputs import ScoreUsage
from chunkattn.schema.base import Body, CacheSalt, E, TemplateOptions
from chunkattn.schema.generation import PromptDocuments, with_stored
from chunkattn.web.errors import UNSUPPORTED_KIND


class DecideBody(Body):
    """Fields of both routes that the routes' own SDKs do not have: options of `LLM.decide`."""

    system: Annotated[str | None, Field(description="Content of a system message before the state.")] = None
    method: Annotated[Literal["letters", "likelihood", "separate"], Field(description="How options become prompts.")] = (
        "letters"
    )
    calibrate: Annotated[
        bool | Literal["fitted"],
        Field(description='Divide the probability of each label by its probability behind the state "N/A"; or use a fit.'),
    ] = False
    documents: Annotated[
        PromptDocuments | None,
        Field(description='Chunks before the state: texts, token ids, objects with a text, or `{"id"}` of a stored document.'),
    ] = None
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

    def call(self) -> tuple[str, list[Question]]:
        """Return the text of the state, and the questions that the model is asked.

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
            system=self.system,
            method=self.method,
            calibrate=self.calibrate,
            cache_salt=salt,
            priority=self.priority,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def own_error(self, error: E) -> E:
        """Return an error of `LLM.decide` under the request's own names."""
        own = super().own_error(error)
        if isinstance(own, RequestError):
            own = type(own)(own.message, param=own.param, part=own.part and self.part(own.part))
        return own


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


@dataclass(frozen=True)
class Kinds:
    """Objects of several models, told apart by a text in them. `check` goes before the union of models, `tag` into it.

    Attributes:
        models: model of each text.
        field: function that returns the name of the field that holds an object's text, and the text.
    """

    models: Mapping[str, type[BaseModel]]
    field: Callable[[dict[str, Any]], tuple[str, Any]]

    def check(self, value: Any) -> Any:
        """Check that an object has a model.

        Raises:
            PydanticCustomError: there is no model; the error names the text.
        """
        if not isinstance(value, dict):
            raise PydanticCustomError("dict_type", "Input should be an object")
        name, kind = self.field(value)
        if not isinstance(kind, str):
            fault = "is missing" if kind is None else "should be a text"
            raise PydanticCustomError("kind", "{name} {fault}", {"name": name, "fault": fault})
        if kind not in self.models:
            shown = repr(kind[:80].encode("utf-8", "replace").decode())
            text = "{name} {kind} is not supported by this server"
            raise PydanticCustomError(UNSUPPORTED_KIND, text, {"name": name, "kind": shown})
        return value

    def tag(self, value: Any) -> str:
        """Return the tag of an object's model: the name of its class."""
        return self.models[self.field(value)[1]].__name__

    @property
    def discriminator(self) -> Discriminator:
        """Return the discriminator of the union of the models."""
        return Discriminator(self.tag)


def by_type(value: dict[str, Any]) -> tuple[str, Any]:
    """Return the field `type` of an object; see `Kinds.field`."""
    return "type", value.get("type")
