"""Calls written as a list of calls in Python: `[search(query="Oslo", limit=3), now()]`."""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from chunkattn.answer_parsers.events import Sink
from chunkattn.answer_parsers.grammar import Grammar, either, json_of, quoted
from chunkattn.answer_parsers.schema_values import Schema, constants, members, properties_of, with_definitions
from chunkattn.answer_parsers.source import Source, Wait
from chunkattn.answer_parsers.tool_parser import CallsAtBeginning, one_of_tools, register_tool_parser, repeated
from chunkattn.answer_parsers.tools import Tool, Tools

_NAME_CHAR = re.compile(r"[A-Za-z0-9_.:\s-]")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = frozenset("\\'\"abfnrtvxuUN01234567\n")
"""Characters that follow a backslash in a string of Python; behind any other one, the backslash stands for itself."""
_WORDS = ("true", "false", "null")
"""Words of JSON that models write in place of Python's."""
_MAX_CHARS = 1 << 16
_BEFORE_NAME = "_"
"""Prefix of every argument's name in the text for Python's parser, which refuses keywords such as `from` as names."""
_QUOTES = ('"""', "'''", '"', "'")


@register_tool_parser("pythonic", "llama4_pythonic")
class Pythonic(CallsAtBeginning):
    """Llama 4, Llama 3.2 and ToolACE: the whole answer is a list of calls, whose arguments are literals with their names.

    A call begins once it is closed. A list may be no calls, so only the names of functions that the request has are calls.
    """

    traces = ("[func_name1(params_name1=",)
    markers = ("<|python_start|>", "<|python_end|>")
    first = "["

    def read_calls(self, source: Source, sink: Sink, tools: Tools) -> Wait[bool]:
        """Read the calls at the beginning of the answer."""
        yield from source.space()
        yield from source.took(self.markers[0])
        yield from source.space()
        has_begun = False
        if not (yield from source.took("[")):
            return False
        while True:
            yield from source.space()
            name = ((yield from source.line_until(("(",), _NAME_CHAR)) or "").rstrip()
            if name not in tools.by_name or (arguments := (yield from self._arguments(source))) is None:
                if has_begun:
                    yield from source.rewind_unless_cut()
                return has_begun
            source.release()
            has_begun = True
            sink.call(name)
            sink.arguments(arguments)
            source.mark()
            yield from source.space()
            if not (yield from source.took(",")):
                break
        if not (yield from source.took("]")):
            source.rewind()
        yield from source.took(self.markers[1])
        return True

    def _arguments(self, source: Source) -> Wait[str | None]:
        """Return the arguments of a call as JSON, from its opening bracket to its closing one; None if they are malformed."""
        text, depth, begins_name = "", 0, False
        while (char := (yield from source.peek())) and len(text) < _MAX_CHARS:
            if char in "\"'":
                begins_name = False
                for quote in _QUOTES:
                    if (yield from source.took(quote)):
                        break
                text += quote
                while not (yield from source.took(quote)):
                    piece = yield from source.character()
                    piece += (yield from source.character()) if piece == "\\" else ""
                    if not piece or len(text) > _MAX_CHARS:
                        return None
                    text += "\\n" if piece == "\n" else _ESCAPE.sub(_as_python, piece)
                text += quote
                continue
            is_space = char.isspace()
            text += _BEFORE_NAME if begins_name and not is_space and char != ")" else ""
            text += yield from source.character()
            depth += (char in "([{") - (char in ")]}")
            begins_name = depth == 1 and (char in "(," or (begins_name and is_space))
            if not depth:
                return _json_of_call(text)
        return None

    def calls(self, grammar: Grammar, tools: Tools) -> str:
        """Return the expression of a list of calls."""
        call = one_of_tools(grammar, tools, lambda tool: self._call(grammar, tool))
        calls = repeated(grammar, tools, call, f"{quoted(', ')} {call}")
        return f"{quoted('[')} {calls} {quoted(']')}"

    def _call(self, grammar: Grammar, tool: Tool) -> str:
        entries = []
        for key, (schema, is_required) in properties_of(tool.parameters, tool.name, _is_name).items():
            entries.append((f"{quoted(f'{key}=')} {self._value(grammar, schema, tool.parameters)}", is_required))
        return f"{quoted(f'{tool.name}(')} {grammar.listed(entries, ', ')} {quoted(')')}"

    def _value(self, grammar: Grammar, schema: Schema, root: Schema) -> str:
        """Return the rule of a value: JSON, with Python's words for those of JSON outside of lists and objects."""
        bodies = list[str]()
        for one in members(schema, root):
            kind, values = one.get("type") if isinstance(one, Mapping) else None, constants(one)
            if kind in ("boolean", "null") and values is None:
                values = [None] if kind == "null" else [True, False]
            if values is not None:
                bodies += [quoted(repr(v) if v is None or isinstance(v, bool) else _json(v)) for v in values]
            else:
                bodies.append(grammar.rule(json_of(with_definitions(one, root))))
        return grammar.rule(either(bodies))


def _is_name(text: str) -> bool:
    """Return whether a text is a name that Python's parser, which normalizes names, reads unchanged."""
    return text.isidentifier() and unicodedata.is_normalized("NFKC", text)


def _as_python(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] in _ESCAPED else f"\\{escape[0]}"


def _json(value: Any) -> str:
    """Return a value as JSON. A number that is too large for a float is written as one that is."""
    return "1e999" if value == math.inf else json.dumps(value, ensure_ascii=False)


def _json_of_call(text: str) -> str | None:
    """Return the arguments of a call as JSON.

    Args:
        text: the arguments in Python, with their brackets and `_BEFORE_NAME` before every name.

    Returns:
        The text of an object; None if the arguments are malformed, or are no literals with names.
    """
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        names = [(one.arg or "").removeprefix(_BEFORE_NAME) for one in call.keywords]
        if not all(map(str.isidentifier, names)):
            return None
        named = _json_of_entries((_json(name), one.value) for name, one in zip(names, call.keywords, strict=True))
        return named.encode("utf-16", "surrogatepass").decode("utf-16")  # two escapes of JSON may be one character
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _json_of_entries(entries: Iterable[tuple[str, ast.expr]]) -> str:
    return f"{{{', '.join(f'{key}: {_json_of_literal(value)}' for key, value in entries)}}}"


def _json_of_literal(node: ast.expr | None) -> str:
    """Return the JSON of a literal of Python, or of a word of JSON.

    Raises:
        ValueError: the expression is neither.
    """
    if isinstance(node, (ast.List, ast.Tuple)):
        return f"[{', '.join(map(_json_of_literal, node.elts))}]"
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return _json(value)
        case ast.Name(id=word) if word in _WORDS:
            return word
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return f"-{_json(value)}"
        case ast.Dict(keys=keys, values=values) if all(_is_text(key) for key in keys):
            return _json_of_entries(zip(map(_json_of_literal, keys), values, strict=True))
    raise ValueError("no literal")


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
