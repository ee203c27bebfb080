"""Commands that measure run in processes of their own, because a kernel may hang or break the device."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
"""Share of the memory for a process of ours, which vLLM may run beside."""
_KILL_S = 10
_STDERR_LINES = 40
_FLAGS = "Flag parsing failed"
"""Part of XLA's message about a flag that it does not know; a list of all flags follows it."""


class PartError(Exception):
    """A process failed or reached its time limit. The message is the last line that it printed, or names the limit.

    Attributes:
        output: standard output until then.
        stderr: standard error.
    """

    def __init__(self, message: str, output: str, stderr: str) -> None:
        super().__init__(message)
        self.output, self.stderr = output, stderr


def complete(*command: str | Path, timeout_s: float, given: str = "", env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run a command and return its standard output and standard error.

    The process and the children in its session end with this call.

    Args:
        *command: program and arguments.
        timeout_s: time limit in seconds.
        given: standard input.
        env: further environment variables.

    Raises:
        PartError: the command failed or reached the time limit.
    """
    # A child of a dead process may hold a pipe open, so that reading it never ends. Files can be read at any time.
    with TemporaryFile("w+", errors="replace") as out, TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env={**MEMORY, **os.environ, **(env or {})},
            text=True,
            start_new_session=True,  # so that its children can be ended too
        )
        late = False
        try:
            process.communicate(given, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process in a hung driver may outlive SIGKILL
                process.wait(_KILL_S)
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    if late:
        raise PartError(f"did not end within {timeout_s:,g} seconds; a kernel may hang", output, errors)
    if process.returncode:
        raise PartError(_last_line(errors or output) or f"exit code {process.returncode}", output, errors)
    return output, errors


def _last_line(text: str) -> str:
    """Return the last line with a word, or that of XLA about an unknown flag."""
    printed = [line.strip("│ ") for line in text.splitlines() if re.search(r"\w", line)]
    return next((line for line in printed if _FLAGS in line), printed[-1] if printed else "")


def run(*command: str | Path, timeout_s: float, given: str = "") -> str:
    """Run a command and return its standard output; see `complete`."""
    return complete(*command, timeout_s=timeout_s, given=given)[0]


def failure(error: Exception) -> dict[str, Any]:
    """Return an error for JSON, with the last lines of standard error."""
    if isinstance(error, PartError):
        return {"error": str(error), "stderr": error.stderr.splitlines()[-_STDERR_LINES:]}
    return {"error": f"{type(error).__name__}: {error}"}
