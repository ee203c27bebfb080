"""Tables of an evaluation on the terminal, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from chunkattn.picture import save_picture
from chunkattn.terminal.commands import console, figures, print_lines
from chunkattn.terminal.files import write_json

if TYPE_CHECKING:
    from chunkattn.tools.eval.measures import Mean
    from chunkattn.tools.eval.report import Row


def show(rows: Sequence[Row], title: str, text: str, report: dict[str, Any], json_file: str | None, plot: Path | None) -> None:
    """Print tables and conclusion, or the JSON alone, and write the files.

    Args:
        rows: rows of a comparison.
        title: title of tables and picture.
        text: conclusion.
        report: value for the JSON file.
        json_file: file for JSON; see `write_json`.
        plot: file for a picture; None draws none.
    """
    from chunkattn.tools.eval.chart import draw

    is_shown = write_json(report, json_file)
    if is_shown:
        console.print(*_tables(rows, title))
    if plot is not None:
        save_picture(draw(rows, title), plot)
    if is_shown:
        print_lines([text])


def _tables(rows: Sequence[Row], title: str) -> list[Table]:
    """Return a table of log-probabilities and a table of the other measures, as far as the rows have them."""
    from chunkattn.tools.eval.report import CONTAINED, LOGPROB

    names = list(dict.fromkeys(name for row in rows for name in row.means if name != LOGPROB))
    compared = next(([name] for name in ("NDCG@10", "accuracy") if name in names), ["F1", CONTAINED])
    baseline = {"NDCG@10": "given", "accuracy": rows[0].name}.get(compared[0], "full")
    tables, doubt = [], "an interval that contains 0: the data cannot tell this difference from none"
    if LOGPROB in rows[0].means:
        controlled = any(row.against_control for row in rows)
        table = figures("", "logprob", "- full [95%]", *(["- control [95%]"] if controlled else []), title=escape(title))
        for row in rows:
            changes = (row.against_full, row.against_control)[: 1 + controlled]
            table.add_row(row.name, _mean(row, LOGPROB), *(_change(against, LOGPROB) for against in changes))
        table.caption = "logprob: mean log-probability of a token of the gold answer"
        table.caption += "; control: full, same T and S" if controlled else ""
        tables.append(table)
    if names:
        columns = (*names, *(f"{name} - {baseline} [95%]" for name in compared))
        table = figures("", *columns, title="greedy answers" if tables else escape(title))
        for row in rows:
            differences = (_change(row.against_full, name) for name in compared)
            table.add_row(row.name, *(_mean(row, name) for name in names), *differences)
        tables.append(table)
    tables[-1].caption = f"{tables[-1].caption}; {doubt}" if tables[-1].caption else doubt
    return tables


def _mean(row: Row, name: str) -> str:
    return f"{row.means[name].mean:.3f}" if name in row.means else ""


def _change(against: dict[str, Mean] | None, name: str) -> str:
    return "" if against is None else interval(against[name])


def interval(change: Mean) -> str:
    """Return a difference and its interval, as markup."""
    text = f"{change.low:+.2f}, {change.high:+.2f}" if change.has_interval else "no interval"
    return escape(f"{change.mean:+.2f} [{text}]")
