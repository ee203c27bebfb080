"""Space of a store's files.

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
        stats = os.statvfs(folder)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else None


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
