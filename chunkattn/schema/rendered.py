"""Fields of bodies that a chat template renders: tools, and how to render."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from chunkattn.answer_parsers.tools import MAX_TOOLS, Tool, check_names, check_tool, shown_tool
from chunkattn.errors import RequestError
from chunkattn.parsers.arguments import chat_options
from chunkattn.schema.base import Body, Entry, FastList, TemplateOptions
from chunkattn.web.errors import ApiError


class FunctionDefinition(Entry):
    """Function that an answer may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object."""
    strict: bool | None = None
    """Hold calls to the schema by a grammar, with every `tool_choice`."""


class ToolDefinition(Entry):
    """Tool of a request."""

    type: Literal["function"]
    function: FunctionDefinition


class Tooled(Body):
    """Tools that the chat template shows, which are a part of the prompt."""

    tools: Annotated[FastList[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that an answer may call."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        try:
            for place, tool in enumerate(self.tools or ()):
                check_tool(tool.function.name, tool.function.parameters, f"tools.{place}.function")
            check_names([tool.function.name for tool in self.tools or ()])
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param, code="invalid_value") from None
        return self

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the chat template."""
        return [shown_tool(tool.model_dump()) for tool in self.tools or ()]

    @property
    def functions_of_tools(self) -> tuple[Tool, ...]:
        """Return the functions of the tools."""
        no_parameters: dict[str, Any] = {"type": "object", "properties": {}}
        functions = (tool.function for tool in self.tools or ())
        return tuple(Tool(f.name, f.parameters or no_parameters, bool(f.strict)) for f in functions)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's values."""


class Rendered(Tooled):
    """Fields that decide how a chat template renders messages."""

    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer; by default unless a message goes on."""
    continue_final_message: bool = False
    """End the prompt with the content of the last message, which the model continues."""
    reasoning_effort: ReasoningEffort | None = None
    """Variable of the chat template; templates that do not read it ignore it."""
    chat_template_kwargs: TemplateOptions

    @model_validator(mode="after")
    def _check_rendered(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; leave one of them out")
        if self.reasoning_effort is not None and self.variables["reasoning_effort"] != self.reasoning_effort:
            raise ValueError("reasoning_effort and that of chat_template_kwargs differ; give one of them")
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template and the arguments that decide how it is rendered."""
        return chat_options(
            self.variables,
            None,
            self.add_generation_prompt,
            self.continue_final_message,
            tools=self.shown_tools,
        )
