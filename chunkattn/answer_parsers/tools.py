"""Tools of a request: the functions that an answer may call, and which calls it must make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from chunkattn.errors import RequestError

Mode = Literal["auto", "none", "required"]

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Names of functions. OpenAI allows 64 letters, digits, `_` and `-`."""
MAX_TOOLS = 128
"""Limit on the tools of a request, as OpenAI's."""


@dataclass(frozen=True)
class Tool:
    """Function that an answer may call.

    Attributes:
        name: name of the function.
        parameters: JSON schema of the arguments, an object.
        strict: whether calls are held to the schema by a grammar even where the model decides whether to call.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Tools:
    """Tools of a request.

    Attributes:
        tools: all functions, which the chat template shows.
        mode: whether an answer may call functions, may not, or must.
        named: name of the only function that an answer calls; None for any.
        parallel: whether an answer may hold several calls.
        allowed: names of the functions that an answer may call; None for all.
    """

    tools: tuple[Tool, ...]
    mode: Mode = "auto"
    named: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    @property
    def callable(self) -> Sequence[Tool]:
        """Return the functions that the answer may call."""
        return [t for t in self.tools if self.named in (None, t.name) and (self.allowed is None or t.name in self.allowed)]

    @property
    def is_enforced(self) -> bool:
        """Return whether a grammar holds the answer to its calls."""
        may_not = len(self.callable) < len(self.tools) or any(tool.strict for tool in self.tools)
        return self.mode == "required" or (self.mode == "auto" and may_not)

    @property
    def most_calls(self) -> int:
        """Return how many calls the answer may hold."""
        return MAX_TOOLS if self.parallel and self.named is None else 1

    @cached_property
    def by_name(self) -> Mapping[str, Tool]:
        """Return the functions by name."""
        return {tool.name: tool for tool in self.tools}


def check_tool(name: Any, parameters: Any, param: str) -> None:
    """Check the name and the parameters of a function.

    Args:
        name: name of the function.
        parameters: JSON schema of its arguments; None for a function without any.
        param: name of the argument that holds the function, for error messages.

    Raises:
        RequestError: the name is no name, or the schema describes no object.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        text = f"a tool's name has 1 to 128 letters, digits or any of _.:-, got {str(name)[:160]!r}"
        raise RequestError(text, param=param)
    if parameters is None:
        return
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        text = f"the parameters of the tool {name!r} must be a JSON schema of an object, {{'type': 'object', ...}}"
        raise RequestError(text, param=param)
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not all(isinstance(value, (Mapping, bool)) for value in properties.values()):
        text = f"the properties in the parameters of the tool {name!r} must be an object of JSON schemas"
        raise RequestError(text, param=param)
    if not isinstance(required, (list, tuple)) or not all(isinstance(value, str) for value in required):
        raise RequestError(f"`required` in the parameters of the tool {name!r} must be a list of texts", param=param)


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a caller for the chat template.

    Args:
        tools: list of `{"type": "function", "function": {"name", "description", "parameters"}}`.

    Raises:
        RequestError: an entry is no such tool, or two have one name.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"there are {len(tools)} tools, at most {MAX_TOOLS} are allowed", param="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
        if not isinstance(function, Mapping):
            text = 'a tool must be {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            raise RequestError(text, param="tools")
        check_tool(function.get("name"), function.get("parameters"), "tools")
    shown = [shown_tool(tool) for tool in tools]
    check_names([tool["function"]["name"] for tool in shown])
    return shown


def check_names(names: Sequence[str]) -> None:
    """Check that names are different.

    Raises:
        RequestError: two tools have one name.
    """
    seen = set[str]()
    for name in names:
        if name in seen:
            raise RequestError(f"two tools have the name {name!r}; give each its own", param="tools")
        seen.add(name)


def shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates show it: without fields that are absent or null, and without `strict`."""
    function = tool["function"]
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: function[name] for name in names if function.get(name) is not None}}
