"""Fields of a body that give the generated text a shape: `structured_outputs` and `response_format`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from chunkattn.structured_outputs import MAX_CHOICES, PARAM, StructuredOutputsParams

SHAPE_FIELDS = {PARAM: (PARAM, "response_format")}
"""Fields that may hold the shape; see `Body.fields_of`."""
_NAMES = [field.name for field in fields(StructuredOutputsParams)]
_FORMATS = ("text", "json_object", "json_schema")
_OF_SCHEMA = ("name", "description", "schema", "strict")

# The values become parameters of the engine where a body is validated: in a thread, as a schema may be large.


def _names(value: Any, known: list[str] | tuple[str, ...], where: str) -> Mapping[str, Any]:
    """Return an object without its nulls.

    Raises:
        ValueError: the value is no object, or has an unknown name.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object")
    given = {name: one for name, one in value.items() if one is not None}
    if unknown := sorted(given.keys() - {*known}):
        raise ValueError(f"{where} has the unknown field {unknown[0][:40]!r}; fields are {', '.join(known)}")
    return given


def _of_object(value: Any) -> StructuredOutputsParams | None:
    """Return the shape that `structured_outputs` asks for."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    return StructuredOutputsParams(**_names(value, _NAMES, "structured_outputs"))


def _of_format(value: Any) -> StructuredOutputsParams | None:
    """Return the shape that `response_format` asks for; None for plain text."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    given = _names(value, ("type", "json_schema"), "response_format")
    kind = given.get("type")
    if kind not in _FORMATS:
        raise ValueError(f"type must be one of {', '.join(_FORMATS)}")
    if (kind == "json_schema") != ("json_schema" in given):
        raise ValueError(f"json_schema belongs to type 'json_schema', and the type is {kind!r}")
    if kind != "json_schema":
        return StructuredOutputsParams(json_object=True) if kind == "json_object" else None
    described = _names(given["json_schema"], _OF_SCHEMA, "json_schema")
    for name, type_ in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(described.get(name, type_()), type_):
            raise ValueError(f"{name} of json_schema must be {'a text' if type_ is str else 'true or false'}")
    if not isinstance(described.get("schema"), Mapping):
        raise ValueError("json_schema needs schema, an object")
    return StructuredOutputsParams(json=described["schema"])


_TEXT = {"type": "string"}
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
StructuredOutputs = Annotated[
    StructuredOutputsParams | None,
    PlainValidator(_of_object),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": {"anyOf": [_TEXT, _ANY_OBJECT]},
                "regex": _TEXT,
                "choice": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
                "grammar": _TEXT,
                "json_object": {"type": "boolean"},
                "disable_any_whitespace": {"type": "boolean"},
            },
            "additionalProperties": False,
        }
    ),
]
"""Value of the field `structured_outputs`; see `StructuredOutputsParams`."""
ResponseFormat = Annotated[
    StructuredOutputsParams | None,
    PlainValidator(_of_format),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": [*_FORMATS]},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _TEXT, "description": _TEXT, "schema": _ANY_OBJECT, "strict": {"type": "boolean"}},
                    "required": ["schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        }
    ),
]
"""Value of the field `response_format`, OpenAI's."""
