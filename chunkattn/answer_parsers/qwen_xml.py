"""Qwen 3.5 and Qwen 3 Coder: calls as tags, with arguments that are texts in their own letters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.grammar import Grammar, either, json_of, quoted
from chunkattn.answer_parsers.schema_values import (
    Schema,
    constants,
    escaped,
    kinds,
    members,
    properties_of,
    text_pattern,
    value_of,
    with_definitions,
)
from chunkattn.answer_parsers.source import Source, Wait
from chunkattn.answer_parsers.tool_parser import ToolParser, one_of_tools, register_tool_parser, repeated
from chunkattn.answer_parsers.tools import NAME, Tool, Tools

_KEY_CHAR = re.compile(r"[^<>\n]")
_KEYS = re.compile(f"{_KEY_CHAR.pattern}*")
_END = "</parameter>"


def _is_key(text: str) -> bool:
    """Return whether a name is read unchanged in the tag of a parameter."""
    return _KEYS.fullmatch(text) is not None


@register_tool_parser("qwen3_coder", "qwen3_xml")
class QwenXml(ToolParser):
    """Form `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, each tag on its line.

    Values are texts in their own letters, and JSON for all other types: the function's schema tells which.
    """

    traces = ("<function=",)
    openings = ("<tool_call>", "<function=")
    markers = ("</tool_call>",)

    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read a call, with or without the tags around it."""
        yield from source.took("<tool_call>")
        yield from source.space()
        if not (yield from source.took("<function=")):
            return False
        name = yield from source.line_until((">",), _KEY_CHAR)
        if name is None or not NAME.fullmatch(name):
            return False
        yield from source.took(">")
        source.release()
        sink.call(name)
        if (yield from self._arguments(source, sink, tools.by_name.get(name))):
            yield from source.space()
            yield from source.took("</function>")
            yield from source.space()
            yield from source.drop_cut(("</tool_call>",))
            yield from source.took("</tool_call>")
        return True

    def _arguments(self, source: Source, sink: Sink, tool: Tool | None) -> Wait[bool]:
        """Read the parameters up to what is none; return False if the text ends in one."""
        root: Schema = True if tool is None else tool.parameters
        properties = root.get("properties", {}) if isinstance(root, Mapping) else {}
        before = "{"
        while True:
            yield from source.space()
            if not (yield from source.took("<parameter=")):
                break
            key = yield from source.line_until((">",), _KEY_CHAR)
            if key is None:
                break
            yield from source.took(">")
            yield from source.took("\n")
            sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._value(source, sink, kinds(properties.get(key, True), root))):
                return False
        # A text that ends here was cut off by a limit: its arguments stay open, as a reader of the stream has seen them.
        yield from source.drop_cut(("<parameter=", "</function>"))
        if not (yield from source.peek()):
            sink.arguments("{" if before == "{" else "")
            return False
        sink.arguments("{}" if before == "{" else "}")
        return True

    def _value(self, source: Source, sink: Sink, found: frozenset[str]) -> Wait[bool]:
        """Read a value and its closing tag; texts are passed on as they arrive. Return False if the text ends in it."""
        ends = (f"\n{_END}", _END)
        if found == {"string"}:
            sink.arguments('"')
            end = yield from source.until(ends, lambda text: sink.arguments(escaped(text)), drops_cut=True)
            sink.arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from source.until(ends, pieces.append, drops_cut=True)
            sink.arguments(value_of("".join(pieces), found) if end else "".join(pieces))
        return (yield from source.took(end)) if end else False

    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of calls in tags."""
        opening, closing = map(grammar.marker, (self.openings[0], "</tool_call>"))
        call = one_of_tools(grammar, tools, lambda tool: self._call(grammar, tool))
        newline = quoted("\n")
        body = f"{newline} {call} {newline} {closing}"
        return repeated(grammar, tools, body, f"{newline} {opening} {body}")

    def _call(self, grammar: Grammar, tool: Tool) -> str:
        properties = properties_of(tool.parameters, tool.name, _is_key)
        parts = [
            f"{self._parameter(grammar, key, schema, tool.parameters)}{'' if is_required else '?'}"
            for key, (schema, is_required) in properties.items()
        ]
        return " ".join([quoted(f"<function={tool.name}>\n"), *parts, quoted("</function>")])

    def _parameter(self, grammar: Grammar, key: str, schema: Schema, root: Schema) -> str:
        opening, closing = quoted(f"<parameter={key}>\n"), quoted(f"\n{_END}\n")
        bodies = list[str]()
        for one in members(schema, root):
            values = constants(one)
            if values is not None:
                texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
                bodies.append(grammar.terminal(f"{either([*map(quoted, texts)])} {closing}"))
            elif isinstance(one, Mapping) and one.get("type") == "string":
                bodies.append(grammar.terminal(f"{text_pattern(one, [_END])} {closing}"))
            else:
                bodies.append(grammar.rule(f"{grammar.rule(json_of(with_definitions(one, root)))} {closing}"))
        return grammar.rule(f"{opening} {grammar.rule(either(bodies))}")
