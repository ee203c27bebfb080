"""Options as the fields of a dataclass: names, types, defaults and help texts, for command lines and for checks."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])


class Option(NamedTuple):
    """Field of a dataclass as an option.

    Attributes:
        name: name of the field.
        kind: type of the option's values; `tuple` for an option of several values.
        is_optional: whether None is a value.
        default: default of the field.
        text: description in the docstring of the class.
        element: type of each of several values.
    """

    name: str
    kind: type
    is_optional: bool
    default: Any
    text: str
    element: type = str

    @property
    def flag(self) -> str:
        """Return the flag on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def type_name(self) -> str:
        """Return the name of the type, such as `int | None`."""
        return self.kind.__name__ + " | None" * self.is_optional

    @property
    def help(self) -> str:
        """Return the description as a sentence without code spans."""
        return as_help(self.text)

    def accepts(self, value: Any) -> bool:
        """Return whether a value has the option's type. A float takes integers, and no number takes a bool."""
        if value is None or isinstance(value, bool):
            return self.is_optional if value is None else self.kind is bool
        return isinstance(value, (int, float) if self.kind is float else self.kind)


_by_class: dict[type, dict[str, Option]] = {}
"""Options of the classes that were asked for."""


def options_of(cls: type) -> dict[str, Option]:
    """Return the fields of a dataclass as options, by name.

    Args:
        cls: dataclass whose fields are of type `bool`, `int`, `float`, `str` or `tuple[T, ...]`, or that or None.
    """
    if cls not in _by_class:
        hints, texts = get_type_hints(cls), descriptions(cls)
        _by_class[cls] = {f.name: _option(f, hints[f.name], texts.get(f.name, "")) for f in fields(cls)}
    return _by_class[cls]


def take_paths(options: Any) -> None:
    """Replace `pathlib.Path` and the like by their texts, in the options of type `str` of a frozen dataclass.

    Args:
        options: instance of a class for `options_of`.
    """
    for option in options_of(type(options)).values():
        if option.kind is str and isinstance(value := getattr(options, option.name), os.PathLike):
            object.__setattr__(options, option.name, os.fspath(value))


def _option(field: Field[Any], hint: Any, text: str) -> Option:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    element = (*get_args(kinds[0]), str)[0]
    return Option(field.name, get_origin(kinds[0]) or kinds[0], NoneType in kinds, field.default, text, element)


def as_help(description: str) -> str:
    """Return a description as a sentence without code spans; a code span that begins it keeps its small letter."""
    return (description[:1].upper() + description[1:]).replace("`", "")


def descriptions(thing: Any) -> dict[str, str]:
    """Return the description of every attribute or argument in the docstring of a class or function, by name."""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(thing.__doc__ or ""), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def list_options(options: type, call: Callable[..., Any]) -> Callable[[F], F]:
    """Return a decorator that shows, in `help` and in the signature of a function, the options that it takes as `**options`.

    Args:
        options: typed dictionary of the options, whose docstring describes them.
        call: function that takes the options by name and has their defaults.
    """

    def decorate(function: F) -> F:
        signature, defaults = inspect.signature(function), inspect.signature(call).parameters
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        text, described = inspect.getdoc(function) or "", inspect.getdoc(options) or ""
        parameters += [defaults[name] for name in options.__annotations__]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__doc__ = re.sub(r"    \*\*options: .*", lambda _: described.partition("Attributes:\n")[2], text)
        return function

    return decorate
