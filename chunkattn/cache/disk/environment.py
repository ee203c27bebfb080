"""One LMDB environment a folder and process: opened with care, resized with care, under any number of handles."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import lmdb.verify

from chunkattn.cache.disk.records import Damage
from chunkattn.errors import ConfigError

logger = logging.getLogger(__name__)

_DBS = (b"meta", b"data", b"used")
LOCK = "chunkattn-kv.lock"
"""Who holds it exclusively is alone; that it is there says whose folder it is."""


def is_damage(error: Exception) -> bool:
    """Whether an error tells of the file's contents, not of the system (LMDB's own codes are negative) or of its load."""
    if isinstance(error, lmdb.MapResizedError | lmdb.MapFullError | lmdb.ReadersFullError):
        return False
    return isinstance(error, Damage) or getattr(error, "code", 0) < 0


class Environment:
    """An open LMDB environment, with the databases `meta`, `data` and `used`.

    A process must not open one twice: `opened` and `handles` share it. Its map must not be resized under a transaction: `begin`
    and `resize` see to that. The flock on `LOCK` is held shared while open; who gets it exclusively is alone, and may
    check the file and move it.

    Attributes:
        opened: those of this process, by device and inode of the folder; guarded by `opening`.
        handles: that share it.
        map_size: in bytes; another process may have committed more.
        page_size: of LMDB, in bytes.

    Raises:
        ConfigError: another program's environment is there.
        Damage: it is damaged, and others use it.
        lmdb.Error: likewise, or it cannot be opened.
        OSError: it cannot be opened.
    """

    opened: dict[tuple[int, int], Environment] = {}  # noqa: RUF012
    opening = threading.RLock()

    def __init__(self, path: Path, map_size: int) -> None:
        self.path, self.map_size, self.handles = path, map_size, 0
        self._gate = threading.Condition()
        self._active, self._closed = 0, False
        data, lock = path / "data.mdb", path / LOCK
        # Ours is made before the data: where it is wanting, the data is somebody else's, and nothing may be touched.
        if data.exists() and data.stat().st_size and not lock.exists():
            raise ConfigError(
                f"{path} holds a data.mdb that is no KV store of chunkattn's; give the KV store a folder of its own"
            )
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            alone = self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            problems = _find_damage(path / "data.mdb") if alone else []
            if not alone:
                self._flock(fcntl.LOCK_SH)
            elif worst := [problem for problem in problems if "-- a leak" not in problem]:
                _set_aside(path, worst[0])
                problems = []
            try:
                self._open(extend=alone, problems=problems)
            except (lmdb.Error, Damage) as error:
                if not alone or not is_damage(error):
                    raise
                _set_aside(path, str(error))
                self._open()
            self._flock(fcntl.LOCK_SH)
        except BaseException:
            os.close(self._lock)
            raise

    def _flock(self, how: int) -> bool:
        try:
            fcntl.flock(self._lock, how)
        except OSError:  # held by another, or not to be had on this file system
            return False
        return True

    def _open(self, *, extend: bool = False, problems: Sequence[str] = ()) -> None:
        self.env = lmdb.open(
            str(self.path), map_size=self.map_size, mode=0o600, max_dbs=len(_DBS), max_readers=512, create=False
        )
        try:
            self.page_size, data = int(self.env.stat()["psize"]), self.path / "data.mdb"
            end = (self.env.info()["last_pgno"] + 1) * self.page_size
            if extend and data.stat().st_size < end:
                if problems:
                    raise Damage(problems[0])
                os.truncate(data, end)  # reading a value cut off would be a bus error; zeros fail its checksum
            self.env.reader_check()
            with self.env.begin() as txn:
                names = [bytes(name) for name, _ in txn.cursor()]
            if names and not set(names) & set(_DBS):
                raise ConfigError(
                    f"{self.path} holds another program's LMDB environment; give the KV store a folder of its own"
                )
            self.meta, self.data, self.used = (self.env.open_db(name) for name in _DBS)
            if set(names) - set(_DBS) or any(any(db.flags().values()) for db in (self.meta, self.data, self.used)):
                raise Damage("not the databases of a KV store")
        except BaseException:
            self.env.close()
            raise

    def is_there(self) -> bool:
        """Return whether the folder still holds the files that are open."""
        try:
            lock = (self.path / LOCK).stat()
            return os.path.samestat(lock, os.fstat(self._lock)) and (self.path / "data.mdb").exists()
        except OSError:
            return False

    @contextlib.contextmanager
    def begin(self, *, write: bool = False) -> Iterator[lmdb.Transaction[memoryview]]:
        """A transaction; commits unless the block raises.

        Raises:
            ConfigError: the store is closed.
            lmdb.Error: as LMDB does.
        """
        for attempt in range(5):
            with self._gate:
                if self._closed:
                    raise ConfigError(f"the KV store {self.path} is closed")
                self._active += 1
            resized = False
            try:
                txn = self.env.begin(write=write, buffers=True)
            except lmdb.MapResizedError:
                resized = True
                if attempt == 4:
                    raise
            except lmdb.ReadersFullError:
                if attempt == 4 or not self.env.reader_check():
                    raise
            else:
                with txn:
                    yield txn
                return
            finally:
                with self._gate:
                    self._active -= 1
                    self._gate.notify_all()
            if resized:  # by another process; to no less than what it has committed
                self.resize(self.map_size)

    def resize(self, map_size: int) -> None:
        """Map that many bytes, or what is committed if that is more. Waits for this process's transactions."""
        with self._gate:
            self._gate.wait_for(lambda: not self._active)
            if not self._closed:
                self.map_size = max(map_size, self.map_size)
                self.env.set_mapsize(self.map_size)

    def release(self) -> None:
        """One handle less; the last closes."""
        with Environment.opening:
            self.handles -= 1
            if self.handles:
                return
            for place in [place for place, environment in self.opened.items() if environment is self]:
                del self.opened[place]
            with self._gate:
                self._closed = True
                self._gate.wait_for(lambda: not self._active)
                self.env.close()
            os.close(self._lock)


def _find_damage(data: Path) -> list[str]:
    """What is wrong in a file at rest, which LMDB might crash on; nothing with an absent, empty or sound one."""
    if not data.exists() or not data.stat().st_size:
        return []
    try:
        return lmdb.verify.verify(str(data), subdir=False)  # type: ignore[no-untyped-call]
    except OSError:
        raise
    except Exception as error:  # whatever the parser makes of a random file
        return [f"{type(error).__name__}: {error}"]


def _set_aside(path: Path, reason: str) -> None:
    """Rename a damaged `data.mdb`, in place of one renamed earlier; only while alone."""
    aside = path / f"data.mdb.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
    for old in path.glob("data.mdb.damaged-*"):
        old.unlink(missing_ok=True)
    (path / "data.mdb").replace(aside)
    (path / "lock.mdb").unlink(missing_ok=True)
    logger.warning("the KV store %s is damaged (%s); it starts empty, the old file is %s", path, reason, aside.name)
