"""Families that write calls as JSON: Qwen 3 and Hermes, Llama 3, and Mistral."""

from __future__ import annotations

import re

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.grammar import Grammar, quoted
from chunkattn.answer_parsers.json_call import Found, JsonCall
from chunkattn.answer_parsers.source import Source, Wait
from chunkattn.answer_parsers.tool_parser import (
    CallsAtBeginning,
    ToolParser,
    one_of_tools,
    register_tool_parser,
    repeated,
    short_id,
)
from chunkattn.answer_parsers.tools import NAME, Tool, Tools

_NAME_CHAR = re.compile(r"[A-Za-z0-9_.:\s-]")
_FURTHER = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
"""Keywords by which a schema allows, or asks for, properties that `properties` does not list."""


def _is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None


def _json_call(grammar: Grammar, tool: Tool, key: str) -> str:
    """Return the expression of a call, with its arguments under a key."""
    before = quoted(f'{{"name": "{tool.name}", "{key}": ')
    return f"{before} {_arguments(grammar, tool)} {quoted('}')}"


def _arguments(grammar: Grammar, tool: Tool) -> str:
    """Return the rule of a function's arguments: those of its schema, and further ones only where the schema says so."""
    is_open = "properties" not in tool.parameters or any(word in tool.parameters for word in _FURTHER)
    return grammar.json(tool.parameters if is_open else {**tool.parameters, "additionalProperties": False})


@register_tool_parser("llama3_json", "llama4_json")
class Llama3(CallsAtBeginning):
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`.

    An answer of JSON may be no call, so only the names of functions that the request has are calls. Several calls stand behind
    each other, with `;` between them.
    """

    traces = ("Environment: ipython", "<|python_tag|>", '"parameters": dictionary of argument name')
    tag = "<|python_tag|>"
    first = "{"

    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read the calls at the beginning of the answer."""
        call = JsonCall(tools.by_name.__contains__, ("type", "id"))
        yield from source.space()
        yield from source.took(self.tag)
        yield from source.space()
        if (yield from call.read(source, sink)) is Found.NONE:
            return False
        while True:
            source.mark()
            yield from source.space()
            yield from source.took(";")
            yield from source.space()
            if not (yield from source.starts("{")) or (yield from call.read(source, sink)) is Found.NONE:
                yield from source.rewind_unless_cut()
                return True

    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of one call with `parameters`: the templates refuse messages with more."""
        return one_of_tools(grammar, tools, lambda tool: _json_call(grammar, tool, "parameters"))


@register_tool_parser("mistral")
class Mistral(ToolParser):
    """Mistral: `[TOOL_CALLS]` before a list of JSON objects, or before every name that its arguments follow."""

    traces = openings = ("[TOOL_CALLS]",)
    markers = ("[ARGS]", "[CALL_ID]")

    def new_id(self) -> str:
        """Return a random id as the templates want it."""
        return short_id()

    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read a list of calls, or one call."""
        yield from source.took("[TOOL_CALLS]")
        yield from source.space()
        if (yield from source.took("[")):
            return (yield from self._read_list(source, sink))
        name = yield from source.line_until(("[ARGS]", "[CALL_ID]", "{"), _NAME_CHAR)
        if name is None or not _is_name(name := name.strip()):
            return False
        if (yield from source.took("[CALL_ID]")):
            yield from source.line_until(("[ARGS]", "{"), _NAME_CHAR)
        yield from source.took("[ARGS]")
        yield from source.space()
        if not (yield from source.starts("{")):
            return False
        source.release()
        sink.call(name)
        yield from source.container(sink.arguments)
        return True

    def _read_list(self, source: Source, sink: Sink) -> Wait[bool]:
        call, has_begun = JsonCall(_is_name), False
        while True:
            yield from source.space()
            if (yield from call.read(source, sink)) is Found.NONE:
                if has_begun:
                    yield from source.rewind_unless_cut()
                return has_begun
            has_begun = True
            source.mark()
            yield from source.space()
            if not (yield from source.took(",")):
                yield from source.took("]")
                return True

    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of calls in the form of the tokenizer: names behind markers if it has `[ARGS]`, else a list."""
        if grammar.is_token("[ARGS]"):
            separator, opening = grammar.marker("[ARGS]"), grammar.marker(self.openings[0])
            call = one_of_tools(grammar, tools, lambda t: f"{quoted(t.name)} {separator} {_arguments(grammar, t)}")
            return repeated(grammar, tools, call, f"{opening} {call}")
        call = one_of_tools(grammar, tools, lambda tool: _json_call(grammar, tool, "arguments"))
        calls = repeated(grammar, tools, call, f"{quoted(', ')} {call}")
        return f"{quoted(' [')} {calls} {quoted(']')}"


@register_tool_parser("hermes")
class Hermes(ToolParser):
    """Qwen 2.5, Qwen 3 and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    traces = openings = ("<tool_call>",)
    markers = ("</tool_call>",)

    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read a call. Malformed arguments go on up to the end of the call."""
        yield from source.took("<tool_call>")
        yield from source.space()
        if (found := (yield from JsonCall(_is_name).read(source, sink))) is Found.NONE:
            return False
        emit = sink.arguments if found is Found.BROKEN else sink.content
        yield from source.until(("</tool_call>",), emit, drops_cut=True)
        yield from source.took("</tool_call>")
        return True

    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of calls with `arguments`, one between each pair of tags."""
        opening, closing = map(grammar.marker, ("<tool_call>", "</tool_call>"))
        newline = quoted("\n")
        call = one_of_tools(grammar, tools, lambda tool: _json_call(grammar, tool, "arguments"))
        body = f"{newline} {call} {newline} {closing}"
        return repeated(grammar, tools, body, f"{newline} {opening} {body}")
