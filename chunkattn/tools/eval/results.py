"""Results of single questions in a file of JSON lines, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chunkattn.errors import ConfigError
from chunkattn.layout import ChunkLayout


def result_key(*parts: Any) -> str:
    """Return 16 characters that identify everything that a result depends on.

    Args:
        *parts: values that JSON can hold.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def layout_digest(layout: ChunkLayout) -> str:
    """Return 32 characters that identify the tokens and positions of a prompt."""
    return hashlib.blake2b(layout.token_ids.tobytes() + layout.positions.tobytes(), digest_size=16).hexdigest()


class Results(dict[str, Mapping[str, Any]]):
    """Results by key, kept in memory and, with a path, in a file with one JSON object a line.

    Args:
        path: file to read and to append to; None keeps results in memory only.

    Raises:
        ConfigError: the file cannot be read, a complete line is not a result, or the only line is unfinished. The file is left
            as it is.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path
        if path is None or not path.exists():
            return
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        complete = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                result = json.loads(line)
                self[result["key"]] = result
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path} line {number} is no result of this command; choose another --results file") from None
        if data and not complete:
            raise ConfigError(f"{path} holds no complete result; delete it, or choose another --results file")
        if complete != data:  # the run was interrupted within a line
            try:
                os.truncate(path, len(complete))
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error}") from None

    def add(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Keep results; the file holds them when the call returns.

        Args:
            results: objects with a `key`.

        Raises:
            ConfigError: the file cannot be written.
        """
        new = {result["key"]: result for result in results}
        self.update(new)
        if self.path is None or not new:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(result, ensure_ascii=False) + "\n" for result in new.values()))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error}") from None
