"""The typer app, options shared by several commands, their tables, and error handling."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from chunkattn.errors import ChunkAttnError, ConfigError, NonFiniteError, RequestError
from chunkattn.parsers import DocumentPrompt
from chunkattn.terminal.flags import documented
from chunkattn.terminal.help_text import Command, Group

if TYPE_CHECKING:
    from chunkattn.llm import LLM

_new_group = partial(typer.Typer, no_args_is_help=True, cls=Group, rich_markup_mode=None)  # Rich's tables cut long flags
app = _new_group(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact chunk-aware LLM inference: many independent pieces after one shared prefix.",
)
console = Console(highlight=False)

Model = Annotated[
    str | None, typer.Option(help="Local folder, GGUF file, hub id or MODEL:QUANT; the bundled demo model when left out.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder, GGUF file or hub id of the tokenizer; the model's own when left out.")
]
PrefixPart = Annotated[str | None, typer.Option("--prefix", help="Prefix as a part; parts are not split at separators.")]
Documents = Annotated[list[str] | None, typer.Option("--document", help="Document as a part; repeatable.")]
QuestionPart = Annotated[str | None, typer.Option("--question", help="Question as a part.")]
PromptText = Annotated[str | None, typer.Argument(help="Text of the prompt; '-' reads standard input.", show_default=False)]
TemplateOptions = Annotated[str | None, typer.Option(help="Variables of the chat template, as a JSON object.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")]


def command_group(name: str, text: str) -> typer.Typer:
    """Add a group of commands to the app.

    Args:
        name: name of the group.
        text: help text of the group.
    """
    group = _new_group(help=text)
    app.add_typer(group, name=name)
    return group


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command of a group, with help from its docstring. Errors of this package become one line on stderr.

    The exit code is 1 for `NonFiniteError` and 2 for the other errors.

    Args:
        group: group of commands, or the app itself.
        name: name of the command; None takes the function's.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except ChunkAttnError as error:
                print("error:", " ".join(str(error).split()), file=sys.stderr)
                raise typer.Exit(1 if isinstance(error, NonFiniteError) else 2) from None

        run.__signature__ = documented(function)  # type: ignore[attr-defined]
        run.__doc__ = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")[0]
        return group.command(name, cls=Command)(run)

    return register


def log_to_stderr(verbose: bool) -> None:
    """Log warnings to stderr, and that programs are compiled; with `verbose` also what else the engine does."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("chunkattn").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("chunkattn.engine.programs").setLevel(logging.INFO)


def template_options(text: str | None) -> dict[str, Any] | None:
    """Return the variables of the chat template of an option's JSON; None without the option.

    Args:
        text: value of the option.

    Raises:
        ConfigError: the text is no JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except RecursionError:
        raise ConfigError("--chat-template-kwargs nests too deep") from None
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--chat-template-kwargs must be a JSON object, got {type(value).__name__}")
    return value


def prompt_of(text: str | None, prefix: str | None, documents: list[str] | None, question: str | None) -> str | DocumentPrompt:
    """Return the prompt as text, or as parts if any part option is given.

    Args:
        text: whole prompt; '-' reads standard input.
        prefix: prefix as a part.
        documents: texts of the documents.
        question: question as a part.

    Raises:
        RequestError: text and parts are both given, or neither.
    """
    if prefix is None and not documents and question is None:
        if text is None:
            raise RequestError("give a prompt, or its parts with --prefix, --document and --question")
        return sys.stdin.read().removesuffix("\n") if text == "-" else text
    if text is not None:
        raise RequestError("give either a prompt or its parts, not both")
    return DocumentPrompt(prefix or "", documents or [], question or "")


def make_llm(model: str | None, **options: Any) -> LLM:
    """Return an engine. JAX is imported here, so `--help` starts fast.

    Args:
        model: local folder, GGUF file or hub id; None for the bundled demo model.
        **options: other fields of `EngineConfig`.
    """
    from chunkattn.llm import LLM

    return LLM(model, **options)


def figures(*columns: str, title: str | None = None, texts: Collection[str] = ("",)) -> Table:
    """Return a table of figures without rows. In a narrow terminal texts wrap, and no figure is cut.

    Args:
        *columns: headers.
        title: title of the table.
        texts: headers of the columns that hold texts, which are aligned to the left.
    """
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=name not in texts, justify="left" if name in texts else "right")
    return table


def print_lines(lines: Iterable[str]) -> None:
    """Print lines without markup, and leave line breaks to the terminal."""
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
