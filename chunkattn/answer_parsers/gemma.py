"""Gemma's calls: `call:NAME{key:value}` between two markers, with a marker of its own around every text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.grammar import Grammar, either, json_of, quoted
from chunkattn.answer_parsers.schema_values import (
    Schema,
    constants,
    escaped,
    members,
    properties_of,
    text_pattern,
    value_of,
    with_definitions,
)
from chunkattn.answer_parsers.source import Source, Wait
from chunkattn.answer_parsers.tool_parser import ToolParser, one_of_tools, register_tool_parser, repeated
from chunkattn.answer_parsers.tools import NAME, Tool, Tools

_KEY_CHAR = re.compile(r"[^{}\[\],:<]")
_KEYS = re.compile(f"{_KEY_CHAR.pattern}*")
_WORD_CHAR = re.compile(r"[^{}\[\],<]")
_MAX_DEPTH = 64
_KEY = "/[A-Za-z0-9_]+/"


def _is_key(text: str) -> bool:
    """Return whether a name is read unchanged before a colon, where space around it is dropped."""
    return text == text.strip() and _KEYS.fullmatch(text) is not None


@register_tool_parser("functiongemma")
class FunctionGemma(ToolParser):
    """FunctionGemma: `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`."""

    traces = openings = ("<start_function_call>",)
    markers = ("<end_function_call>", "<escape>")
    closing: ClassVar[str] = "<end_function_call>"
    quote: ClassVar[str] = "<escape>"

    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read a call."""
        yield from source.took(self.openings[0])
        yield from source.space()
        if not (yield from source.took("call:")):
            return False
        name = yield from source.line_until(("{",), _WORD_CHAR)
        if name is None or not NAME.fullmatch(name.strip()):
            return False
        source.release()
        sink.call(name.strip())
        is_whole = yield from self._value(source, sink, _MAX_DEPTH)
        if not is_whole:
            yield from source.drop_cut((self.quote,))
        yield from source.until((self.closing,), sink.content if is_whole else sink.arguments, drops_cut=True)
        yield from source.took(self.closing)
        return True

    def _value(self, source: Source, sink: Sink, depth: int) -> Wait[bool]:
        """Pass a value on as JSON; return False at the first fault, which is the place then."""
        yield from source.space()
        if (yield from source.took(self.quote)):
            sink.arguments('"')
            end = yield from source.until((self.quote,), lambda text: sink.arguments(escaped(text)), drops_cut=True)
            if end is None:
                return False
            yield from source.took(self.quote)
            sink.arguments('"')
            return True
        opening = yield from source.peek()
        if opening in ("{", "[") and depth:
            return (yield from self._container(source, sink, depth - 1))
        word = yield from source.line_until((",", "}", "]"), _WORD_CHAR)
        if not word:
            return False
        sink.arguments(value_of(word.strip(), frozenset()))
        return True

    def _container(self, source: Source, sink: Sink, depth: int) -> Wait[bool]:
        is_object = yield from source.took("{")
        if not is_object:
            yield from source.took("[")
        closing = "}" if is_object else "]"
        sink.arguments("{" if is_object else "[")
        yield from source.space()
        while not (yield from source.took(closing)):
            if is_object:
                yield from source.space()
                quotes = yield from source.took(self.quote)
                key = yield from source.line_until((self.quote,) if quotes else (":",), _KEY_CHAR)
                if key is None:
                    return False
                if quotes:
                    yield from source.took(self.quote)
                yield from source.took(":")
                sink.arguments(f'"{escaped(key.strip())}": ')
            if not (yield from self._value(source, sink, depth)):
                return False
            yield from source.space()
            if (yield from source.took(",")):
                sink.arguments(", ")
            elif not (yield from source.starts(closing)):
                return False
        sink.arguments(closing)
        return True

    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of calls, with the properties of objects in the order of the schema."""
        opening, closing = grammar.marker(self.openings[0]), grammar.marker(self.closing)
        call = one_of_tools(grammar, tools, lambda tool: _Values(self.quote, grammar, tool).call())
        body = f"{call} {closing}"
        return repeated(grammar, tools, body, f"{opening} {body}")


@register_tool_parser("gemma4")
class Gemma4(FunctionGemma):
    """Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`."""

    traces = openings = ("<|tool_call>",)
    markers = ("<tool_call|>", '<|"|>')
    closing = "<tool_call|>"
    quote = '<|"|>'


class _Values:
    """Rules for the values of a function's arguments.

    Args:
        quote: marker around texts.
        grammar: grammar of the rules.
        tool: the function.
    """

    def __init__(self, quote: str, grammar: Grammar, tool: Tool) -> None:
        self._quote, self._grammar, self._tool = quote, grammar, tool
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def call(self) -> str:
        return f"{quoted(f'call:{self._tool.name}')} {self._object(self._tool.parameters)}"

    def _value(self, schema: Schema) -> str:
        """Return the expression of the values of a schema. A `$ref` is a rule, since it may lead to itself."""
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str):
            return self._grammar.rule(either([self._member(one) for one in members(schema, self._tool.parameters)]))
        if (name := self._references.get(path)) is None:
            name = self._references[path] = self._grammar.forward()
            self._grammar.define(name, either([self._member(one) for one in members(schema, self._tool.parameters)]))
        return name

    def _member(self, schema: Schema) -> str:
        values, kind = constants(schema), schema.get("type") if isinstance(schema, Mapping) else None
        if values is not None:
            return self._grammar.rule(either([self._constant(value) for value in values]))
        if not isinstance(schema, Mapping) or kind is None:
            return self._anything()
        if kind == "string":
            return self._text(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema) if "properties" in schema else self._anything_in_braces()
        return self._grammar.rule(json_of(with_definitions(schema, self._tool.parameters)))

    def _text(self, schema: Mapping[str, object]) -> str:
        quote = self._grammar.marker(self._quote)
        if self._grammar.is_token(self._quote):
            return self._grammar.rule(f"{quote} {self._grammar.terminal(text_pattern(schema, []))} {quote}")
        return self._grammar.rule(f"{quote} {self._grammar.terminal(f'{text_pattern(schema, [self._quote])} {quote}')}")

    def _constant(self, value: object) -> str:
        quote = self._grammar.marker(self._quote)
        if isinstance(value, str):
            return f"{quote} {quoted(value)} {quote}" if value else f"{quote} {quote}"
        return quoted(json.dumps(value, ensure_ascii=False))

    def _array(self, schema: Mapping[str, object]) -> str:
        items = schema.get("items", True)
        value = self._value(items if isinstance(items, (Mapping, bool)) else True)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return quoted("[]")
        most = "" if not isinstance(high, int) else high - 1
        rest = self._grammar.rule(f"{quoted(',')} {value}")
        listed = f"{value} {rest}{{{max(0, low - 1) if isinstance(low, int) else 0},{most}}}"
        return f"{quoted('[')} {f'({listed})?' if not low else listed} {quoted(']')}"

    def _object(self, schema: Schema) -> str:
        """Return the expression of an object: its properties in order, of which those that are not required may be absent."""
        entries = [
            (f"{quoted(f'{key}:')} {self._value(one)}", is_required)
            for key, (one, is_required) in properties_of(schema, self._tool.name, _is_key).items()
        ]
        return f"{quoted('{')} {self._grammar.listed(entries, ',')} {quoted('}')}" if entries else quoted("{}")

    def _anything(self) -> str:
        """Return the rule of any value."""
        if self._any is None:
            self._any = self._grammar.forward()
            listed = self._grammar.rule(f"{quoted('[')} ({self._any} ({quoted(',')} {self._any})*)? {quoted(']')}")
            scalar = self._grammar.rule(json_of({"type": ["number", "boolean", "null"]}))
            bodies = [self._text({}), scalar, listed, self._anything_in_braces()]
            self._grammar.define(self._any, either(bodies))
        return self._any

    def _anything_in_braces(self) -> str:
        entry = f"{self._grammar.terminal(_KEY)} {quoted(':')} {self._anything()}"
        return self._grammar.rule(f"{quoted('{')} ({entry} ({quoted(',')} {entry})*)? {quoted('}')}")
