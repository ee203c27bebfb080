"""Options of a command from the fields of dataclasses."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from chunkattn.errors import ConfigError
from chunkattn.options import Option, as_help, descriptions, options_of

T = TypeVar("T")
N = TypeVar("N", int, float)


def with_options(*groups: tuple[Any, ...], from_environment: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that adds options to a command, in place of its `**options`.

    Args:
        *groups: dataclass with defaults (see `options_of`), title of the help panel (None for the general one), and names of
            fields, separated by spaces; without names, all fields. `--help` lists them in the order of the class.
        from_environment: whether the variable `CHUNKATTN_` and the name in capitals sets an option, too.
    """

    def add(function: Any) -> Any:
        signature = inspect.signature(function, eval_str=True)
        listed = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for cls, panel, *names in groups:
            options = options_of(cls)
            chosen = names[0].split() if names else options
            listed += [_parameter(options[name], panel, from_environment) for name in options if name in chosen]
        function.__signature__ = signature.replace(parameters=listed)
        return function

    return add


def _parameter(option: Option, panel: str | None, from_environment: bool) -> inspect.Parameter:
    info = typer.Option(
        f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag,
        help=option.help,
        envvar=f"CHUNKATTN_{option.name.upper()}" if from_environment else None,
        rich_help_panel=panel,
        show_envvar=False,
    )
    kind, default = (list[option.element], list(option.default)) if option.kind is tuple else (option.kind, option.default)  # type: ignore[name-defined]
    annotation = Annotated[kind | None if option.is_optional else kind, info]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def documented(function: Callable[..., None]) -> inspect.Signature:
    """Return the signature of a command, whose options and arguments have the docstring's descriptions as their help.

    A parameter without a default is an argument, and any other an option, unless its annotation says otherwise. A help text in
    the annotation comes first.

    Args:
        function: function of the command.
    """
    signature, texts = inspect.signature(function, eval_str=True), descriptions(function)
    parameters = []
    for name, parameter in signature.parameters.items():
        annotation = parameter.annotation
        kind, *infos = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        info = copy(infos[0]) if infos else typer.Argument() if parameter.default is parameter.empty else typer.Option()
        info.help = info.help or as_help(texts[name])
        parameters.append(parameter.replace(annotation=Annotated[kind, info]))
    return signature.replace(parameters=parameters)


def options_for(cls: type[T], options: Mapping[str, Any], **others: Any) -> T:
    """Make a dataclass of a command's options.

    Args:
        cls: dataclass, of which the command has options.
        options: values by the names of the options; those of other classes pass.
        **others: fields that are no options, or have other values.
    """
    values = {name: options[name] for name in options_of(cls) if name in options}
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()} | others)


def check_keys(options: Mapping[str, Any], *names: str) -> None:
    """Check that no variable of a key is set but empty, as a secret that was not filled in would be.

    Args:
        options: values by the names of the options.
        *names: options that hold keys.

    Raises:
        ConfigError: a variable is empty, and the command line does not set the option.
    """
    for name in names:
        if os.environ.get(variable := f"CHUNKATTN_{name.upper()}") == "" and options[name] is None:
            raise ConfigError(f"{variable} is set but empty, as if there were no such key; unset it if that is meant")


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Check that a value is among those of an option.

    Args:
        name: name of the option in the error.
        value: the value.
        known: values of the option.

    Raises:
        ConfigError: the value is unknown.
    """
    if value not in (listed := list(known)):
        raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(listed)}")


def numbers_in(flag: str, text: str, kind: type[N], example: str) -> tuple[N, ...]:
    """Return the numbers of an option that takes several, separated by commas.

    Args:
        flag: flag of the option.
        text: value of the option.
        kind: `int` or `float`.
        example: a right value.

    Raises:
        ConfigError: the text has no number, or a number is not finite and above 0.
    """
    try:
        numbers = tuple(map(kind, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{flag} must be numbers above 0, separated by commas, such as {example}; got {text!r}")
    return numbers


def check_positive(options: Mapping[str, Any]) -> None:
    """Check that integers are at least 1, and floats finite and above 0, alone or in lists. Other values pass.

    Args:
        options: values by the names of the options.

    Raises:
        ConfigError: a number is out of range.
    """
    for name, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            flag = f"--{name.replace('_', '-')}"
            if type(value) is int and value < 1:
                raise ConfigError(f"{flag} must be at least 1; got {value}")
            if type(value) is float and not 0 < value < math.inf:
                raise ConfigError(f"{flag} must be a finite number above 0; got {value:g}")
