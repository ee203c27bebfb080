"""The group of commands `chunkattn bench`."""

from __future__ import annotations

from chunkattn.terminal.commands import command_group

group = command_group("bench", "Compare methods in one process, or load a server.")
