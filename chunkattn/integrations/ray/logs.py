"""Log lines of Ray's processes: to the process that started them, without Ray's prefixes, or to Ray's own files."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from chunkattn import logs

_SOCKET = "CHUNKATTN_LOG_SOCKET"
"""Environment variable with the path of the socket of `LogServer`."""
_FD = 2


class LogServer:
    """Writes what other processes write to their stderr to this process's stderr, line by line.

    Args:
        folder: folder of the socket, which only this user may enter.
    """

    def __init__(self, folder: str) -> None:
        path = str(Path(folder) / "log")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(64)
        self._lock = threading.Lock()
        os.environ[_SOCKET] = path
        threading.Thread(target=self._accept, name="log-server", daemon=True).start()

    def close(self) -> None:
        """Accept no more processes; what the present ones write is still shown."""
        os.environ.pop(_SOCKET, None)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._copy, args=(connection.makefile("rb"),), name="log-copy", daemon=True).start()
                connection.close()

    def _copy(self, lines: BinaryIO) -> None:
        with suppress(OSError, ValueError), lines:  # this process or the other one ends
            for line in lines:
                with self._lock:
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()


def set_up_logs(log_format: str) -> None:
    """Log the package's messages in one of `chunkattn.logs.LOG_FORMATS`, also those of processes started from now on.

    Args:
        log_format: the format.
    """
    os.environ[logs.VARIABLE] = log_format
    if path := os.environ.get(_SOCKET):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            os.dup2(connection.fileno(), _FD)  # the engine's process inherits the descriptor
    handler = logs.make_handler()
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(os.fdopen(os.dup(_FD), "w", buffering=1, errors="backslashreplace"))  # Ray has replaced `sys.stderr`
    package = logging.getLogger("chunkattn")
    package.handlers[:] = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False
