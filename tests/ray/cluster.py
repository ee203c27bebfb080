"""Replicas as the product starts them: processes, their kinds, and the end of all of them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "CHUNKATTN_TEST_RAY"
"""Environment variable by which a test finds every process that it has started, also orphans."""
KINDS = {
    "replica": "ray::ServeReplica:chunkattn:Engine",
    "gateway": "ray::ServeReplica:chunkattn:Gateway",
    "documents": "ray::ServeReplica:chunkattn:Documents",
    "engine": "chunkattn.remote.worker",
    "haproxy": "haproxy -",
}
"""Text in the command line of each kind of process."""


_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on, outside the range that outgoing connections and Ray's workers take theirs from."""
    while True:
        try:
            with socket.create_server(("127.0.0.1", 29_700 + secrets.randbelow(3_000))) as listening:
                if (port := listening.getsockname()[1]) not in _given:
                    _given.add(port)
                    return port
        except OSError:
            continue


def wait_for(check: Callable[[], object], seconds: float, what: str) -> object:
    """Return the first true value of `check`; fail after `seconds`."""
    until = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > until:
            raise AssertionError(f"after {seconds} s still not: {what}")
        time.sleep(0.05)
    return found


class Processes:
    """Processes with a mark of their own in the environment, started by one command."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str] = {}) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.log = log
        given = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "CHUNKATTN_"))}
        self.variables = given | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])}
        self.variables |= {"JAX_PLATFORMS": "cpu", MARK: self.mark, **variables}
        with log.open("wb") as file:
            self.main = subprocess.Popen(
                command, cwd=ROOT, env=self.variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for_line(self, text: str, seconds: float) -> None:
        def check() -> bool:
            if text in self.text():
                return True
            assert self.main.poll() is None, f"the command has ended:\n{self.text()[-4000:]}"
            return False

        wait_for(check, seconds, f"{text!r} in\n{self.text()[-4000:]}")

    def living(self, kind: str | None = None) -> list[int]:
        """Return the ids of the processes of a kind, or of all."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                if f"{MARK}={self.mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and (kind is None or KINDS[kind] in command):
                found.append(int(folder.name))
        return sorted(found)

    def kill(self) -> None:
        """Kill what is left, this test's processes alone."""
        for number in self.living():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.main.wait(20)


def chunkattn(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chunkattn", *arguments]
