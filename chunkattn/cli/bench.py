"""Command `chunkattn bench rag`, and helpers of the benchmark commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from chunkattn.cli.common import check_file, command, command_group, console, write_json
from chunkattn.cli.progress import Rounds
from chunkattn.errors import ConfigError
from chunkattn.picture import save_picture

if TYPE_CHECKING:
    from chunkattn.tools.bench.rag import Case

group = command_group("bench", "Compare methods in one process, or load a server.")

Geometry = Annotated[str, typer.Option(help="Model shape, with random weights: qwen3-0.6b or small.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per KV page, a power of two. Default: the engine's.")]
JsonFile = Annotated[str | None, typer.Option("--json", help="File for the cases as JSON; '-' prints the JSON alone.")]
Plot = Annotated[Path | None, typer.Option(help="File for a plot (.png, .svg, .pdf).")]


@command(group)
def rag(
    documents: Annotated[list[int] | None, typer.Option(help="Number of documents; repeatable. Default: 4, 12.")] = None,
    document_tokens: Annotated[list[int] | None, typer.Option(help="Tokens per document; repeatable. Default: 500.")] = None,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of the prefix.")] = 32,
    question_tokens: Annotated[int, typer.Option(help="Tokens of the question.")] = 50,
    geometry: Geometry = "small",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Number of warm requests per case; cold requests are a fifth as many.")] = 5,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure the time to the first token of an answer from documents: plain and chunk-aware, cold and warm."""
    from chunkattn.tools.bench.geometry import GEOMETRIES
    from chunkattn.tools.bench.rag import Workload, run

    check_options(geometry, dtype, json_file, plot)
    numbers = (*(documents or (4, 12)), *(document_tokens or (500,)), prefix_tokens, question_tokens, repeats)
    if min(numbers) < 1:
        raise ConfigError("counts of documents, tokens and repeats must be at least 1")
    workload = Workload(tuple(documents or (4, 12)), tuple(document_tokens or (500,)), prefix_tokens, question_tokens, repeats)
    longest = prefix_tokens + max(workload.documents) * max(workload.document_tokens) + question_tokens
    if longest >= (limit := GEOMETRIES[geometry].max_position_embeddings):
        raise ConfigError(f"a plain prompt of {longest} tokens is longer than the {limit} of {geometry}")
    with Rounds() as rounds:
        cases = list(run(geometry, workload, dtype=dtype, progress=rounds))
    if write_json([asdict(case) for case in cases], json_file):
        console.print(_table(cases, f"{geometry}, {dtype}: prefix {prefix_tokens}, question {question_tokens} tokens"))
    if plot is not None:
        _plot(cases, plot, geometry)


def check_options(geometry: str, dtype: str, json_file: str | None, plot: Path | None) -> None:
    """Check options before a benchmark runs, so a wrong option fails early.

    Args:
        geometry: name of the model's geometry.
        dtype: name of the dtype.
        json_file: file for the cases; '-' writes to standard output, None writes no file.
        plot: file for the plot; None draws no plot.

    Raises:
        ConfigError: the geometry or dtype is unknown, or a file cannot be written.
    """
    from chunkattn.tools.bench.geometry import GEOMETRIES

    if geometry not in GEOMETRIES:
        raise ConfigError(f"unknown geometry {geometry!r}; choose one of {', '.join(GEOMETRIES)}")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"unknown dtype {dtype!r}; choose float32 or bfloat16")
    check_files(json_file, plot)


def check_files(json_file: str | None, plot: Path | None) -> None:
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


def _table(cases: list[Case], title: str) -> Table:
    table = Table("documents", "mode", "scheduled", "padding", "cached", "TTFT", "speed-up", title=title)
    for column in table.columns:
        column.no_wrap, column.justify = True, "left" if column.header in ("documents", "mode") else "right"
    for case in cases:
        table.add_row(
            f"{case.documents} x {case.document_tokens}",
            case.mode,
            str(case.scheduled),
            str(case.padding),
            str(case.cached),
            f"{1000 * case.ttft_s:.0f} ms",
            f"{case.speedup:.1f}",
            end_section=case.mode == "chunks warm",
        )
    return table


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


def _plot(cases: list[Case], path: Path, geometry: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = {"plain cold": "o-", "plain warm": "o--", "chunks cold": "s-", "chunks warm": "s--"}
    for mode, style in styles.items():
        points = sorted((c.prompt_tokens, c.ttft_s) for c in cases if c.mode == mode)
        color = "#c25b3a" if mode.startswith("plain") else "#2d6fa3"
        axes.plot(*zip(*points, strict=True), style, label=mode, color=color)
    axes.set(xlabel="prompt tokens", ylabel="seconds to the first token", yscale="log")
    axes.set_title(f"First token of an answer from documents ({geometry})", fontsize=11)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_picture(figure, path)
