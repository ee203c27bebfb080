"""Files that commands read and write, checked before the work whose result they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkattn.errors import ConfigError, RequestError

JsonFile = Annotated[str | None, typer.Option("--json", help="File for the cases as JSON; '-' prints the JSON alone.")]
Plot = Annotated[Path | None, typer.Option(help="File for a plot (.png, .svg, .pdf).")]


def check_files(json_file: str | None, plot: Path | None = None) -> None:
    """Check the files that a command will write.

    Args:
        json_file: file for JSON; '-' writes to standard output, None writes no file.
        plot: file for a plot; None draws no plot.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is missing.
    """
    files = [Path(json_file)] if json_file and json_file != "-" else []
    for target in [*files, plot] if plot else files:
        check_file(target)
    if plot is not None:
        _check_picture(plot)


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


def _check_picture(path: Path) -> None:
    """Check that matplotlib can write a picture at a path.

    Raises:
        ConfigError: matplotlib is not installed, or the format is unknown.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"pictures end in one of {', '.join(sorted(known))}; got {path.name!r}")


def is_file(path: Path) -> bool:
    """Return whether a path is a file. A text that no file can have as its name is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_overwrites(output: Path, inputs: Iterable[tuple[str, Path | None]], *, flag: str = "--output") -> None:
    """Check that a file to write is none of the files to read. Pipes and devices pass.

    Args:
        output: file to write.
        inputs: flags and files to read; None passes.
        flag: flag of the file to write.

    Raises:
        ConfigError: the file is an input. The message names both flags.
    """
    if output.is_file():
        for source, file in inputs:
            if file is not None and is_file(file) and output.samefile(file):
                raise ConfigError(f"{flag} {output} is the file of {source}")


def read_document(file: Path) -> str:
    """Return the text of a document's file, which ends before the last line break.

    Args:
        file: file in UTF-8.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{file} cannot be read: {error}") from error


def write_json(report: Any, json_file: str | None) -> bool:
    """Write a report as JSON, and return whether it is to be shown as text too.

    Args:
        report: value that JSON can hold.
        json_file: file to write; '-' prints the JSON alone, None writes none.
    """
    if json_file:
        text = json.dumps(report, indent=2)
        if json_file == "-":
            print(text)
        else:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
    return json_file != "-"
