"""Choices among the tools of a chat that name functions: `NamedChoice` and `AllowedChoice`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from chunkattn.answer_parsers.tools import MAX_TOOLS
from chunkattn.schema.base import Entry, FastList


class NamedFunction(Entry):
    """Name of a function."""

    name: str


class NamedChoice(Entry):
    """Choice of the function that an answer calls."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedFunctions(Entry):
    """Functions that an answer may call, of all that the prompt shows."""

    mode: Literal["auto", "required"]
    tools: Annotated[FastList[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Entry):
    """Choice of the functions that an answer may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def _kind_of_choice(choice: Any) -> str:
    """Return the name of the model that reads a choice of functions, which its `type` names."""
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return "allowed_tools" if kind == "allowed_tools" else "function"


FunctionChoice = Annotated[
    Annotated[NamedChoice, Tag("function")] | Annotated[AllowedChoice, Tag("allowed_tools")], Discriminator(_kind_of_choice)
]
