"""A real server in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from tests.patience import PATIENCE_S

CACHE = Path(__file__).parent.parent / ".cache" / "jax"
SMALL = (
    "--enable-chunk-aware",
    "--max-num-batched-tokens=512",
    f"--kv-cache-memory-bytes={32 << 20}",
    "--no-warmup",
    "--decide-method=letters",
)


class ServerProcess:
    """`chunkattn serve` on a free port.

    Attributes:
        command: command of chunkattn that runs.
        url: of the server.
        log: what it has written so far.
    """

    command = "serve"

    def __init__(self, *options: str, python: str = sys.executable, **environment: str) -> None:
        command = [python, "-m", "chunkattn", self.command, "--port=0", *options]
        variables = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE), **environment}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | variables
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for(r"is ready at (http://\S+)")[1]

    def _read(self) -> None:
        assert self.process.stdout
        self.log.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, pattern: str, seconds: float = PATIENCE_S) -> re.Match[str]:
        """A line of its output."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and (self.process.poll() is None or self._reader.is_alive()):
            for line in list(self.log):
                if found := re.search(pattern, line):
                    return found
            time.sleep(0.02)
        raise AssertionError(f"no line with {pattern!r} in:\n" + "".join(self.log))

    def client(self, **options) -> httpx.Client:
        """For requests to it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    @property
    def engine_pid(self) -> int:
        """Return the id of the engine's process, the only child beside Python's resource tracker and the checker of shapes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        others = (b"resource_tracker", b"shape_process")
        return next(pid for pid, command in commands.items() if not any(other in command for other in others))

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def close(self) -> int:
        """End it. Returns its exit code."""
        if self.process.poll() is None:
            self.signal()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def wait_until(condition, seconds=PATIENCE_S):
    """Wait for a condition."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)


def is_idle(client):
    """Return whether the engine holds nothing for anybody."""
    text = client.get("/metrics").text
    names = ['chunkattn_pages{state="used"}', *(f'chunkattn_requests_now{{state="{s}"}}' for s in ("waiting", "running"))]
    age = re.search(r"^chunkattn_engine_metrics_age_seconds (\S+)$", text, re.MULTILINE)
    return all(f"{name} 0.0" in text for name in names) and (age is None or float(age[1]) < 0.1)  # those of now
