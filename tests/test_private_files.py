"""Files with users' contents: their modes, and deletions on a full disk."""

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from chunkattn.cache.disk.store import KVStore, entry_key
from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, RecordsError, Scope
from chunkattn.private_files import Reserve
from chunkattn.remote.process import _private_folder

pytest_plugins = ["tests.small_disk"]

LIKE = [((16, 1024), np.dtype(np.float32))]


def record(name, size=100):
    return DocumentRecord(Scope(f"owner {name}", None), str(name), Prefix(f"Read {name}."), "text " * size)


def key(number):
    return entry_key(b"f", None, np.asarray([number]), None, 0)


def put(store, number):
    return store.put(key(number), [np.full((16, 1024), number, np.float32)], tokens=1, kind="chunk")


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


# Modes


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(folder).rglob("*")}


@pytest.mark.usefixtures("open_umask")
def test_new_files_are_private(tmp_path):
    records = DocumentRecords(tmp_path / "documents")
    records.put([record(1)])
    assert modes(tmp_path) == dict.fromkeys(("documents", "documents-wal", "documents-reserve"), 0o600)
    records.close()
    with KVStore(tmp_path / "deep" / "kv", max_bytes=8 << 20) as store:
        assert put(store, 1)
        assert set(modes(tmp_path / "deep" / "kv").values()) == {0o600}
        assert modes(tmp_path / "deep")["kv"] == 0o700
    sockets = _private_folder()
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    sockets.rmdir()


@pytest.mark.usefixtures("open_umask")
def test_files_of_earlier_versions_become_private(tmp_path, caplog):
    with DocumentRecordsOf(tmp_path / "documents") as records:
        records.put([record(1)])
    KVStore(tmp_path / "kv", max_bytes=8 << 20).close()
    for path in [tmp_path / "documents", *(tmp_path / "kv").iterdir()]:
        path.chmod(0o664)
    with caplog.at_level(logging.WARNING), DocumentRecordsOf(tmp_path / "documents") as records:
        KVStore(tmp_path / "kv", max_bytes=8 << 20).close()
        assert [found.id for found in records] == ["1"]
        assert {mode & 0o077 for name, mode in modes(tmp_path).items() if name != "kv"} == {0}
    assert caplog.text.count("was open to other users (mode 664); its mode is 600 now") == 4 + 1


class DocumentRecordsOf(DocumentRecords):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# Full disks


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("size", [10, 5_000, 100_000])
def test_records_are_removed_on_a_full_disk(size, restarted, disk, fill):
    path = disk / "documents"
    records = DocumentRecords(path)
    kept = []
    for number in range(2_000):
        try:
            records.put([record(number, size)])
            kept += [records.get(Scope(f"owner {number}", None), str(number))]
        except RecordsError as error:
            said = str(error)
            break
        if size == 10 and number == 500:
            fill()
    assert "is full" in said or "no room" in said
    assert len(kept) > 3
    fill()
    if restarted:
        records.close()
        fill()
        records = DocumentRecords(path)
        kept = sorted(records, key=lambda own: int(own.id))
    while len(kept) > 2:
        going, kept = kept[0], kept[1:]
        records.remove([going])
        fill()
        assert records.get(going.scope, going.id) is None
        if len(kept) > 40:
            kept = [own for own in records.owned({own.scope.owner for own in kept[::3]}) if own in kept]
            records.remove(set(records) - set(kept))  # many at once
    records.close()
    fill()
    with DocumentRecordsOf(path) as again:
        assert [found.id for found in again] == [own.id for own in kept]
        again.remove(list(again))
        (disk / "filler").unlink()
        again.put([record("new", size)])
        assert [found.id for found in again] == ["new"]


def test_a_store_opens_on_a_disk_that_was_full_before_it_had_a_reserve(disk, fill, caplog):
    with DocumentRecordsOf(disk / "documents") as records:
        records.put([record(1)])
    (disk / "documents-reserve").unlink()
    fill()
    with caplog.at_level(logging.WARNING), DocumentRecordsOf(disk / "documents") as records:
        assert "takes no new documents until space is free" in caplog.text
        with pytest.raises(RecordsError, match="the disk is full"):
            records.put([record(2)])
        (disk / "filler").unlink()
        records.put([record(2)])
        assert len(records) == 2


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("count", [1, 2, 60])
def test_cached_entries_are_deleted_on_a_full_disk(count, restarted, disk, fill):
    store = KVStore(disk / "kv", max_bytes=32 << 20)
    for number in range(count):
        put(store, number)
    fill()
    if restarted:
        store.close()
        fill()
        store = KVStore(disk / "kv", max_bytes=32 << 20)
    found = [number for number in range(count) if store.contains(key(number))]
    assert len(found) == count or len(found) > 10
    for number in found:
        assert store.delete(key(number))
        fill()
        assert not store.contains(key(number))
    store.close()
    with KVStore(disk / "kv", max_bytes=32 << 20) as again:
        assert again.entries() == []
        (disk / "filler").unlink()
        assert put(again, 1)


def test_a_reserve_takes_what_is_left(disk):
    reserve = Reserve(disk / "reserve", 8 << 20)
    assert not reserve.fill()
    held = (disk / "reserve").stat().st_size
    assert held == 6 << 20
    with reserve.lent():
        (disk / "filler").write_bytes(bytes(1 << 20))
    assert (disk / "reserve").stat().st_size == 5 << 20
    assert not Reserve(disk / "absent" / "reserve", 1).fill()
