"""A thread that reads entries from a store, so that engine steps never wait for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from chunkattn.cache.disk.store import KVStore, Like

logger = logging.getLogger(__name__)


class Lookup(NamedTuple):
    """An entry to read.

    Attributes:
        key: key from `entry_key`.
        like: shape and dtype of each array.
        required: whether a missing entry makes the entries after it useless; reading then stops there.
    """

    key: bytes
    like: Like
    required: bool


Entries = dict[bytes, list[np.ndarray] | None]
"""Arrays by key; None for a missing entry. Keys that were not looked up are absent."""


class StoreReader:
    """A reader of lists of entries, in order of submission.

    Args:
        store: the store; it must outlive the reader.
        max_bytes: bytes of read and unreleased arrays at which the thread pauses.
    """

    def __init__(self, store: KVStore, *, max_bytes: int) -> None:
        self._store, self._max_bytes, self._held = store, max_bytes, 0
        self._waiting: deque[tuple[Hashable, Sequence[Lookup]]] = deque()
        self._owners: set[Hashable] = set()  # submitted and neither taken nor cancelled
        self._arrived: list[tuple[Hashable, Entries]] = []
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="kv-store-reader", daemon=True).start()

    @property
    def owners(self) -> frozenset[Hashable]:
        """Return the owners with submitted entries that were neither taken nor cancelled."""
        with self._changed:
            return frozenset(self._owners)

    def submit(self, owner: Hashable, lookups: Sequence[Lookup]) -> None:
        """Queue entries to read.

        Args:
            owner: owner of the entries; it must have none pending.
            lookups: entries to read, in order.
        """
        with self._changed:
            self._owners.add(owner)
            self._waiting.append((owner, lookups))
            self._changed.notify_all()

    def take(self, timeout: float = 0.0) -> list[tuple[Hashable, Entries]]:
        """Return the owners with read entries, each with its entries.

        Call `release` with the entries when their arrays are no longer needed.

        Args:
            timeout: seconds to wait for the first owner.
        """
        with self._changed:
            if timeout:
                self._changed.wait_for(lambda: self._arrived, timeout)
            arrived, self._arrived = self._arrived, []
            self._owners.difference_update(owner for owner, _ in arrived)
        return arrived

    def release(self, entries: Entries) -> None:
        """Stop counting the arrays against `max_bytes`."""
        with self._changed:
            self._held -= num_bytes(entries)
            self._changed.notify_all()

    def cancel(self, owner: Hashable) -> None:
        """Drop an owner's pending and read entries."""
        with self._changed:
            if owner in self._owners:
                self._owners.remove(owner)
                self._waiting = deque(job for job in self._waiting if job[0] is not owner)
                kept = [(o, entries) for o, entries in self._arrived if o is not owner]
                self._held -= sum(num_bytes(entries) for o, entries in self._arrived if o is owner)
                self._arrived = kept
                self._changed.notify_all()

    def close(self) -> list[Hashable]:
        """Stop reading and return the owners with entries that were not taken."""
        with self._changed:
            self._closed = True
            left, self._owners = list(self._owners), set()
            self._waiting.clear()
            self._arrived = []
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and self._held < self._max_bytes))
                if self._closed:
                    return
                owner, lookups = self._waiting.popleft()
            entries = self._read(lookups)
            with self._changed:
                if owner in self._owners:
                    self._held += num_bytes(entries)
                    self._arrived.append((owner, entries))
                    self._changed.notify_all()

    def _read(self, lookups: Sequence[Lookup]) -> Entries:
        entries: Entries = {}
        for key, like, required in lookups:
            try:
                entries[key] = self._store.get(key, like)
            except Exception:
                logger.warning("cannot read KV entry %s", key.hex(), exc_info=True)
                entries[key] = None
            if required and entries[key] is None:
                break
        return entries


def num_bytes(entries: Entries) -> int:
    """Return the bytes of all arrays."""
    return sum(array.nbytes for arrays in entries.values() for array in arrays or ())
