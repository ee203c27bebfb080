"""Files with users' contents: only their owner reads them, and deletions succeed on a full disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PAGE = 4096


def make_private(*paths: Path) -> None:
    """Take the permissions of group and others from files that exist; a file of another owner is a warning.

    Args:
        paths: files; absent ones are skipped.
    """
    for path in paths:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                path.chmod(mode & 0o700)
                logger.warning("%s was open to other users (mode %03o); its mode is %03o now", path, mode, mode & 0o700)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s is open to other users (mode %03o) and cannot be made private: %s", path, mode, error)


def create_private(path: Path) -> bool:
    """Create an empty file that only its owner can read and write. Return False if the path exists.

    Raises:
        OSError: the file cannot be created.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def allocate(descriptor: int, start: int, end: int) -> None:
    """Allocate the bytes from `start` to `end` of an open file. Its content stays; it may grow.

    Args:
        descriptor: descriptor of the file, open for writing.
        start: first byte.
        end: byte after the last.

    Raises:
        OSError: the disk has no room, or the file cannot be written.
    """
    try:
        os.posix_fallocate(descriptor, start, end - start)
    except AttributeError:  # macOS
        _extend(descriptor, end)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        _extend(descriptor, end)


def _extend(descriptor: int, end: int) -> None:
    size = os.fstat(descriptor).st_size
    while size < end:
        size += os.pwrite(descriptor, bytes(min(1 << 20, end - size)), size)


class Reserve:
    """File of zeros that holds space on a disk. A deletion borrows the space when the disk is full.

    A deletion writes too: a log, a copy of the changed pages. Without the reserve no space would be left for that.

    Args:
        path: the file; `fill` creates it.
        size: bytes of the file.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    def fill(self) -> bool:
        """Allocate the file, as much of it as the disk has room for. Return whether it has its full size."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o600)
            have = os.fstat(descriptor).st_size
            step = self.size - have
            while step > 0 and have < self.size:
                try:
                    allocate(descriptor, have, end := min(have + step, self.size))
                    have = end
                except OSError:
                    os.ftruncate(descriptor, have)
                    step = step // 2 // _PAGE * _PAGE
            return have >= self.size
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Leave the space of the file to the context's body, and take it back, or what is left of it."""
        with contextlib.suppress(OSError):
            os.truncate(self.path, 0)
        try:
            yield
        finally:
            self.fill()
