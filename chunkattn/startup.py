"""`since_start`: a clock that starts with the import of the package, the first module of ours that a process runs."""

from __future__ import annotations

import time

_BEGAN = time.perf_counter()


def since_start() -> float:
    """Return the seconds since this process began to import the package."""
    return time.perf_counter() - _BEGAN
