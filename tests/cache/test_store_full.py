"""A disk that is full or a folder that is gone: the store goes on with what it has, or says that it cannot."""

import logging
import shutil
import subprocess
import sys

import numpy as np

from chunkattn.cache.disk.store import KVStore, entry_key
from chunkattn.cache.disk.writer import StoreWriter
from chunkattn.private_files import Reserve

LIKE = [((64, 1024), np.dtype(np.float32))]


def key_of(number):
    return entry_key(b"f", None, np.asarray([number]), None, 0)


def put(store, number):
    return store.put(key_of(number), [np.full((64, 1024), number, np.float32)], tokens=1, kind="chunk")


def test_a_reserve_without_space_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Reserve, "fill", lambda _: False)
    KVStore(tmp_path / "kv", max_bytes=8 << 20).close()
    assert caplog.text.count("is full: entries may not be deleted until space is free") == 1


FILL = """
import logging, resource, signal, sys
from tests.cache.test_store_full import KVStore, LIKE, key_of, put
logging.basicConfig(stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = KVStore(sys.argv[1], max_bytes=64 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
assert all([put(store, n) for n in range(40)]), "an entry was not written"
found = [n for n in range(40) if (arrays := store.get(key_of(n), LIKE)) and (arrays[0] == n).all()]
assert 5 < len(found) < 16 and found[-1] == 39, found
assert store.damaged == 0
"""


def test_a_store_whose_file_cannot_grow_evicts_its_own(tmp_path):
    """The limit on the size of files stands for a full disk: LMDB sees the same short write."""
    done = subprocess.run([sys.executable, "-c", FILL, str(tmp_path / "kv")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is full") == 1


def test_nothing_is_written_to_a_folder_that_is_gone(tmp_path, caplog):
    store = KVStore(tmp_path / "kv", max_bytes=64 << 20)
    assert put(store, 0)
    shutil.rmtree(tmp_path / "kv")
    with caplog.at_level(logging.WARNING):
        assert not put(store, 1)
        assert not put(store, 2)
    assert caplog.text.count("has been deleted") == 1
    writer = StoreWriter(store)
    writer.submit(key_of(3), lambda: [np.zeros((64, 1024), np.float32)], tokens=1, kind="chunk")
    assert writer.flush(30)
    assert (writer.written, writer.failed, writer.take_lost()) == (0, 1, [key_of(3)])
    writer.close()
    store.close()
    with KVStore(tmp_path / "kv", max_bytes=64 << 20) as again:
        assert put(again, 1)
