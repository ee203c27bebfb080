"""Local files: the JSON object of a small file, links without a target, and pointers of Git LFS."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chunkattn.errors import ChunkAttnError, ModelError

MAX_BYTES = 16 << 20
"""Largest size of a file that is read."""


def read_object(
    path: Path, error: type[ChunkAttnError] = ModelError, name: str = "", *, unique: bool = False
) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: file to read.
        error: class of the error that is raised.
        name: what the file is, for the message; the path follows.
        unique: whether a key that is there twice is an error; else the last one counts, as in transformers.

    Raises:
        ChunkAttnError: `error`; the file cannot be read, is larger than `MAX_BYTES`, is no JSON in UTF-8, nests too deep, holds
            no object, or, with `unique`, holds a key twice in one object.
    """
    shown = f"{name} {path}".strip()
    try:
        value = json.loads(read_small(path), object_pairs_hook=unique_pairs if unique else None)
    except RecursionError:
        raise error(f"{shown} cannot be read: its lists and objects nest too deep") from None
    except (OSError, ValueError) as fault:
        raise error(f"{shown} cannot be read: {fault}") from None
    if not isinstance(value, dict):
        raise error(f"{shown} must be a JSON object, not {type(value).__name__}")
    return value


def read_small(path: Path) -> str:
    """Return the text of a file in UTF-8.

    Args:
        path: file to read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than `MAX_BYTES`, or not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return data.decode()


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as `object_pairs_hook` of `json.loads`.

    Args:
        pairs: keys and values.

    Raises:
        ValueError: a key is there twice.
    """
    check_unique(name for name, _ in pairs)
    return dict(pairs)


def check_unique(keys: Iterable[str]) -> None:
    """Check that the keys of an object differ.

    Args:
        keys: all keys of the object.

    Raises:
        ValueError: a key is there twice.
    """
    twice = next((key for key, count in Counter(keys).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} is there twice")


def is_present(path: Path) -> bool:
    """Return whether a file exists.

    Args:
        path: path of the file.

    Raises:
        ModelError: the path is a link whose target does not exist, or is no valid path.
    """
    try:
        exists = path.exists()
        if not exists and path.is_symlink():
            raise ModelError(f"{path} is a link to {path.readlink()}, which does not exist; get the files again")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return exists


def read_present(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model; an empty one where there is no file.

    Args:
        path: path of the file.

    Raises:
        ModelError: the file cannot be read, see `read_object` and `is_present`.
    """
    return read_object(path) if is_present(path) else {}


def cause_of(path: Path, error: object) -> object:
    """Return why a file cannot be read: the error, or that the file is a pointer of Git LFS.

    Args:
        path: path of the file.
        error: error of the reader.
    """
    return pointer_of_lfs(path) or error


def pointer_of_lfs(path: Path) -> str | None:
    """Return that a file is a pointer of Git LFS and what to do, or None for any other file.

    Args:
        path: path of the file.
    """
    try:
        with path.open("rb") as file:
            is_pointer = file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return None
    return "it is a pointer of Git LFS: run `git lfs pull`" if is_pointer else None
