"""Setup of JAX's persistent compilation cache, which is on by default."""

from __future__ import annotations

import os
from pathlib import Path

import jax

SHORTEST_COMPILE_S = 0.2
"""Compile time in seconds below which a program is not written to the cache."""


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, so that the next start loads them.

    A cache configured by `JAX_COMPILATION_CACHE_DIR` or `jax.config` takes precedence.
    """
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunkattn" / "jax"
        options = {
            "jax_compilation_cache_dir": str(folder),
            "jax_persistent_cache_min_compile_time_secs": SHORTEST_COMPILE_S,
            "jax_persistent_cache_min_entry_size_bytes": 0,
        }
        for name, value in options.items():
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
