"""Files of a checkpoint that look right and are not: links without a target, and pointers of Git LFS."""

from __future__ import annotations

from pathlib import Path

from chunkattn.errors import ModelError


def is_present(path: Path) -> bool:
    """Return whether a file exists.

    Args:
        path: path of the file.

    Raises:
        ModelError: the path is a link whose target does not exist, or is no valid path.
    """
    try:
        found = path.exists()
        if not found and path.is_symlink():
            raise ModelError(f"{path} is a link to {path.readlink()}, which does not exist; get the files again")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return found


def cause_of(path: Path, error: object) -> object:
    """Return why a file cannot be read: the error, or that the file is a pointer of Git LFS.

    Args:
        path: path of the file.
        error: error of the reader.
    """
    try:
        with path.open("rb") as file:
            is_pointer = file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return error
    return "it is a pointer of Git LFS: run `git lfs pull`" if is_pointer else error
