"""JAX's persistent compilation cache, on by default."""

from __future__ import annotations

import os
from pathlib import Path

import jax

SHORTEST_COMPILE_S = 0.2
"""Programs that compile faster than this are not worth a file."""


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, so that a second start compiles nothing.

    Does nothing where a cache is configured already (`JAX_COMPILATION_CACHE_DIR`, `jax.config`).
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
