"""Folder of everything that is cached for this user, and small JSON files that keep a verdict beside the compiled programs."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)


def user_cache() -> Path:
    """Return the folder of everything that is cached for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunkattn"


def compile_cache() -> Path:
    """Return the folder in which an engine without options of JAX keeps its compiled programs."""
    return user_cache() / "jax"


def beside_programs(name: str) -> Path:
    """Return a folder in JAX's compile cache, or in the user's cache if that is off or remote.

    A process that has no engine yet gets the folder of its later engine.

    Args:
        name: name of the folder.
    """
    kept: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if kept is None:
        return compile_cache() / name
    return (Path(kept) if kept and "://" not in kept else user_cache()) / name


def keep_object(file: Path, value: Mapping[str, Any], consequence: str) -> None:
    """Write a JSON file as a whole; a file that cannot be written is a warning.

    Args:
        file: file to write. Its folder is made.
        value: object of the file.
        consequence: what a missing file means, for the warning.
    """
    draft = file.with_name(f"{file.stem}-{uuid.uuid4().hex}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        logger.warning("%s: %s", consequence, error)
