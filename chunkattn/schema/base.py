"""Fields and base classes shared by all request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from chunkattn.errors import ChunkAttnError
from chunkattn.sampling_params import (
    MAX_LABELS,
    MAX_LOGIT_BIAS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from chunkattn.schema.shapes import ResponseFormat, StructuredOutputs
from chunkattn.web.errors import UNKNOWN_FIELD, ApiError, renamed

E = TypeVar("E", bound=ChunkAttnError | ApiError)
T = TypeVar("T")

FastList = Annotated[list[T], Field(fail_fast=True)]
"""List whose validation stops at the first wrong entry: an error per entry of a long list would outgrow the body."""
TokenIds = FastList[int]
Texts = FastList[str]
TokenLists = FastList[TokenIds]

CacheSalt = Annotated[
    Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None,
    Field(description="Salt of the cache; only requests of the same salt share cached K/V."),
]
StopTexts = Annotated[FastList[Annotated[str, Field(max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[FastList[int], Field(max_length=MAX_STOP_TOKEN_IDS)]
LabelTexts = Annotated[FastList[str], Field(max_length=MAX_LABELS)]
LabelIds = Annotated[FastList[int], Field(max_length=MAX_LABELS)]
LabelTextLists = FastList[LabelTexts]
LabelIdLists = FastList[LabelIds]

_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length"}
_RESERVED |= {"messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize"}
_RESERVED |= {"citations", "focus", "sanitize_control_tokens", "template_options", "tokenizer", "tokenizer_kwargs", "tools"}
_RESERVED |= {"truncation"}
"""Arguments of `apply_chat_template` and of the parser, which a client must not set as template variables."""


class Entry(BaseModel):
    """Entry of a long list, validated without Python code per entry. Unknown names are errors.

    The text below a field describes it in the OpenAPI document and in the reference.
    """

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Strict(Entry):
    """JSON object. An unknown name is an error that names it; null counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        present = {name: value for name, value in body.items() if value is not None}
        for name in present:
            if name not in cls.model_fields and not any(field.alias == name for field in cls.model_fields.values()):
                shown = str(name).encode("utf-8", "replace").decode()  # pydantic's context takes no lone surrogate
                raise PydanticCustomError(UNKNOWN_FIELD, "{name} is not supported by this server", {"name": shown})
        return present


def check_template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse reserved names among the variables of a chat template.

    A client's own template is among them: a template is a program, and may run forever.

    Args:
        options: values of `chat_template_kwargs`.

    Raises:
        ValueError: a name is reserved.
    """
    if reserved := sorted(_RESERVED & set(options)):
        raise ValueError(f"{reserved[0]!r} cannot be set here")
    return options


TemplateOptions = Annotated[dict[str, Any], AfterValidator(check_template_options), Field(default_factory=dict)]


class Body(Strict):
    """Fields of every request body."""

    model: str | None = None
    """Name of the served model; optional."""
    user: str | None = None
    """Accepted for compatibility; has no effect."""

    fields_of: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Fields that may hold an argument of the engine's call under another name; errors name the first that the client sent."""

    def _sent(self, argument: str) -> str | None:
        """Return the first field that the client sent for an argument, or None."""
        names = self.fields_of.get(argument, (argument,))
        return next((n for n in names if getattr(self, n) is not None and getattr(self, n) is not False), None)

    def argument(self, name: str) -> Any:
        """Return the value of an argument under whichever name the client sent it, or None."""
        field = self._sent(name)
        return None if field is None else getattr(self, field)

    def own_names(self) -> dict[str, str]:
        """Return the request's own names of arguments that it has under other names."""
        sent = ((argument, self._sent(argument)) for argument in self.fields_of)
        return {argument: name for argument, name in sent if name not in (None, argument)}

    def own_error(self, error: E) -> E:
        """Return an error of the engine's call under the request's own names.

        Args:
            error: the error.
        """
        return cast("E", renamed(error, self.own_names()))

    def check_same(self, name: str, other: str) -> None:
        """Check that two names of one argument do not contradict each other.

        Args:
            name: field.
            other: another name of the field.

        Raises:
            ValueError: both are given, and they differ.
        """
        one, two = getattr(self, name), getattr(self, other)
        if None not in (one, two) and one != two:
            raise ValueError(f"{name} and {other} differ; give one of them")


_MAX_ID_DIGITS = 12
"""Length from which a `logit_bias` key is left a string, so no long integer is parsed."""


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    """Send a last event without choices that holds the usage."""
    continuous_usage_stats: bool = False
    """Include the usage so far in every event."""
    include_obfuscation: bool = False
    """No effect: events carry no obfuscation."""


class Sampled(Body):
    """Fields that describe how to continue a prompt; names, meanings and defaults equal those in `SamplingParams`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] = Field(default_factory=dict)
    min_tokens: int = 0
    stop: Annotated[str, Field(max_length=MAX_STOP_CHARS)] | StopTexts = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    cache_salt: CacheSalt = None
    priority: int = 0
    """Requests of lower priority values are scheduled first."""
    return_chunk_usage: bool = False
    """Report the cached tokens of every chunk in the usage."""
    structured_outputs: StructuredOutputs = None
    """Shape of the text: one of json, regex, choice, grammar and json_object."""


class Sampling(Sampled):
    """Fields of OpenAI's completions and chats, whose answers may hold several samples and log-probabilities."""

    n: int = 1
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to report per prompt token."""
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    """Name the tokens of log-probabilities `token_id:N` instead of by their texts."""
    response_format: ResponseFormat = None
    """Shape of the text as OpenAI names it: text, json_object or json_schema."""

    @model_validator(mode="after")
    def _check_shape(self) -> Sampling:
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("structured_outputs and response_format exclude each other; leave one of them out")
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not streamed; leave one of them out")
        return self

    def sampling(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the engine's parameters.

        Args:
            defaults: the model's sampling defaults, for the fields that the body leaves out.
            max_tokens: number of tokens to generate at most; None generates as many as fit.
            logprobs: number of likeliest tokens to report per generated token; None reports no log-probabilities.
            prompt_logprobs: default for a body without `prompt_logprobs`.

        Raises:
            RequestError: a parameter is out of range.
        """
        bias: dict[Any, float] = {
            int(k) if k.isdecimal() and len(k) < _MAX_ID_DIGITS else k: v for k, v in self.logit_bias.items()
        }
        arguments = {f.name: getattr(self, f.name) for f in fields(SamplingParams) if f.name in Sampling.model_fields}
        arguments |= {
            name: value for name, value in defaults.items() if name in arguments and name not in self.model_fields_set
        }
        arguments |= {"logit_bias": bias, "max_tokens": max_tokens, "logprobs": logprobs}
        arguments["structured_outputs"] = self.structured_outputs or self.response_format
        if self.prompt_logprobs is None:
            arguments["prompt_logprobs"] = prompt_logprobs
        return SamplingParams(**arguments)
