"""The text of `--help`: one entry per option, wrapped to the terminal, with nothing cut."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand, TyperGroup


def _fill(text: str, width: int, first: str, others: str) -> str:
    """Wrap a text between words; a flag stays whole, and so does a short default."""
    whole = " ".join(text.split()).replace("[default: ", "[default:\0")
    return textwrap.fill(
        whole, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    ).replace("\0", " ")


def _write(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    """Write a section: two columns if no name is wider than a third of the page, otherwise each meaning below its name."""
    widest = max(len(name) for name, _ in rows)
    with formatter.section(title):
        for name, meaning in rows:
            if widest <= formatter.width // 3:
                lines = [_fill(meaning, formatter.width, f"  {name:{widest}}  ", " " * (widest + 4))]
            else:
                lines = [_fill(name, formatter.width, "  ", "  "), _fill(meaning, formatter.width, " " * 6, " " * 6)]
            formatter.write("\n".join(lines) + "\n")


class Command(TyperCommand):
    """A command whose help lists its options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, each panel under its title."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title in sorted(panels, key=lambda title: (title != "Arguments", title != "Options")):
            _write(formatter, title, panels[title])


class Group(TyperGroup):
    """A group whose help shows the whole first paragraph of each command's description."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and descriptions of the commands."""
        listed = [(name, command) for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))]
        rows = [(name, " ".join((c.help or "").partition("\n\n")[0].split())) for name, c in listed if not c.hidden]
        if rows:
            _write(formatter, "Commands", rows)
