"""Options of a command from the fields of dataclasses."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from copy import copy
from typing import Annotated, Any, get_args, get_origin

import typer

from chunkattn.errors import ConfigError
from chunkattn.options import Option, as_help, descriptions, options_of


def with_options(*groups: tuple[type, str | None, str], from_environment: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that adds options to a command, in place of its `**options`.

    Args:
        *groups: dataclass with defaults (see `options_of`), title of the help panel (None for the general one), and names of
            fields, separated by spaces. `--help` lists them in the order of the class.
        from_environment: whether the variable `CHUNKATTN_` and the name in capitals sets an option, too.
    """

    def add(function: Any) -> Any:
        signature = inspect.signature(function, eval_str=True)
        listed = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        for cls, panel, names in groups:
            options = options_of(cls)
            ordered = sorted(names.split(), key=list(options).index)
            listed += [_parameter(options[name], panel, from_environment) for name in ordered]
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
    kind: Any = list[str] if option.kind is tuple else option.kind
    default = list(option.default) if option.kind is tuple else option.default
    hint = kind | None if option.is_optional else kind
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


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


def check_positive(options: Mapping[str, Any]) -> None:
    """Check that integers are at least 1, and floats finite and above 0. Other values pass.

    Args:
        options: values by the names of the options.

    Raises:
        ConfigError: a number is out of range.
    """
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if type(value) is int and value < 1:
            raise ConfigError(f"{flag} must be at least 1; got {value}")
        if type(value) is float and not 0 < value < math.inf:
            raise ConfigError(f"{flag} must be a finite number above 0; got {value:g}")
