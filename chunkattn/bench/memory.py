"""Resident memory of a process."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path


def reset_peak() -> None:
    """Give back what is free and let `peak_bytes` begin anew, where the system has such things (Linux has)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most this process has held since `reset_peak`, or else since its start."""
    return _status("self", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def resident_bytes(pid: int | None = None) -> int | None:
    """What a process, this one by default, holds now; None where the system does not say (Linux does)."""
    return _status("self" if pid is None else str(pid), "VmRSS")


def _status(process: str, field: str) -> int | None:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return None
