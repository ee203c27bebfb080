"""`chunkattn serve` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from tempfile import TemporaryFile
from urllib.request import urlopen

from chunkattn.errors import EngineError

START_S, END_S = 900, 60


class Server:
    """`chunkattn serve`, or `chunkattn route`, on a free port, in a process of its own.

    Its log goes to a file, because a pipe would wake the reader at every line.

    Args:
        arguments: arguments of the command.
        command: the command. A gateway is ready before its replicas are.
        env: variables of the process beside those of this one.

    Attributes:
        url: base URL of the server.
        process: process of the server.

    Raises:
        EngineError: the server did not start.
    """

    def __init__(self, *arguments: str, command: str = "serve", env: Mapping[str, str] | None = None) -> None:
        line = [sys.executable, "-m", "chunkattn", command, "--port=0", *arguments]
        self._log = TemporaryFile("w+")  # noqa: SIM115, open for the server's lifetime
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **(env or {})}
        )
        late = threading.Timer(START_S, self.process.kill)
        late.start()
        try:
            self.url = self._ready()
            while command == "serve" and "--no-warmup" not in arguments and not self._is_warm():
                time.sleep(0.1)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            late.cancel()

    def _ready(self) -> str:
        assert self.process.stdout is not None
        ready = re.search(r"is ready at (http://\S+)", self.process.stdout.readline())
        if ready is None:
            self.process.wait(END_S)
            raise EngineError("the server did not start:\n" + "".join(self.log()[-30:]))
        return ready[1]

    def _is_warm(self) -> bool:
        try:
            with urlopen(f"{self.url}/readyz") as answer:
                return bool(json.load(answer)["warm"])
        except OSError as error:
            raise EngineError(f"the server did not get warm: {error}\n" + "".join(self.log()[-30:])) from None

    def log(self) -> list[str]:
        """Return the lines of the log so far."""
        with open(f"/dev/fd/{self._log.fileno()}", encoding="utf-8") as log:  # opened anew for a read position of its own
            return log.readlines()

    def faults(self) -> list[str]:
        """Return the log lines that report errors."""
        return [line.rstrip() for line in self.log() if re.search(r"\b(ERROR|CRITICAL)\b|Traceback", line)]

    def end(self) -> int | None:
        """Send SIGTERM. Return the exit code, or None if the server had to be killed."""
        self.process.terminate()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None
