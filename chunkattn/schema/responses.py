"""Request body of `/v1/responses`, in OpenAI's schema, and what the answer repeats of it."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from chunkattn.answer_parsers.tools import MAX_TOOLS
from chunkattn.schema.accepted import SharedNoEffect, ShortText, no_effect, only
from chunkattn.schema.base import FastList, Strict
from chunkattn.schema.decide import Kinds
from chunkattn.schema.decisions import InputText, SaidRefusal
from chunkattn.schema.generation import MAX_MESSAGES
from chunkattn.schema.rendered import ReasoningEffort
from chunkattn.schema.responses_chat import responses_chat
from chunkattn.schema.translated import Translated

MAX_NAME = 256
"""Limit on the characters of a tool's name."""
MAX_REPEATED = 1 << 16
"""Bytes of JSON up to which an answer repeats instructions, tools and the like; every event with a response repeats them."""
_TEXT, _STATES = "a text of up to 1024 characters", "OpenAI's values"


# Input


class _Item(Strict):
    """Fields of every item that an earlier answer may have held."""

    id: Annotated[ShortText, no_effect(_TEXT, "nothing is stored")] = None
    status: Annotated[
        Literal["in_progress", "completed", "incomplete"] | None, no_effect(_STATES, "the item is read as it is")
    ] = None


class SaidText(Strict):
    """Text of the assistant."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any] | None, no_effect("a list", "the chat template does not get it")] = None
    logprobs: Annotated[list[Any] | None, no_effect("a list", "the chat template does not get it")] = None


ToolName = Annotated[str, Field(max_length=MAX_NAME)]
Part = Annotated[InputText, Kinds()]
SaidPart = Annotated[SaidText | SaidRefusal, Kinds()]


class GivenMessage(_Item):
    """Message of a user, of a developer or of the system."""

    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system"]
    content: str | FastList[Part]


class SaidMessage(_Item):
    """Message of the assistant."""

    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | FastList[SaidPart]
    phase: Annotated[Literal["commentary", "final_answer"] | None, no_effect(_STATES, "the chat template does not get it")] = (
        None
    )


class FunctionCall(_Item):
    """Call of a function by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(_Item):
    """Output of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | FastList[Part]


class ReasoningText(Strict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    """Summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class Reasoned(_Item):
    """Reasoning of the assistant. The chat template gets its text, or else its summary."""

    type: Literal["reasoning"]
    summary: FastList[SummaryText] = Field(default_factory=list)
    content: FastList[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, no_effect("a text", "reasoning is sent as text")] = None


Item = Annotated[GivenMessage | SaidMessage | FunctionCall | FunctionOutput | Reasoned, Kinds()]


# Options


class FunctionTool(Strict):
    """Function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool, only(False), no_effect("false", "the prompt shows every tool")] = False


class FunctionChoice(Strict):
    """Choice of one function."""

    type: Literal["function"]
    name: ToolName


class AllowedChoice(Strict):
    """Choice of the functions that the model may call, of all that the prompt shows."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[FastList[Annotated[FunctionChoice, Kinds()]], Field(min_length=1, max_length=MAX_TOOLS)]


class PlainFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    """Form of the text in the answer."""

    format: Annotated[PlainFormat | JsonFormat | SchemaFormat, Kinds()] | None = None
    verbosity: Annotated[str, only("medium"), no_effect('"medium"', "it is the default")] = "medium"


class ReasoningOptions(Strict):
    """Options of reasoning."""

    effort: ReasoningEffort | None = None
    summary: Annotated[str, only("auto"), no_effect('"auto"', "reasoning is returned whole")] = "auto"
    generate_summary: Annotated[str, only("auto"), no_effect('"auto"', "reasoning is returned whole")] = "auto"
    context: Annotated[str, only("auto"), no_effect('"auto"', "the chat template decides")] = "auto"
    mode: Annotated[str, only("standard"), no_effect('"standard"', "it is the default")] = "standard"


class EventOptions(Strict):
    """Options of a stream."""

    include_obfuscation: Annotated[bool, no_effect("true or false", "events carry no obfuscation")] = False


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""OpenAI's values. All but the first are about items that no answer here has."""


class ResponsesBody(Translated, SharedNoEffect):
    """Request body of `/v1/responses`."""

    input: str | Annotated[FastList[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    """A text of the user, or messages, calls of functions with their outputs, and reasoning."""
    instructions: str | None = None
    """Content of a system message before the input."""
    max_output_tokens: int | None = None
    """Number of tokens to generate at most, reasoning included; by default as many as fit."""
    text: TextOptions | None = None
    """Form of the answer: `{"format": {"type"}}` with `text`, `json_object`, or `json_schema` with `name` and `schema`."""
    reasoning: ReasoningOptions | None = None
    """`{"effort"}`, the variable `reasoning_effort` of the chat template."""
    tools: Annotated[FastList[Annotated[FunctionTool, Kinds()]], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none", "required"] | Annotated[FunctionChoice | AllowedChoice, Kinds()] | None = None
    """Choice of functions: `auto`, `none`, `required`, `{"type": "function", "name"}`, or `allowed_tools` as OpenAI has it."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer."""
    include: FastList[Includable] | None = None
    """`message.output_text.logprobs` returns log-probabilities; OpenAI's other values have no effect."""
    top_logprobs: int | None = None
    """Number of likeliest tokens to report per token."""
    stream_options: EventOptions | None = None
    """`include_obfuscation`, which has no effect."""
    truncation: Annotated[str, only("disabled"), no_effect('"disabled"', "nothing is truncated")] = "disabled"
    background: Annotated[bool, only(False), no_effect("false", "nothing is stored")] = False
    max_tool_calls: Annotated[int | None, no_effect("an integer", "there are no built-in tools")] = None

    fields_of: ClassVar = {
        "messages": ("input",),
        "max_tokens": ("max_output_tokens",),
        "top_logprobs": ("top_logprobs", "include"),
        "response_format": ("text",),
        "reasoning_effort": ("reasoning",),
    }
    translate = staticmethod(responses_chat)

    _repeated: dict[str, Any] = PrivateAttr()

    @model_validator(mode="after")
    def _repeat(self) -> Self:
        form = (self.text and self.text.format) or PlainFormat(type="text")
        choice = self.tool_choice or "auto"
        long = {
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True), "verbosity": "medium"},
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "user": self.user,
        }
        if len(json.dumps(long)) > MAX_REPEATED:
            long = {"instructions": None, "metadata": {}, "text": None, "tools": [], "user": None}
        self._repeated = long | {
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning is not None else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
        }
        return self

    @property
    def repeated(self) -> dict[str, Any]:
        """Return the fields of the answer that repeat the request."""
        return self._repeated
