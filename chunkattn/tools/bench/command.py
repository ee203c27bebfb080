"""The commands of `chunkattn bench`, and options that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chunkattn.terminal.commands import command_group

group = command_group("bench", "Compare methods in one process, or load a server.")

Peers = Annotated[bool, typer.Option("--peers", help="Measure other libraries as well, in processes of their own.")]
PeerPython = Annotated[list[Path] | None, typer.Option(help="Python interpreter with a peer installed; repeatable.")]
SETUP = "geometry dtype block_size repeats"
"""Options of `Setup`."""
