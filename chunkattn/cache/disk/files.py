"""Space and length of a store's files.

LMDB maps its files into memory. An access to a page that the file has lost, or that the disk has no room for, ends the process
with SIGBUS.
"""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from chunkattn.private_files import DISK_FULL, allocate


class Unusable(lmdb.Error):
    """The environment must not be used any more; the file is not known to be damaged."""


def is_full(error: Exception) -> bool:
    """Return whether an error of the system or of LMDB means that a disk, a quota or a file size limit is exhausted."""
    return (error.errno if isinstance(error, OSError) else getattr(error, "code", 0)) in DISK_FULL


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that this process may still write to the folder's file system; None if it does not tell."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def reserve(file: Path, start: int, end: int) -> None:
    """Allocate the bytes from `start` to `end` of a file, which is created if absent. Its content stays; it may grow.

    Raises:
        OSError: the disk has no room, or the file cannot be written.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        allocate(descriptor, start, end)
    finally:
        os.close(descriptor)


class Lengths:
    """Lengths of open files, which LMDB never shortens.

    Args:
        files: the files, which exist.
    """

    def __init__(self, *files: Path) -> None:
        self._seen = {str(file): os.stat(file) for file in files}

    def find_short(self) -> str | None:
        """Return a file that has been shortened since the last call, or None. A deleted or replaced file stays mapped whole."""
        for file, before in self._seen.items():
            try:
                now = os.stat(file)
            except OSError:
                continue
            if os.path.samestat(before, now):
                if now.st_size < before.st_size:
                    return file
                self._seen[file] = now
        return None
