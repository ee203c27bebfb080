"""The LMDB environment of a store: one per folder and process, shared by all handles, repaired and resized safely."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import lmdb.verify

from chunkattn.cache.disk.files import Unusable, reserve
from chunkattn.cache.disk.records import Damage
from chunkattn.errors import ConfigError
from chunkattn.private_files import make_private

logger = logging.getLogger(__name__)

_DBS = (b"meta", b"data", b"used")
LOCK = "chunkattn-kv.lock"
"""The flock file. An exclusive lock gives sole access; the file's presence marks the folder as a KV store."""
_READERS = 512
_LOCK_BYTES = 64 << 10
"""Size of LMDB's lock file, which holds at least `_READERS` slots of 64 bytes and a header."""


def is_damage(error: Exception) -> bool:
    """Return whether an error means damaged file contents.

    System and load problems are excluded. LMDB's own error codes are negative.
    """
    if isinstance(error, lmdb.MapResizedError | lmdb.MapFullError | lmdb.ReadersFullError | lmdb.PanicError | Unusable):
        return False
    return isinstance(error, Damage) or getattr(error, "code", 0) < 0


class Environment:
    """An open LMDB environment with the databases `meta`, `data` and `used`.

    LMDB forbids a process to open one environment twice, so `opened` and `handles` share it. LMDB forbids resizing the map
    under a transaction; `begin` and `resize` prevent it. An open environment holds a shared flock on `LOCK`. A process that
    gets the exclusive flock has sole access and may check and move the file.

    Attributes:
        opened: environments of this process, by device and inode of the folder; guarded by `opening`.
        handles: number of handles that share the environment.
        map_size: map size in bytes; another process may have committed more.
        page_size: LMDB's page size in bytes.

    Raises:
        ConfigError: the folder holds another program's environment.
        Damage: the file is damaged while other processes use it.
        lmdb.Error: the file is damaged while other processes use it, or LMDB cannot open it.
        OSError: the lock or the file cannot be opened.
    """

    opened: dict[tuple[int, int], Environment] = {}  # noqa: RUF012
    opening = threading.RLock()

    def __init__(self, path: Path, map_size: int) -> None:
        self.path, self.map_size, self.handles = path, map_size, 0
        self._gate = threading.Condition()
        self._active, self._closed = 0, False
        self._fault: str | None = None
        data, lock = path / "data.mdb", path / LOCK
        # A store creates its lock file before the data, so data without a lock file belongs to another program.
        if data.exists() and data.stat().st_size and not lock.exists():
            raise ConfigError(
                f"{path} holds a data.mdb that is no KV store of chunkattn's; give the KV store a folder of its own"
            )
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            alone = self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            if alone or not (path / "lock.mdb").exists():  # other processes must not see its size change
                reserve(path / "lock.mdb", 0, _LOCK_BYTES)
            problems = _find_damage(path / "data.mdb") if alone else []
            if not alone:
                self._flock(fcntl.LOCK_SH)
            elif worst := [problem for problem in problems if "-- a leak" not in problem]:
                _set_aside(path, worst[0])
                problems = []
            try:
                self._open(problems=problems)
            except (lmdb.Error, Damage) as error:
                if not alone or not is_damage(error):
                    raise
                _set_aside(path, str(error))
                self._open()
            self._flock(fcntl.LOCK_SH)
            make_private(lock, data, path / "lock.mdb", *path.glob("data.mdb.damaged-*"))
        except BaseException:
            os.close(self._lock)
            raise

    def _flock(self, how: int) -> bool:
        try:
            fcntl.flock(self._lock, how)
        except OSError:  # another process holds it, or the file system has no locks
            return False
        return True

    def _open(self, *, problems: Sequence[str] = ()) -> None:
        self.env = lmdb.open(
            str(self.path), map_size=self.map_size, mode=0o600, max_dbs=len(_DBS), max_readers=_READERS, create=False
        )
        try:
            self.page_size, data = int(self.env.stat()["psize"]), self.path / "data.mdb"
            end = (self.env.info()["last_pgno"] + 1) * self.page_size
            if (size := data.stat().st_size) < end:
                if problems:
                    raise Damage(problems[0])
                reserve(data, size, end)  # reading past the end raises SIGBUS; zeros fail the checksum
            self._files = {file: file.stat() for file in (data, self.path / "lock.mdb")}
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
        """Return whether the folder still holds the open files."""
        try:
            lock = (self.path / LOCK).stat()
            return os.path.samestat(lock, os.fstat(self._lock)) and (self.path / "data.mdb").exists()
        except OSError:
            return False

    @contextlib.contextmanager
    def begin(self, *, write: bool = False) -> Iterator[lmdb.Transaction[memoryview]]:
        """Open a transaction that commits unless the block raises.

        Raises:
            ConfigError: the store is closed.
            lmdb.Error: LMDB refuses the transaction, or the environment has become unusable.
        """
        for attempt in range(5):
            with self._gate:
                if self._closed:
                    raise ConfigError(f"the KV store {self.path} is closed")
                self._check()
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
            if resized:  # another process grew the map; LMDB adopts at least its size
                self.resize(self.map_size)

    def _check(self) -> None:
        """Check that every page is there.

        Raises:
            Unusable: a file is shorter than before, or could not be mapped.
        """
        for file, before in self._files.items() if self._fault is None else ():
            with contextlib.suppress(OSError):  # a deleted or replaced file stays mapped whole
                if os.path.samestat(before, now := file.stat()):
                    self._files[file] = now
                    if now.st_size < before.st_size:  # LMDB never shortens a file
                        self._fault = f"{file} has been truncated; the store is unusable until this process restarts"
        if self._fault is not None:
            raise Unusable(self._fault)

    def resize(self, map_size: int) -> None:
        """Map `map_size` bytes, or the committed size if that is larger. Waits for this process's transactions.

        Raises:
            lmdb.Error: the file cannot be mapped; the environment is unusable.
        """
        with self._gate:
            self._gate.wait_for(lambda: not self._active)
            if not self._closed:
                self._check()
                self.map_size = max(map_size, self.map_size)
                try:
                    self.env.set_mapsize(self.map_size)
                except BaseException as error:  # LMDB has given up the old map
                    self._fault = f"{self.path} cannot be mapped into memory: {error}"
                    raise

    def release(self) -> None:
        """Release one handle. Releasing the last handle closes the environment."""
        with Environment.opening:
            self.handles -= 1
            if self.handles:
                return
            for place in [place for place, environment in self.opened.items() if environment is self]:
                del self.opened[place]
            with self._gate:
                self._closed = True
                self._gate.wait_for(lambda: not self._active)
                with contextlib.suppress(Unusable):
                    self._check()
                if self._fault is None:
                    self.env.close()
                else:  # closing it, or freeing the object, would access the lost pages
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.env))
            os.close(self._lock)


def _find_damage(data: Path) -> list[str]:
    """Return the damage of a file that no process has open; empty for an absent, empty or sound file.

    LMDB itself may crash on a damaged file.
    """
    if not data.exists() or not data.stat().st_size:
        return []
    try:
        return lmdb.verify.verify(str(data), subdir=False)  # type: ignore[no-untyped-call]
    except OSError:
        raise
    except Exception as error:  # the parser may raise anything on random bytes
        return [f"{type(error).__name__}: {error}"]


def _set_aside(path: Path, reason: str) -> None:
    """Rename a damaged `data.mdb` and delete a file renamed earlier. Requires sole access."""
    aside = path / f"data.mdb.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
    for old in path.glob("data.mdb.damaged-*"):
        old.unlink(missing_ok=True)
    (path / "data.mdb").replace(aside)
    (path / "lock.mdb").unlink(missing_ok=True)
    logger.warning("the KV store %s is damaged (%s); it starts empty, the old file is %s", path, reason, aside.name)
