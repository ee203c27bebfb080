"""The file of named API keys."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from chunkattn.errors import ConfigError

MAX_BYTES = 64 << 20
"""Size limit of a key file in bytes: room for about a million keys."""

_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]+")


def read_key_file(file: str) -> Iterator[tuple[str, str, str]]:
    r"""Yield the place, name and key of every line. Only `\n` and `\r\n` end a line.

    Args:
        file: path of a regular file with one `name:key` per line. Blank lines and lines that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read or exceeds `MAX_BYTES`, or a line is malformed. No error holds a key.
    """
    try:
        text = _read(file).decode("utf-8-sig")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_key_file {file} cannot be read: {error}") from None
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        line = line.strip(" \t\r\n")
        if not line or line.startswith("#"):
            continue
        name, _, key = line.partition(":")
        where = f"api_key_file {file}, line {number}"
        if not _NAME.fullmatch(name) or not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where} must be name:key, the name of 1 to 64 letters, digits or _.@-, the key of printable ASCII without "
                "spaces"
            )
        yield where, name, key


def _read(file: str) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file is absent or unreadable.
        ConfigError: the path names no regular file, which may never end, or the file is too long.
    """
    _check_regular(file, Path(file).stat())
    # Without O_NONBLOCK, a FIFO that has replaced the file would block until it has a writer.
    with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:
        _check_regular(file, os.fstat(opened.fileno()))
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"api_key_file {file} has more than {MAX_BYTES} bytes; give a file of name:key lines")
    return content


def _check_regular(file: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"api_key_file {file} is not a regular file; give the path of a file of name:key lines")
