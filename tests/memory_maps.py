"""Memory maps of a worker: XLA makes some for every program it compiles for a CPU, and a process that has 65,530 crashes."""

import gc
from pathlib import Path

import jax

MANY = 20_000
_OWN = Path("/proc/self/maps")


def release_programs():
    """Let go of the programs of engines that have ended, if this process has many maps."""
    if _OWN.exists() and _OWN.read_bytes().count(b"\n") > MANY:
        gc.collect()
        jax.clear_caches()
