"""Rounds of the benchmarks, the machine's processor, and the resident memory of processes, all of which Linux reports."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

Progress = Callable[[str], AbstractContextManager[object]]
"""Function from a round's name to the context manager in which the round runs; `contextlib.nullcontext` reports nothing."""


def round_name(number: int, rounds: int) -> str:
    """Return the name of a round.

    Args:
        number: 0 for the round that compiles, which is not counted.
        rounds: number of counted rounds.
    """
    return f"round {number} of {rounds}" if number else "warm-up"


def reset_peak() -> None:
    """Return free memory to the system and reset the peak of `peak_bytes`, if the system supports both (Linux does)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return this process's peak resident memory in bytes.

    The peak is since `reset_peak`, or since the process started if the system cannot reset the peak.
    """
    if peak := _status("self", "VmHWM"):
        return peak
    from resource import RUSAGE_SELF, getrusage  # Windows has no such module

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(pid: int | None = None) -> int | None:
    """Return the resident memory of a process in bytes, by default of this process; None if the system does not report it.

    Args:
        pid: id of the process; None means this process.
    """
    return _status("self" if pid is None else str(pid), "VmRSS")


def processor() -> str:
    """Return the processor's name, of Linux where it gives one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or 'unknown')} ({platform.machine()})"


def _status(process: str, field: str) -> int | None:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return None
