"""The typer app, options shared by several commands, and error handling."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from chunkattn.cli.help_text import Command, Group
from chunkattn.errors import ChunkAttnError, ConfigError, NonFiniteError, RequestError
from chunkattn.parsers import DocumentPrompt

if TYPE_CHECKING:
    from chunkattn.llm import LLM

_new_group = partial(typer.Typer, no_args_is_help=True, cls=Group, rich_markup_mode=None)  # Rich's tables cut long flags
app = _new_group(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact chunk-aware LLM inference: many independent pieces after one shared prefix.",
)
console = Console(highlight=False)

Model = Annotated[str | None, typer.Option(help="Local folder, GGUF file or hub id; the bundled demo model when left out.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder, GGUF file or hub id of the tokenizer; the model's own when left out.")
]
Separator = Annotated[str, typer.Option("--chunk-separator", help="Text between prefix, chunks and question.")]
Strategy = Annotated[str, typer.Option("--position-strategy", help="Strategy of position ids: shared or offset.")]
Gap = Annotated[
    int | None,
    typer.Option("--chunk-position-gap", help="Positions between the prefix and every chunk; by default the calibration's."),
]
CalibrationFile = Annotated[
    str | None,
    typer.Option("--chunk-calibration", help="Calibration file; 'off' ignores the file in the model's folder."),
]
PrefixPart = Annotated[str | None, typer.Option("--prefix", help="Prefix as a part; parts are not split at separators.")]
Documents = Annotated[list[str] | None, typer.Option("--document", help="Document as a part; repeatable.")]
DocumentTemplate = Annotated[
    str | None, typer.Option(help="Text of a document's chunk, {document} in it; by default the engine's own.")
]
QuestionPart = Annotated[str | None, typer.Option("--question", help="Question as a part.")]
PromptText = Annotated[str | None, typer.Argument(help="Text of the prompt; '-' reads standard input.", show_default=False)]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
KVCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto (the model's dtype) or fp8.")]
Backend = Annotated[
    str, typer.Option("--attention-backend", help="auto, cpu, pallas_gpu, pallas_tpu, xla, reference or a registered backend.")
]
KVStore = Annotated[Path | None, typer.Option("--kv-store", help="Folder that keeps the K/V of prefixes and documents.")]
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
    """Register a command of a group. Errors of this package become one line on stderr.

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

        return group.command(name, cls=Command)(run)

    return register


def log_to_stderr(verbose: bool) -> None:
    """Log warnings to stderr; with `verbose` also what the engine does."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("chunkattn").setLevel(logging.INFO if verbose else logging.WARNING)


def check_file(path: Path) -> None:
    """Check that a file can be written, before the work whose result it will hold. The file stays as it is.

    Args:
        path: file to write. Pipes and devices pass.

    Raises:
        ConfigError: the folder is missing, or the file cannot be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder")
    existed = path.exists()
    if existed and not (path.is_file() or path.is_dir()):
        return
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


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


def make_llm(model: str | None, *, kv_store: Path | None = None, **options: Any) -> LLM:
    """Return an engine. JAX is imported here, so `--help` starts fast.

    Args:
        model: local folder, GGUF file or hub id; None for the bundled demo model.
        kv_store: folder that keeps K/V; None keeps nothing on disk.
        **options: other options of the engine.
    """
    from chunkattn.llm import LLM

    return LLM(model, kv_store=None if kv_store is None else str(kv_store), **options)
