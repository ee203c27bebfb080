"""K/V of prompt parts on disk, in an LMDB environment shared between processes.

The environment holds three databases:

- `meta` maps an entry's key to a checksum and a msgpack record.
- `data` maps a key and a big-endian uint32 index to at most `SEGMENT` bytes of one array, so a put needs no long run of
  free pages.
- `used` maps a key to the time of last use.

One transaction writes an entry and one reads it, so an entry is whole or absent. This module must not import JAX.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np
import xxhash

from chunkattn.cache.disk.environment import Environment, is_damage
from chunkattn.cache.disk.files import free_bytes, is_full
from chunkattn.cache.disk.records import (
    FORMAT,
    KEY_BYTES,
    TAG_BYTES,
    Damage,
    Meta,
    StoreEntry,
    entry_key,
    model_tag,
    signature,
    state_key,
)
from chunkattn.errors import ConfigError
from chunkattn.private_files import DISK_FULL, Reserve

__all__ = ["KVStore", "Like", "StoreEntry", "entry_key", "model_tag", "state_key"]

logger = logging.getLogger(__name__)

SEGMENT = (1 << 20) - 16  # fills whole pages together with LMDB's page header
MIN_BYTES = 4 << 20
_HIGH, _LOW = 0.9, 0.85  # a put that would exceed the first share evicts down to the second
_BATCH = 128 << 20  # maximum number of bytes freed by one transaction: LMDB writes the list of freed pages as one value
_TICK = b"tick"
_WARNINGS_S = 60.0
_LEAST_LEFT = 0.3
_RESERVE, _RESERVE_BYTES = "chunkattn-kv.reserve", 1 << 20
_DISK_FULL = (*DISK_FULL, errno.EIO)  # LMDB reports a short write as EIO

T = TypeVar("T")
Like = Sequence[tuple[tuple[int, ...], np.dtype]]


def _raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _pieces(nbytes: int) -> Iterator[slice]:
    for start in range(0, nbytes, SEGMENT):
        yield slice(start, min(start + SEGMENT, nbytes))


class KVStore(contextlib.AbstractContextManager["KVStore"]):
    """K/V entries in a folder, evicted by least recent use. Safe across threads and processes; open it after a fork.

    Handles of one process share the environment. The file never exceeds the largest `max_bytes` of the handles that share
    it, and it never shrinks. A handle's own `max_bytes` bounds the size that its puts leave. Damaged entries are removed
    without an error. A reserve of 1 MiB beside the file lets deletions succeed on a full disk.

    Args:
        path: a folder of its own; created if absent.
        max_bytes: size of the file on disk in bytes, at least 4 MiB; puts aim at 90 percent.
        create: create a store if the folder has none.

    Attributes:
        damaged: number of entries found damaged and removed.

    Raises:
        ConfigError: the folder cannot be used, belongs to another program or has no store, `max_bytes` is too small, or the
            disk has no room for a new store.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = 16 << 30, create: bool = True) -> None:
        self.path, self.max_bytes, self.damaged = Path(path), max_bytes, 0
        self._warned_at = float("-inf")
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"a KV store needs max_bytes of at least {MIN_BYTES}, not {max_bytes}")
        # Eviction needs free pages too: `_at_need` maps this reserve when they run out.
        map_size = (max_bytes - max(256 << 10, max_bytes // 64)) & ~0xFFFF
        try:
            if not create and not (self.path / "data.mdb").exists():
                raise ConfigError(f"there is no KV store at {self.path}")
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = None if (self.path / "data.mdb").exists() else free_bytes(self.path)
            if free is not None and free < MIN_BYTES:
                raise ConfigError(self._no_room())
            with Environment.opening:
                stat = self.path.stat()
                place = stat.st_dev, stat.st_ino
                if place not in Environment.opened:
                    Environment.opened[place] = Environment(self.path, map_size)
                self._env = Environment.opened[place]
                self._env.handles += 1
            self._release = weakref.finalize(self, self._env.release)
            if map_size > self._env.map_size:
                self._env.resize(map_size)
            self._reserve = Reserve(self.path / _RESERVE, _RESERVE_BYTES)
            if not self._reserve.fill():
                logger.warning("the disk of the KV store %s is full: entries may not be deleted until space is free", self.path)
        except (OSError, lmdb.Error, Damage) as error:
            raise ConfigError(
                self._no_room() if is_full(error) else f"cannot use {self.path} as a KV store: {error}"
            ) from error

    def _no_room(self) -> str:
        free = free_bytes(self.path)
        room = "the disk, a quota or the limit on file sizes leaves too little" if free is None else f"{free} bytes are free"
        return (
            f"cannot use {self.path} as a KV store: the disk is full. A KV store needs at least {MIN_BYTES} bytes and may grow "
            f"to {self.max_bytes}; {room}. Free some space, or give another folder"
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle after its transactions in progress. Repeated calls are allowed."""
        self._release()

    def get(self, key: bytes, like: Like) -> list[np.ndarray] | None:
        """Return copies of an entry's arrays, or None if the entry is absent.

        A damaged entry, or an entry with arrays that differ from `like`, is removed and counted in `damaged`.

        Args:
            key: key from `entry_key`.
            like: shape and dtype of each array.
        """
        try:
            with self._env.begin() as txn:
                record = txn.get(key, db=self._env.meta)
                return None if record is None else self._read(txn, key, Meta.decode(key, bytes(record)), like)
        except (lmdb.Error, Damage) as error:
            reason = str(error)
            if not is_damage(error):
                self.warn("cannot read KV entries from %s: %s", self.path, reason)
                return None
        self.damaged += 1
        logger.warning("KV entry %s is damaged (%s) and is removed", key.hex(), reason)
        with contextlib.suppress(lmdb.Error):
            self.delete(key)
        return None

    def _read(self, txn: lmdb.Transaction[memoryview], key: bytes, meta: Meta, like: Like) -> list[np.ndarray]:
        expected = [signature(shape, np.dtype(dtype)) for shape, dtype in like]
        if meta.arrays != expected:
            raise Damage(f"arrays {meta.arrays}, not {expected}")
        arrays, digest, index = [], xxhash.xxh3_128(), 0
        cursor = txn.cursor(self._env.data)  # unlike `Transaction.get`, it releases the GIL while reading from disk
        for shape, dtype in like:
            arrays.append(np.empty(shape, dtype))
            raw = _raw(arrays[-1])
            for piece in _pieces(raw.nbytes):
                target = raw[piece]
                if not cursor.set_key(key + struct.pack(">I", index)):
                    raise Damage(f"segment {index} of {meta.segments} is missing")
                value = cursor.value()
                if len(value) != target.nbytes:
                    raise Damage(f"segment {index} of {meta.segments} has {len(value)} bytes, not {target.nbytes}")
                target[:] = np.frombuffer(value, np.uint8)
                index += 1
            digest.update(raw.data)
        if digest.digest() != meta.checksum:
            raise Damage("wrong checksum")
        return arrays

    def contains(self, key: bytes) -> bool:
        """Return whether the store has an entry. Only `get` checks that it is sound."""
        try:
            with self._env.begin() as txn:
                return txn.get(key, db=self._env.meta) is not None
        except lmdb.Error as error:
            self.warn("cannot look for KV entries in %s: %s", self.path, error)
            return False

    def put(self, key: bytes, arrays: Sequence[np.ndarray], *, tokens: int, kind: str) -> bool:
        """Write an entry, replacing an earlier one.

        Args:
            key: key from `entry_key`.
            arrays: arrays of any shapes and dtypes except objects.
            tokens: number of tokens whose K/V the arrays hold.
            kind: see `StoreEntry`.

        Returns:
            False if the entry exceeds the store's capacity or LMDB refuses it; both are logged.
        """
        raws, digest = [_raw(np.asarray(array, order="C")) for array in arrays], xxhash.xxh3_128()
        for raw in raws:
            digest.update(raw.data)
        pieces = [raw[piece] for raw in raws for piece in _pieces(raw.nbytes)]
        total = sum(raw.nbytes for raw in raws)
        signatures = [signature(array.shape, array.dtype) for array in arrays]
        meta = Meta(FORMAT, kind, tokens, time.time(), signatures, total, len(pieces), digest.digest())
        record = meta.encode(key)
        need = total + len(record) + (len(pieces) + 16) * self._env.page_size
        if need > _LOW * self.max_bytes:
            logger.warning("a KV entry of %d bytes does not fit a store of %d", total, self.max_bytes)
            return False
        if not self._env.is_there():
            self.warn("the KV store %s has been deleted or replaced; nothing is written to it", self.path)
            return False
        try:
            room = self.max_bytes
            for turn, fill in enumerate((_HIGH, _LOW, 0.6, 0.3, 0.0)):
                try:
                    with self._env.begin(write=True) as txn:
                        self._remove(txn, key)
                        self._make_room(txn, need)
                        txn.put(key, record, db=self._env.meta)
                        txn.put(key, struct.pack(">d", meta.created), db=self._env.used)
                        for index, piece in enumerate(pieces):
                            txn.put(key + struct.pack(">I", index), piece.data, db=self._env.data)
                    return True
                except lmdb.MapFullError:  # LMDB cannot yet reuse the pages that the last two transactions freed
                    self._evict(int(fill * room) - need)
                    time.sleep(turn * 0.1)  # pages that a reader may still use are not reusable either
                except lmdb.Error as error:
                    if getattr(error, "code", 0) not in _DISK_FULL:
                        raise
                    self.warn("the disk of the KV store %s is full; new entries replace old entries", self.path)
                    room = min(room, self.num_bytes)  # the file cannot grow
                    self._evict(int(max(fill, _LEAST_LEFT) * room) - need)  # a failing disk must not empty the store
        except lmdb.Error as error:
            self.warn("cannot write KV entries to %s: %s", self.path, error)
            return False
        self.warn("found no room for KV entries of %d bytes in %s", total, self.path)
        return False

    def warn(self, text: str, *values: object) -> None:
        """Log a warning that every entry may repeat, at most once a minute.

        Args:
            text: format of the warning.
            values: values of the format.
        """
        now = time.monotonic()
        if now - self._warned_at >= _WARNINGS_S:
            self._warned_at = now
            logger.warning(text, *values)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Set the time of last use of the entries to now, in one transaction. Absent entries are skipped."""
        now = struct.pack(">d", time.time())
        try:
            with self._env.begin(write=True) as txn:
                for key in keys:
                    if txn.get(key, db=self._env.meta) is not None:
                        txn.put(key, now, db=self._env.used)
        except lmdb.Error as error:
            self.warn("cannot note the use of KV entries in %s: %s", self.path, error)

    def delete(self, key: bytes) -> bool:
        """Remove an entry and return whether it existed."""
        return self._remove_all([key]) == 1

    def entries(self) -> list[StoreEntry]:
        """Return all entries with sound metadata, the least recently used first."""
        return [
            StoreEntry(key, key[:TAG_BYTES].hex(), meta.kind, meta.tokens, meta.num_bytes, meta.created, last_used)
            for last_used, key, meta in self._listed()
            if meta is not None
        ]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pages in use."""
        with self._env.begin() as txn:
            return self._in_use(txn)

    def gc(self, max_bytes: int | None = None, max_age_s: float | None = None, model: str | None = None) -> int:
        """Remove entries and return how many.

        Without `model`, unreadable entries are removed first and are not counted. With `model` alone, all entries of that model
        are removed.

        Args:
            max_bytes: remove the least recently used entries until the arrays of the rest take at most this many bytes.
            max_age_s: before that, remove entries not used for this many seconds.
            model: remove only entries of the model with this tag in hex.
        """
        if model is None:
            self._remove_all([key for _, key, meta in self._listed() if meta is None])
        entries = [entry for entry in self.entries() if model in (None, entry.model)]
        if max_bytes is None and max_age_s is None:
            return self._remove_all([entry.key for entry in entries if model])
        oldest = float("-inf") if max_age_s is None else time.time() - max_age_s
        left = sum(entry.num_bytes for entry in entries)
        going = []
        for entry in entries:
            if entry.last_used < oldest or (max_bytes is not None and left > max_bytes):
                going.append(entry.key)
                left -= entry.num_bytes
        return self._remove_all(going)

    def _listed(self) -> list[tuple[float, bytes, Meta | None]]:
        """Return time of last use, key and metadata of all entries, oldest first; None for unreadable metadata."""
        with self._env.begin() as txn:
            return [(used, key, self._meta(txn, key)) for used, key in self._by_use(txn)]

    def _meta(self, txn: lmdb.Transaction[memoryview], key: bytes) -> Meta | None:
        with contextlib.suppress(Damage):
            return Meta.decode(key, bytes(txn.get(key, b"", db=self._env.meta)))
        return None

    def clear(self) -> None:
        """Remove every entry."""
        self._evict(-1)

    def _in_use(self, txn: lmdb.Transaction[memoryview]) -> int:
        stats = [txn.stat(db) for db in (self._env.meta, self._env.data, self._env.used)]
        return sum((s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) * s["psize"] for s in stats)

    def _by_use(self, txn: lmdb.Transaction[memoryview]) -> list[tuple[float, bytes]]:
        """Return times of last use and keys, oldest first."""
        times = {bytes(key): bytes(value) for key, value in txn.cursor(self._env.used)}
        keys = map(bytes, txn.cursor(self._env.meta).iternext(values=False))
        return sorted((struct.unpack(">d", times[key])[0] if len(times.get(key, b"")) == 8 else 0.0, key) for key in keys)

    def _remove(self, txn: lmdb.Transaction[memoryview], key: bytes) -> bool:
        cursor = txn.cursor(self._env.data)
        while cursor.set_range(key) and bytes(cursor.key()[:KEY_BYTES]) == key:
            cursor.delete()
        txn.delete(key, db=self._env.used)
        return txn.delete(key, db=self._env.meta)

    def _make_room(self, txn: lmdb.Transaction[memoryview], need: int) -> None:
        if self._in_use(txn) + need <= _HIGH * self.max_bytes:
            return
        for _, key in self._by_use(txn):
            self._remove(txn, key)
            if self._in_use(txn) + need <= _LOW * self.max_bytes:
                return
        if self._in_use(txn) + need > _LOW * self.max_bytes:
            self._drop(txn)

    def _drop(self, txn: lmdb.Transaction[memoryview]) -> None:
        for db in (self._env.meta, self._env.data, self._env.used):  # also frees the pages of entries with damaged keys
            txn.drop(db, delete=False)

    def _remove_all(self, keys: Sequence[bytes]) -> int:
        removed, waiting = 0, list(keys)
        while waiting:
            done, count = self._at_need(lambda: self._remove_some(waiting))
            removed += count
            del waiting[:done]
        return removed

    def _remove_some(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Remove the first keys in one transaction. Return the number of keys handled and of entries removed."""
        with self._env.begin(write=True) as txn:
            start, done, count = self._in_use(txn), 0, 0
            while done < len(keys) and start - self._in_use(txn) < _BATCH:
                count += self._remove(txn, keys[done])
                done += 1
        return done, count

    def _at_need(self, work: Callable[[], T]) -> T:
        """Run `work`, a deletion. If the map or the disk is full, run it again with the space that is kept back."""
        try:
            return work()
        except lmdb.MapFullError:
            self._env.resize(self.max_bytes & ~0xFFFF)
        except lmdb.Error as error:
            if getattr(error, "code", 0) not in _DISK_FULL:
                raise
        with self._reserve.lent():
            return work()

    def _evict(self, target: int) -> None:
        """Remove the least recently used entries down to `target` bytes and make their pages reusable by a later put."""
        with self._env.begin() as txn:
            self._env.env.reader_check()  # frees the slots of killed readers, which pin pages
            excess, going = self._in_use(txn) - target, []
            for _, key in self._by_use(txn):
                if excess <= 0:
                    break
                going.append(key)
                if (meta := self._meta(txn, key)) is not None:
                    excess -= meta.num_bytes
        self._remove_all(going)
        # LMDB reuses freed pages two writing transactions later, and counts only transactions that change something.
        for turn in range(2):
            self._at_need(partial(self._tick, target < 0 and not turn))

    def _tick(self, drop: bool) -> None:
        with self._env.begin(write=True) as txn:
            if drop:
                self._drop(txn)
            txn.put(_TICK, struct.pack(">d", time.time()), db=self._env.used)
