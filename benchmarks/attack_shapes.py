"""The worst shapes of answers, histories of tools and lists of tools, which `benchmarks.serve_attacks` sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

BODY = 7 << 20
"""Bytes of a large body; the server's default limit is 8 MiB."""
SERIAL = "0serial0"
"""Text in the body of a flood that each request replaces by a number of its own, of as many digits."""
CHATS, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
_LIMIT = 130_000
"""Characters of a large shape; the limit is 131,072."""
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100}


def numbered(request: bytes, number: int) -> bytes:
    """Return a request with a number in place of `SERIAL`."""
    return request.replace(SERIAL.encode(), f"{number:0{len(SERIAL)}}".encode())


def _objects(levels: int) -> dict[str, Any]:
    """Return the schema of objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and JSON schemas that take long to compile, are refused late, or have slow masks."""
    numbers = range(10_000)
    letters = {"enum": [*"abcdefgh"]}
    sides = [{"properties": {f"k{n}": {"enum": [n, n + 1]}}, "required": [f"k{n}"]} for n in range(12)]
    yield "deep", _objects(60)
    yield "wide", _object({f"{n}": {} for n in range(9_000)}, additionalProperties=False)
    yield "strings by the thousand", _object({f"{n}": {"type": "string", "pattern": f"^(a|b)*{n}$"} for n in range(2_000)})
    yield "an enum", {"enum": [f"{n}" for n in range(14_000)]}
    yield "an enum of objects", {"enum": [{"a": [n, {"b": f"{n}"}]} for n in range(4_000)]}
    yield (
        "all required",
        _object({f"k{n}": {"type": "integer"} for n in range(3_000)}, required=[f"k{n}" for n in range(3_000)]),
    )
    yield "required beside nothing", {"type": "object", "required": [f"k{n}" for n in numbers]}
    yield "many items", {"type": "array", "items": {"type": "array", "items": letters, "minItems": 999}, "minItems": 999_999}
    yield (
        "nested repeats of items",
        {
            "type": "array",
            "maxItems": 900,
            "items": {"type": "array", "maxItems": 900, "items": {"type": "array", "maxItems": 900, "items": letters}},
        },
    )
    yield "long texts", _object({f"k{n}": {"type": "string", "minLength": 9_999, "maxLength": 99_999} for n in range(99)})
    yield (
        "cycles",
        {
            "$ref": "#/$defs/a",
            "$defs": {n: {"anyOf": [{"$ref": f"#/$defs/{m}"} for m in "abcdefgh"] + [letters]} for n in "abcdefgh"},
        },
    )
    yield (
        "trees",
        {
            "$ref": "#/$defs/t",
            "$defs": {
                "t": _object({"l": {"$ref": "#/$defs/t"}, "r": {"$ref": "#/$defs/t"}, "v": {"type": ["null", "number"]}})
            },
        },
    )
    yield (
        "a chain of references",
        {
            "$ref": "#/$defs/k0",
            "$defs": {f"k{n}": {"$ref": f"#/$defs/k{n + 1}"} for n in range(2_000)} | {"k2000": letters},
        },
    )
    yield (
        "a product of choices",
        {"allOf": [{"anyOf": [side, {"properties": {"z": {"const": n}}}]} for n, side in enumerate(sides)]},
    )
    yield "one of many", {"oneOf": [_object({f"k{m}": {"const": n} for m in range(20)}) for n in range(200)]}
    nested: dict[str, Any] = letters
    for n in range(9):
        nested = {"anyOf": [_object({"a": nested}), {"type": "array", "items": nested, "minItems": n}]}
    yield "nested choices", nested
    yield "patterns of names", {"type": "object", "patternProperties": {f"^(a|b|c)*{n}.*$": {} for n in range(300)}}
    yield "numbers", _object({f"k{n}": {"type": "number", "minimum": n / 7, "maximum": 1e17 + n} for n in range(200)})
    yield "multiples", {"type": "integer", "allOf": [{"multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]}


def patterns() -> Iterator[tuple[str, str]]:
    """Yield names and regular expressions of the exponential kind."""
    yield "an ambiguous star", "(a|aa|aaa|[ab]*)*c"
    yield "optional letters", "(a?){200}a{200}"
    yield "a letter from the end", "[ab]*a[ab]{30}"
    yield "any letter from the end", "(?s:.*)a(?s:.){60}"
    yield "nested repeats", "(((a{1,100}){1,100}){1,100}){1,100}"
    yield "stars within stars", f"{'(' * 200}a{'*b?)' * 200}"
    yield "words in any order", "|".join(f"(.*{chr(97 + n % 26)}.*{n}.*)" for n in range(2_000))
    yield "classes of letters", r"(\p{L}|\p{N}|\w|\W){1,2000}"
    yield "large classes", "[^a-z]" * 20_000


def grammars() -> Iterator[tuple[str, str]]:
    """Yield names and Lark grammars."""
    yield "an ambiguous grammar", 'start: s\ns: s s s | s s | "a" |'
    yield "an ambiguous grammar of letters", "start: s\ns: s s s | s s | L |\nL: /[a-z]/"
    yield "left recursion", 'start: a\na: b "x" | "y"\nb: c | a\nc: a | "z" c | c'
    chain = "".join(f"r{n}: r{n + 1} | r{n + 1} r{n + 1}\n" for n in range(3_000))
    yield "a chain of rules", f'start: r0\n{chain}r3000: "a"'
    yield (
        "many rules",
        "start: " + " | ".join(f"r{n}" for n in range(3_000)) + "".join(f"\nr{n}: /[a-z]*{n}/" for n in range(3_000)),
    )
    yield "a deep grammar", f'start: {"(" * 20_000}"a"{")" * 20_000}'
    yield "overlapping lexemes", "start: (" + " | ".join(f"/[a-z]*[{chr(97 + n)}-z][a-z0-9]{{{n}}}/" for n in range(24)) + ")*"
    yield "intersections", "start: A\nA: " + " & ".join(f"/(?s:.*)(a|b){{{n}}}c(?s:.*)/" for n in range(1, 20))


def _forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and values of `structured_outputs`."""
    for name, schema in schemas():
        yield f"a schema, {name}", {"json": schema}
    for name, pattern in patterns():
        yield f"a pattern, {name}", {"regex": pattern}
    for name, grammar in grammars():
        yield name, {"grammar": grammar}
    yield "choices", {"choice": [f"{n:0>30}" for n in range(4_000)]}
    yield "choices of one beginning", {"choice": ["a" * n for n in range(1, 500)]}


def _refused() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and values of `structured_outputs` beyond a limit."""
    yield "a schema of 7 MiB", {"json": {"enum": ["ab"] * (BODY // 6)}}
    yield "a schema nested in a text", {"json": '{"items":' * (_LIMIT // 9)}
    yield "lists nested in a text", {"json": '{"enum":' + "[" * 60_000 + "]" * 60_000 + "}"}
    yield "100,000 choices", {"choice": ["a"] * 100_000}
    yield "a pattern of 7 MiB", {"regex": "(a|" * (BODY // 3)}
    yield "a grammar of 7 MiB", {"grammar": "start: " * (BODY // 7)}


def _tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def tools() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, route and body of the attacks with tools."""
    cities = _object({"city": {"type": "string"}}, required=["city"])
    hundred = [_tool(f"tool_{n}", cities) for n in range(128)]
    slow = _object({"a": {"type": "string", "pattern": "^[ab]*a[ab]{30}$"}}, required=["a"])
    giant = _object({f"k{n}": {"enum": [f"{n}", n]} for n in range(3_000)})
    forced = {"type": "function", "function": {"name": "slow"}}
    yield "1,000 tools", CHATS, {**_CHAT, "tools": [_tool(f"tool_{n}", cities) for n in range(1_000)]}
    yield "128 tools, any", CHATS, {**_CHAT, "tools": hundred, "tool_choice": "required"}
    yield "a giant schema", CHATS, {**_CHAT, "tools": [_tool("giant", giant)], "tool_choice": "required"}
    yield "a schema of 7 MiB", CHATS, {**_CHAT, "tools": [_tool("giant", {"enum": ["ab"] * (BODY // 6)})]}
    yield "a slow pattern, forced", CHATS, {**_CHAT, "tools": [_tool("slow", slow)], "tool_choice": forced}
    yield "a long name", CHATS, {**_CHAT, "tools": [_tool("a" * BODY, cities)]}
    yield "a long description", CHATS, {**_CHAT, "tools": [_tool("slow", _object({"a": {"description": "<" * BODY}}))]}
    call = {"id": "1", "type": "function", "function": {"name": "n" * 64, "arguments": json.dumps({"a": "b" * 1_000})}}
    asked = [
        {"role": "assistant", "content": None, "tool_calls": [call] * 100},
        {"role": "tool", "content": "a", "tool_call_id": "1"},
    ]
    yield "calls in a history", CHATS, {**_CHAT, "messages": [*_CHAT["messages"], *asked * 50], "tools": hundred}
    huge = {**call, "function": {"name": "n", "arguments": json.dumps({"a": [0] * (BODY // 4)})}}
    yield "arguments of 7 MiB", CHATS, {**_CHAT, "messages": [*_CHAT["messages"], {"role": "assistant", "tool_calls": [huge]}]}
    nested = {**call, "function": {"name": "n", "arguments": '{"a":' * 200_000}}
    yield "nested arguments", CHATS, {**_CHAT, "messages": [*_CHAT["messages"], {"role": "assistant", "tool_calls": [nested]}]}
    told = [{"role": "tool", "content": "a" * 1_500, "tool_call_id": "1"}] * 4_000
    yield "4,000 answers of tools", CHATS, {**_CHAT, "messages": [*_CHAT["messages"], *told]}
    given = [{"type": "function_call_output", "call_id": "1", "output": "a" * 1_500}] * 4_000
    yield "4,000 answers of tools, responses", RESPONSES, {"input": given, "max_output_tokens": 16}
    functions = [{"type": "function", "name": f"tool_{n}", "parameters": cities} for n in range(128)]
    yield (
        "128 tools, responses",
        RESPONSES,
        {"input": "a", "max_output_tokens": 100, "tools": functions, "tool_choice": "required"},
    )
    named = [{"name": f"tool_{n}", "input_schema": slow} for n in range(128)]
    anthropic = {"messages": _CHAT["messages"], "max_tokens": 100, "tools": named, "tool_choice": {"type": "any"}}
    yield "128 slow tools, messages", MESSAGES, anthropic


def _through(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the attack of a schema in the chat's form and in that of responses."""
    described = {"name": "a", "schema": schema}
    yield f"{name}, chats", CHATS, {**_CHAT, "response_format": {"type": "json_schema", "json_schema": described}}
    text = {"format": {"type": "json_schema", **described}}
    yield f"{name}, responses", RESPONSES, {"input": "a", "max_output_tokens": 100, "text": text}


def shape_attacks() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, route and body of every attack with shapes and tools."""
    for name, form in (*_forms(), *_refused()):
        yield f"shapes: {name}", COMPLETIONS, {"prompt": "a", "max_tokens": 100, "structured_outputs": form}
    for name, schema in (("wide", dict(schemas())["wide"]), ("deep", _objects(400)), ("long", {"enum": ["ab"] * (BODY // 6)})):
        for title, route, body in _through(name, schema):
            yield f"shapes: a schema, {title}", route, body
    for title, pattern in patterns():
        body = {"prompt": "a", "n": 64, "max_tokens": 200, "seed": 1, "structured_outputs": {"regex": pattern}, "stream": True}
        yield f"shapes: 64 samples, {title}", COMPLETIONS, body
    for name, route, body in tools():
        yield f"tools: {name}", route, body


def _another(form: dict[str, Any]) -> dict[str, Any]:
    """Return a value of `structured_outputs` that is a new one in each request."""
    name, shape = next(iter(form.items()))
    match name:
        case "json":
            return {name: {**shape, "description": SERIAL}}
        case "regex":
            return {name: f"({shape}|{SERIAL})"}
        case "grammar":
            return {name: f"{shape}\n// {SERIAL}\n"}
    return {name: [*shape, SERIAL]}


def shape_floods() -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """Yield name, route and body of every flood with shapes and tools, and whether its clients hang up after sending.

    Each request of a flood of new shapes compiles its own.
    """
    forms, ask = dict(_forms()), {"prompt": "a", "max_tokens": 100}
    for name in (
        "a schema, wide",
        "a schema, an enum",
        "a schema, a product of choices",
        "a schema, nested choices",
        "a schema, a chain of references",
        "a pattern, a letter from the end",
        "a pattern, nested repeats",
        "many rules",
        "choices",
    ):
        yield f"new shapes: {name}", COMPLETIONS, {**ask, "structured_outputs": _another(forms[name])}, False
    wide = _another(forms["a schema, wide"])
    yield "new shapes, hung up", COMPLETIONS, {**ask, "structured_outputs": wide}, True
    slow = {"regex": f"[ab]*a[ab]{{30}}{SERIAL}"}
    samples = {**ask, "max_tokens": 300, "n": 4, "ignore_eos": True, "stream": True}  # leaves sequences to others
    yield "new shapes, samples", COMPLETIONS, {**samples, "structured_outputs": slow}, False
    for name in (
        "an ambiguous grammar",
        "an ambiguous grammar of letters",
        "a schema, strings by the thousand",
        "overlapping lexemes",
        "choices",
    ):
        yield f"one shape, samples: {name}", COMPLETIONS, {**samples, "structured_outputs": forms[name]}, False
    for name, form in _refused():
        yield f"shapes: {name}", COMPLETIONS, {**ask, "structured_outputs": form}, False
    for title, route, body in _through("wide", _another(forms["a schema, wide"])["json"]):
        yield f"new shapes: a schema, {title}", route, body, False
    for name, route, body in tools():
        yield f"tools: {name}", route, body, False
