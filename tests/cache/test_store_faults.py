"""Faults of the file system under a K/V store: a full disk, a truncated file, a read-only or unmappable file. No process ends.

A full disk is a small tmpfs of its own, in a mount namespace where this user may make one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from chunkattn.cache.disk.environment import Environment
from chunkattn.cache.disk.store import KVStore
from chunkattn.cache.disk.writer import StoreWriter
from chunkattn.errors import ConfigError
from tests.cache.test_store_full import LIKE, key_of, put

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
CAN_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False).returncode == 0
)
needs_tmpfs = pytest.mark.skipif(not CAN_MOUNT, reason="this user may not mount a tmpfs")

HEAD = """
import logging, os, resource, shutil, sys
from tests.cache.test_store_full import KVStore, LIKE, key_of, put
from chunkattn.errors import ConfigError
logging.basicConfig(stream=sys.stdout)
folder = sys.argv[1]
def fill(left):
    disk = os.statvfs(folder)
    with open(folder + "/filler", "wb") as file:
        file.write(bytes(disk.f_bavail * disk.f_frsize - left))
"""


def run(code, folder, *, size=None):
    """Run code in a process of its own, with `folder` on a tmpfs of `size` MiB."""
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    if size is not None:
        mount = f'mount -t tmpfs -o size={size}m tmpfs {folder} && exec "$@"'
        command = [*UNSHARE, "sh", "-c", mount, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


NEW = """
for left in (0, 4096, 65536, (4 << 20) - 4096):
    fill(left)
    try:
        KVStore(folder + "/kv", max_bytes=64 << 20)
    except ConfigError as error:
        text = str(error)
        assert folder + "/kv" in text and "4194304 bytes" in text and f"{left} bytes are free" in text, text
        assert "Free some space" in text, text
    else:
        raise SystemExit("a store was made on a full disk")
    os.remove(folder + "/filler")
    shutil.rmtree(folder + "/kv", ignore_errors=True)
"""

LATER = """
from contextlib import ExitStack
store = KVStore(folder + "/kv", max_bytes=64 << 20)
assert put(store, 0)
fill(0)
assert not all([put(store, n) for n in range(1, 40)]) or store.get(key_of(39), LIKE)
with ExitStack() as stack:  # each reader has a slot in the lock file
    for _ in range(400):
        stack.enter_context(store._env.begin())
assert store.damaged == 0
store.close()
with KVStore(folder + "/kv", max_bytes=64 << 20) as again:  # a present store opens on a full disk
    again.get(key_of(0), LIKE)
    assert again.damaged == 0
"""


@needs_tmpfs
def test_a_new_store_on_a_full_disk_says_what_it_needs(tmp_path):
    run(NEW, tmp_path, size=16)


@needs_tmpfs
def test_a_disk_that_fills_up_ends_no_process(tmp_path):
    output = run(LATER, tmp_path, size=8)
    told = [line for line in output.splitlines() if "WARNING" in line and "may not be deleted" not in line]
    assert len(told) == 1
    assert "is full" in told[0]


def test_a_file_size_limit_is_reported_too(tmp_path):
    output = run(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    KVStore(folder + "/kv")
except ConfigError as error:
    print(error)
""",
        tmp_path,
    )
    assert "the disk is full" in output
    assert "4194304 bytes" in output


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("length", [0, 5000])
def test_a_truncated_file_ends_no_process(tmp_path, name, length):
    """The process survives every later call to the store, closes the store and exits in order."""
    output = run(
        f"""
from chunkattn.cache.disk.writer import StoreWriter
import numpy as np
store = KVStore(folder + "/kv", max_bytes=64 << 20)
writer = StoreWriter(store)
assert put(store, 0) and put(store, 1) and store.get(key_of(0), LIKE) is not None
os.truncate(folder + "/kv/{name}", {length})
assert store.get(key_of(0), LIKE) is None and not store.contains(key_of(1)) and not put(store, 2)
store.touch([key_of(0)])
writer.delete(key_of(0))
writer.touch(key_of(1))
assert writer.submit(key_of(3), lambda: [np.zeros((64, 1024), np.float32)], tokens=1, kind="chunk")
assert writer.flush(30)
assert writer.take_lost() == [key_of(3)] and writer.failed == 2, writer.failed
assert store.damaged == 0
writer.close()
store.close()
print("closed")
""",
        tmp_path,
    )
    assert output.count("WARNING") == 1
    assert f"{name} has been truncated" in output
    assert "closed" in output
    with KVStore(tmp_path / "kv", max_bytes=64 << 20) as store:  # the next process has a store again
        assert put(store, 5)
        assert store.get(key_of(5), LIKE) is not None


def test_a_map_that_cannot_grow_leaves_the_store_unused(tmp_path, caplog, monkeypatch):
    """LMDB gives up the old map before it makes the new one."""
    store = KVStore(tmp_path / "kv", max_bytes=16 << 20)
    assert put(store, 0)

    class NoMemory:
        def __init__(self, env):
            self.env = env

        def set_mapsize(self, size):
            raise lmdb.MemoryError("mdb_env_set_mapsize: Cannot allocate memory")

        def begin(self, **_):
            raise AssertionError("a transaction without a map")

        def close(self):
            raise AssertionError("the map is closed twice")

    store._env.env, whole = NoMemory(store._env.env), store._env.env
    with pytest.raises(lmdb.Error):
        store._env.resize(32 << 20)
    assert store.get(key_of(0), LIKE) is None
    assert not put(store, 1)
    assert not store.damaged
    assert "cannot be mapped" in caplog.text
    store.close()
    whole.close()


def test_refused_system_calls_leave_entries_unstored(tmp_path, caplog, monkeypatch):
    """Read-only file systems, disk errors and a panic of LMDB: one warning, no entry counted as damaged or deleted."""
    store = KVStore(tmp_path / "kv", max_bytes=16 << 20)
    assert put(store, 0)
    writer = StoreWriter(store)
    panic = lmdb.PanicError("panic")
    panic.code = -30795  # as LMDB sets it
    for error in (lmdb.ReadonlyError("ro"), panic, lmdb.DiskError("EIO"), lmdb.ReadersFullError("full")):
        caplog.clear()
        store._warned_at = float("-inf")

        def refuse(*_, _error=error, **__):
            raise _error

        with monkeypatch.context() as patch:
            patch.setattr(Environment, "begin", refuse)
            assert store.get(key_of(0), LIKE) is None
            assert not put(store, 1)
            writer.delete(key_of(0))
            writer.submit(key_of(2), lambda: [np.zeros((64, 1024), np.float32)], tokens=1, kind="chunk")
            assert writer.flush(30)
            assert writer.take_lost() == [key_of(2)]
        assert len(caplog.records) == 1
        assert store.damaged == 0
        assert store.get(key_of(0), LIKE) is not None
    writer.close()
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot use"):
        KVStore(Path(tmp_path) / "kv")
