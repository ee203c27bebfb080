"""A thread that writes entries to a store, so that engine steps never wait for a disk."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import lmdb
import numpy as np

if TYPE_CHECKING:
    from chunkattn.cache.disk.store import KVStore

logger = logging.getLogger(__name__)

Fetch = Callable[[], list[np.ndarray]]
_Job = tuple[bytes, Fetch, int, str, int]


class StoreWriter:
    """A thread that writes entries to a store. It logs and counts errors and continues.

    Args:
        store: the store; it must outlive the writer.
        max_pending: maximum number of waiting entries; further entries are dropped.
        max_pending_bytes: maximum number of bytes that waiting entries may hold, as passed to `submit`; a single entry may
            exceed it.

    Attributes:
        written: number of entries written.
        dropped: number of entries refused because of the limits, or abandoned by `close`.
        pending_bytes: bytes of the entries that wait or are being written.
        failed: number of entries that could not be fetched or written.
    """

    touch_interval_s = 1.0

    def __init__(self, store: KVStore, *, max_pending: int = 64, max_pending_bytes: int = 1 << 62) -> None:
        self.store, self.max_pending, self.max_pending_bytes = store, max_pending, max_pending_bytes
        self.pending_bytes = 0
        self._lost: list[bytes] = []
        self.written = self.dropped = self.failed = 0
        self._waiting: deque[_Job] = deque()
        self._keys: set[bytes] = set()
        self._touched: set[bytes] = set()
        self._doomed: set[bytes] = set()
        self._deleting: set[bytes] = set()
        self._touch_at = 0.0  # on the monotonic clock
        self._busy = self._closed = False
        self._flushing = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-store-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # at exit the interpreter would freeze the thread inside a transaction

    def submit(self, key: bytes, fetch: Fetch, *, tokens: int, kind: str, num_bytes: int = 0) -> bool:
        """Queue an entry to write unless the store has it by then.

        Args:
            key: key from `entry_key`.
            fetch: returns the arrays; called in the thread.
            tokens: number of tokens whose K/V the arrays hold.
            kind: "prefix" or "chunk".
            num_bytes: bytes that `fetch` keeps alive.

        Returns:
            False if too much is waiting or the writer is closed.
        """
        with self._changed:
            if key in self._keys:
                return True
            full = self.pending_bytes and self.pending_bytes + num_bytes > self.max_pending_bytes
            if self._closed or full or len(self._waiting) >= self.max_pending:
                self.dropped += 1
                return False
            self.pending_bytes += num_bytes
            self._waiting.append((key, fetch, tokens, kind, num_bytes))
            self._keys.add(key)
            self._changed.notify_all()
        return True

    def take_lost(self) -> list[bytes]:
        """Return the keys of accepted entries that could not be written since the last call."""
        with self._changed:
            lost, self._lost = self._lost, []
        return lost

    def touch(self, key: bytes) -> None:
        """Record a use of the entry now. The thread writes collected uses about once a second."""
        with self._changed:
            if not self._touched:
                self._touch_at = time.monotonic() + self.touch_interval_s
                self._changed.notify_all()
            self._touched.add(key)

    def delete(self, key: bytes) -> None:
        """Queue the deletion of an entry and drop its pending write."""
        with self._changed:
            for job in [job for job in self._waiting if job[0] == key]:
                self._waiting.remove(job)
                self._keys.discard(key)
                self.pending_bytes -= job[-1]
            self._doomed.add(key)
            self._changed.notify_all()

    def deletes(self, key: bytes) -> bool:
        """Return whether the deletion of an entry is pending."""
        with self._changed:
            return key in self._doomed or key in self._deleting

    def flush(self, timeout: float) -> bool:
        """Wait until all requested work is done, at most `timeout` seconds. Return whether all work is done."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            done = self._changed.wait_for(self._idle, timeout)
            self._flushing -= 1
            return done

    def close(self, timeout: float = 10.0) -> None:
        """Refuse new entries, write waiting entries for up to `timeout` seconds and drop the rest. May be called repeatedly."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(self._idle, timeout)
            self.dropped += len(self._waiting)
            self.pending_bytes -= sum(job[-1] for job in self._waiting)
            self._waiting.clear()
            self._keys.clear()
            self._changed.notify_all()
            idle = self._idle()
        if idle:
            self._thread.join()

    def _idle(self) -> bool:
        return not (self._waiting or self._touched or self._doomed or self._busy)

    def _due(self) -> bool:
        return bool(self._touched) and (self._flushing > 0 or time.monotonic() >= self._touch_at)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._deleting = set()
                self._changed.notify_all()
                while not (self._waiting or self._doomed or self._closed or self._due()):
                    self._changed.wait(self._touch_at - time.monotonic() if self._touched else None)
                self._deleting = doomed = self._doomed
                self._doomed = set()
                job = self._waiting.popleft() if self._waiting else None
                touched: set[bytes] = set()
                if self._due() or job is None:
                    touched, self._touched = self._touched, touched
                if not (job or touched or doomed):
                    return
                self._busy = True
            kept = False
            try:
                self._delete(doomed)  # before writes: a queued write of the same key was requested later
                if touched:
                    self.store.touch(touched)
                kept = job is None or self._write(*job[:-1])
            except Exception:
                self.failed += 1
                logger.warning("cannot write to the KV store %s", self.store.path, exc_info=True)
            finally:
                if job is not None:
                    with self._changed:
                        kept &= job[0] not in self._doomed
                        self._keys.discard(job[0])
                        self.pending_bytes -= job[-1]
                        self._lost += [] if kept else [job[0]]
                job = None  # releases what `fetch` keeps alive

    def _delete(self, keys: set[bytes]) -> None:
        for key in keys:
            try:
                self.store.delete(key)
            except lmdb.Error as error:
                self.failed += 1
                self.store.warn("cannot delete KV entries from %s: %s", self.store.path, error)
            except Exception:
                self.failed += 1
                logger.warning("cannot delete KV entry %s", key.hex(), exc_info=True)

    def _write(self, key: bytes, fetch: Fetch, tokens: int, kind: str) -> bool:
        if self.store.contains(key):
            self.touch(key)
        elif self.store.put(key, fetch(), tokens=tokens, kind=kind):
            self.written += 1
        else:
            self.failed += 1
            return False
        return True
