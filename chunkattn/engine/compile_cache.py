"""Setup of JAX's persistent compilation cache, which is on by default."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_JAX_SHORTEST_COMPILE_S = 1.0
"""JAX's default for the compile time in seconds below which a program is not written to the cache."""


def enable_compile_cache() -> None:
    """Keep every compiled program in the user's cache folder, so that the next start loads them.

    Options set by `JAX_COMPILATION_CACHE_DIR` and JAX's other environment variables or by `jax.config` take precedence.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunkattn" / "jax"
    options = {
        "jax_compilation_cache_dir": (None, str(folder)),
        "jax_persistent_cache_min_compile_time_secs": (_JAX_SHORTEST_COMPILE_S, 0.0),
    }
    for name, (default, value) in options.items():
        if name.upper() not in os.environ and getattr(jax.config, name) == default:
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
