"""JSON schemas of single values, for families that write texts without JSON's quotes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chunkattn.answer_parsers.grammar import ANY_TEXT, quoted
from chunkattn.errors import RequestError

Schema = Mapping[str, Any] | bool

_MAX_REFERENCES = 32
_UNIONS = ("anyOf", "oneOf")
_NOT_PARTS = ("$ref", "allOf", "if", "not", "dependentSchemas", "dependentRequired", "patternProperties", "minProperties")
"""Keywords of an object that say more than its properties do."""
_TYPES = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (Mapping, "object"), (Sequence, "array"))
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Words of Python, as which some templates write values, by those of JSON."""


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return a schema, or the one of the root that its `$ref` names.

    Raises:
        RequestError: a reference leads to nothing, or around in a circle.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(path := schema.get("$ref"), str):
            return schema
        target: Any = root
        for step in path.removeprefix("#").split("/")[1:]:
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not path.startswith("#") or not isinstance(target, (Mapping, bool)):
            raise RequestError(f"a schema of tools refers to {path[:80]!r}, which it does not hold", param="tools")
        schema = target
    raise RequestError("a schema of tools refers to itself", param="tools")


def members(schema: Schema, root: Schema) -> list[Schema]:
    """Return the schemas of which a value fits one: those of a union, and one for each type."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return [schema]
    for name in _UNIONS:
        if isinstance(listed := schema.get(name), list) and listed:
            return [one for entry in listed for one in members(entry, root)]
    if isinstance(kinds := schema.get("type"), list) and "enum" not in schema:
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the types of JSON that values of a schema may have; empty if it says nothing of them."""
    found = set[str]()
    for one in members(schema, root):
        if not isinstance(one, Mapping):
            continue
        values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
        if values:
            found |= {kind_of(value) for value in values}
        elif isinstance(one.get("type"), str):
            found.add(one["type"])
    return frozenset(found)


def kind_of(value: Any) -> str:
    """Return the type of a JSON value."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def constants(schema: Schema) -> list[Any] | None:
    """Return the only values of a schema, or None."""
    if not isinstance(schema, Mapping):
        return None
    return schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None


def value_of(text: str, found: frozenset[str]) -> str:
    """Return the JSON of a value that was written without JSON's quotes around texts.

    Args:
        text: text of the value.
        found: types that the value may have; empty for any.
    """
    if found != {"string"}:
        text_of_json = _WORDS.get(text.strip(), text.strip())
        try:
            value = json.loads(text_of_json, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        kind = kind_of(value)
        if not found or kind in found or (kind == "integer" and "number" in found) or "string" not in found:
            return text_of_json
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def text_pattern(schema: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return the expression of a terminal for the texts of a schema that hold none of several markers.

    Args:
        schema: schema of a text.
        ends: markers that end such a text.
    """
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    patterns = [f"/(?s:.{{{low},{high}}})/" if low or high != "" else ANY_TEXT]
    if isinstance(pattern := schema.get("pattern"), str):
        before = "" if pattern.startswith("^") else "(?s:.*)"
        behind = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^").removesuffix("$" if not behind else "")
        between_slashes = inner.replace("/", "\\/").replace("\n", "\\n")
        patterns.append(f"/{before}(?:{between_slashes}){behind}/")
    patterns += [f"~({ANY_TEXT} {quoted(end)} {ANY_TEXT})" for end in ends]
    return f"({' & '.join(patterns)})"


def properties_of(schema: Schema, name: str, can_write: Callable[[str], bool]) -> dict[str, tuple[Schema, bool]]:
    """Return the properties of an object with whether each is required, in the schema's order.

    Args:
        schema: schema of the object.
        name: name of the function, for error messages.
        can_write: function that returns whether calls can hold a property's name as their parser reads it.

    Raises:
        RequestError: the schema says more than properties do, or calls cannot hold the name of a property.
    """
    if not isinstance(schema, Mapping):
        return {}
    if further := next((word for word in (*_NOT_PARTS, *_UNIONS) if word in schema), None):
        text = f"{further!r} in the parameters of the tool {name!r} cannot be enforced in this model's form of calls"
        raise RequestError(text, param="tools")
    required, properties = schema.get("required", []), schema.get("properties", {})
    keys = [*properties, *(r for r in required if r not in properties)]
    if (unwritten := next((key for key in keys if not can_write(key)), None)) is not None:
        text = f"the property {unwritten[:80]!r} of the tool {name!r} is a name that this model's form of calls cannot hold"
        raise RequestError(text, param="tools")
    return {key: (properties.get(key, True), key in required) for key in keys}


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a part of a schema with the definitions that it may refer to."""
    if not isinstance(schema, Mapping) or not isinstance(root, Mapping):
        return schema
    return {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}
