"""The store on disk: what is read is what was written, or nothing, whatever happens to the file or the process."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lmdb
import lmdb.verify
import numpy as np
import pytest
from ml_dtypes import bfloat16

from chunkattn.cache.disk.store import SEGMENT, KVStore, entry_key, model_tag
from chunkattn.cache.disk.writer import StoreWriter
from chunkattn.errors import ConfigError
from tests.patience import PATIENCE_S
from tests.store_writer import contents, like, name, same

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def fill(store, numbers):
    for number in numbers:
        assert store.put(name(number), contents(name(number)), tokens=number, kind="chunk")


def check(store):
    """Every entry is right; how many there are."""
    entries = store.entries()
    for entry in entries:
        got = store.get(entry.key, like(entry.key))
        assert got is not None, f"entry {entry.key.hex()} is lost"
        assert same(got, entry.key), f"entry {entry.key.hex()} is wrong"
    assert not store.damaged
    return len(entries)


def on_disk(folder):
    return os.stat(folder / "data.mdb").st_blocks * 512


def test_keys_tell_everything_apart():
    ids = np.arange(5)
    made = [
        entry_key(b"m", None, ids, None, 0),
        entry_key(b"m", "", ids, None, 0),
        entry_key(b"m", "s", ids, None, 0),
        entry_key(b"n", None, ids, None, 0),
        entry_key(b"m", None, ids, ids[:0], 0),
        entry_key(b"m", None, ids[:3], ids[3:], 0),
        entry_key(b"m", None, ids[:2], ids[2:], 0),
        entry_key(b"m", None, ids, None, 1),
    ]
    assert len(set(made)) == len(made)
    assert {len(key) for key in made} == {32}
    assert entry_key(b"m", None, ids.astype(np.int32), None, 0) == made[0]
    assert [key[:8] == model_tag(b"m") for key in made] == [True] * 3 + [False] + [True] * 4


def test_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 1 << 16, (3, 5, 7), np.uint16),
        rng.standard_normal((SEGMENT // 2, 3)).astype(np.float32),
        np.zeros((0, 4), np.uint8),
        rng.integers(0, 255, (SEGMENT,), np.uint8),
        rng.integers(0, 255, (SEGMENT + 1,), np.uint8)[::-1],
        rng.standard_normal((4, 6)).astype(bfloat16).T,
        np.array(3.5),
    ]
    shapes = [(a.shape, a.dtype) for a in arrays]
    with KVStore(tmp_path, max_bytes=64 * MIB) as store:
        assert store.get(name(1), shapes) is None
        assert not store.contains(name(1))
        before = time.time()
        assert store.put(name(1), arrays, tokens=12, kind="prefix")
        assert store.put(name(2), [], tokens=0, kind="chunk")
    with KVStore(tmp_path, max_bytes=64 * MIB, create=False) as store:
        assert store.contains(name(1))
        got = store.get(name(1), shapes)
        assert [(a.shape, a.dtype) for a in got] == shapes
        assert all(a.tobytes() == b.tobytes() and a.flags.writeable for a, b in zip(got, arrays))
        assert store.get(name(2), []) == []
        first, second = sorted(store.entries(), key=lambda entry: entry.kind, reverse=True)
        assert (first.key, first.kind, first.tokens) == (name(1), "prefix", 12)
        assert first.model == second.model == model_tag(b"a model").hex()
        assert first.num_bytes == sum(a.nbytes for a in arrays)
        assert before <= first.created <= first.last_used <= time.time()
        assert first.num_bytes < store.num_bytes < first.num_bytes + MIB
        assert store.put(name(1), arrays[:1], tokens=3, kind="prefix")  # in place of it
        assert store.num_bytes < MIB
        assert store.delete(name(1))
        assert not store.delete(name(1))
        assert store.get(name(1), shapes) is None
        assert not store.damaged
    assert lmdb.verify.verify(str(tmp_path)) == []


@pytest.mark.parametrize(
    "other",
    [
        [((4, 3), np.dtype("uint16"))],
        [((3, 4), np.dtype("int16"))],
        [((3, 4), np.dtype(bfloat16))],
        [((3, 4), np.dtype("uint16"))] * 2,
        [],
    ],
)
def test_another_shape_or_dtype_is_a_miss(tmp_path, other, caplog):
    with KVStore(tmp_path, max_bytes=8 * MIB) as store:
        store.put(name(1), [np.zeros((3, 4), np.uint16)], tokens=3, kind="chunk")
        assert store.get(name(1), other) is None
        assert store.damaged == 1
        assert name(1).hex() in caplog.text
        assert not store.contains(name(1))


def damage_in_place(store, db, key, change):
    with store._env.begin(write=True) as txn:
        where = getattr(store._env, db)
        value = bytearray(txn.get(key, db=where))
        txn.delete(key, db=where)
        if (value := change(value)) is not None:
            txn.put(key, bytes(value), db=where)


def flip(value):
    value[len(value) // 2] ^= 4
    return value


@pytest.mark.parametrize(
    ("db", "suffix", "change", "reason"),
    [
        ("meta", b"", flip, "checksum"),
        ("meta", b"", lambda value: value[:9], "checksum"),
        ("meta", b"", lambda value: b"", "checksum"),
        ("data", b"\0\0\0\0", flip, "checksum"),
        ("data", b"\0\0\0\1", lambda value: value[:-1], "bytes"),
        ("data", b"\0\0\0\1", lambda value: value + b"\0", "bytes"),
        ("data", b"\0\0\0\1", lambda value: None, "missing"),
    ],
)
def test_damage_is_a_miss(tmp_path, caplog, db, suffix, change, reason):
    arrays = [np.ones(SEGMENT + 100, np.uint8)]
    shapes = [(a.shape, a.dtype) for a in arrays]
    with KVStore(tmp_path, max_bytes=8 * MIB) as store:
        store.put(name(1), arrays, tokens=3, kind="chunk")
        store.put(name(2), arrays, tokens=3, kind="chunk")
        damage_in_place(store, db, name(1) + suffix, change)
        assert store.get(name(1), shapes) is None
        assert store.damaged == 1
        assert reason in caplog.text
        assert [entry.key for entry in store.entries()] == [name(2)]
        with store._env.begin() as txn:
            assert {bytes(key)[:32] for key, _ in txn.cursor(store._env.data)} == {name(2)}
        assert store.get(name(2), shapes)[0].tobytes() == arrays[0].tobytes()


def tree_pages(path):
    """Offsets of the pages that are not the inside of a value: flips there are the dangerous ones."""
    blob, at, found = path.read_bytes(), 0, []
    while at < len(blob):
        found.append(at)
        flags, pages = int.from_bytes(blob[at + 10 : at + 12], "little"), int.from_bytes(blob[at + 12 : at + 16], "little")
        at += 4096 * (pages if flags == 4 else 1)
    return found


@pytest.mark.parametrize("where", ["anywhere", "tree"])
def test_flipped_bits_never_reach_a_reader(tmp_path, where):
    with KVStore(tmp_path, max_bytes=16 * MIB) as store:
        fill(store, range(1, 25))
    data = tmp_path / "data.mdb"
    sound, pages = data.read_bytes(), tree_pages(data)
    missed = right = 0
    for seed in range(30):
        rng = random.Random(seed)
        blob = bytearray(sound)
        for _ in range(rng.choice([1, 1, 20])):
            at = rng.randrange(len(blob)) if where == "anywhere" else rng.choice(pages) + rng.randrange(4096)
            blob[at] ^= 1 << rng.randrange(8)
        data.write_bytes(blob)
        with KVStore(tmp_path, max_bytes=16 * MIB) as store:
            for number in range(1, 25):
                got = store.get(name(number), like(name(number)))
                assert got is None or same(got, name(number))
                missed, right = missed + (got is None), right + (got is not None)
            fill(store, [30])
            assert store.get(name(30), like(name(30))) is not None
    assert missed
    assert right


@pytest.mark.parametrize("what", ["garbage", "zeros", "half", "a page less", "header", "a byte", "empty", "lock"])
def test_a_spoilt_file_does_not_prevent_a_start(tmp_path, what, caplog):
    with KVStore(tmp_path, max_bytes=16 * MIB) as store:
        fill(store, range(1, 9))
    data = tmp_path / "data.mdb"
    blob = data.read_bytes()
    (tmp_path / "lock.mdb" if what == "lock" else data).write_bytes(
        {
            "garbage": np.random.default_rng(0).bytes(len(blob)),
            "zeros": bytes(len(blob)),
            "half": blob[: len(blob) // 2],
            "a page less": blob[:-4096],
            "header": blob[:100],
            "a byte": blob[:1],
            "empty": b"",
            "lock": np.random.default_rng(0).bytes(8192),
        }[what]
    )
    kept = []
    for _ in range(2):
        with KVStore(tmp_path, max_bytes=16 * MIB) as store:
            for number in range(1, 9):
                got = store.get(name(number), like(name(number)))
                assert got is None or same(got, name(number))
                kept.append(got is not None)
            fill(store, [9])
        with KVStore(tmp_path, max_bytes=16 * MIB) as store:
            assert check(store)
    aside = list(tmp_path.glob("data.mdb.damaged-*"))
    assert ("starts empty" in caplog.text) == bool(aside)
    assert len(aside) == 1 or what in ("half", "a page less", "empty", "lock")
    assert sum(kept[:8]) == {"lock": 8, "a page less": 7}.get(what, sum(kept[:8]) if what == "half" else 0)


def test_the_bound_holds_and_the_recently_used_stay(tmp_path):
    limit, favourites = 24 * MIB, [301, 302]
    with KVStore(tmp_path, max_bytes=limit) as store:
        fill(store, favourites)
        for number in range(1, 200):
            fill(store, [number])
            store.touch(map(name, favourites))
            assert on_disk(tmp_path) <= limit
            assert store.num_bytes <= 0.91 * limit
        left = {entry.key for entry in store.entries()}
        assert {*map(name, favourites), name(199), name(198)} <= left
        assert name(5) not in left
        assert store.num_bytes > limit / 2
        check(store)
    assert lmdb.verify.verify(str(tmp_path)) == []


@pytest.mark.parametrize("share", [0.04, 0.2, 0.45, 0.8])
def test_large_entries_replace_each_other(tmp_path, share):
    limit = 16 * MIB
    with KVStore(tmp_path, max_bytes=limit) as store:
        for number in range(int(4 / share)):
            array = np.full(int(share * limit), number % 251, np.uint8)
            assert store.put(name(number), [array], tokens=1, kind="prefix")
            assert store.get(name(number), [(array.shape, array.dtype)])[0].tobytes() == array.tobytes()
            assert on_disk(tmp_path) <= limit
        assert store.num_bytes > limit * min(0.4, share)


def test_a_reader_that_never_ends(tmp_path):
    """While it lives, no page it might look at is reused; killed, it is found out."""
    limit = 8 * MIB
    with KVStore(tmp_path, max_bytes=limit) as store:
        fill(store, range(1, 12))
        code = (
            "import sys; from chunkattn.cache.disk.store import KVStore; store = KVStore(sys.argv[1], max_bytes=8 << 20)\n"
            "txn = store._env.env.begin(); print('reading', flush=True); sys.stdin.read()"
        )
        pipe = subprocess.PIPE
        reader = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=pipe, stdout=pipe)
        try:
            assert reader.stdout.readline() == b"reading\n"
            store._env.env.set_mapsize(1)  # that is, to the last page in use
            assert store.delete(name(11))
            fill(store, [12])
            assert check(store) == 11
            put = [store.put(name(n), [np.full(3 * MIB, n, np.uint8)], tokens=1, kind="chunk") for n in range(20, 23)]
            assert not all(put)
        finally:
            reader.kill()
            reader.communicate()
        for n in range(30, 40):
            assert store.put(name(n), [np.full(MIB, n, np.uint8)], tokens=1, kind="chunk")
        assert on_disk(tmp_path) <= limit


def test_an_entry_larger_than_the_store_is_refused(tmp_path):
    with KVStore(tmp_path, max_bytes=4 * MIB) as store:
        fill(store, [1])
        assert not store.put(name(2), [np.zeros(4 * MIB, np.uint8)], tokens=1, kind="chunk")
        assert check(store) == 1


def test_gc_and_clear(tmp_path, monkeypatch):
    with KVStore(tmp_path, max_bytes=16 * MIB) as store:
        now = time.time()
        arrays = [np.zeros(1000, np.uint8)]
        keys = [entry_key(model, None, np.arange(3), None, place) for model in (b"a", b"b") for place in range(4)]
        for age, key in enumerate(keys):
            monkeypatch.setattr(time, "time", lambda age=age: now - 100 + 10 * age)
            store.put(key, arrays, tokens=1, kind="chunk")
        monkeypatch.setattr(time, "time", lambda: now)
        store.touch([keys[0], name(77)])

        def left():
            return {entry.key for entry in store.entries()}

        assert store.gc() == 0
        assert store.gc(max_age_s=75) == 2
        assert left() == {keys[0], *keys[3:]}
        assert store.gc(max_bytes=1000, model=model_tag(b"b").hex()) == 3
        assert left() == {keys[0], keys[3], keys[7]}
        assert store.gc(model=model_tag(b"b").hex()) == 1
        assert store.gc(max_bytes=1000) == 1
        assert left() == {keys[0]}
        store.clear()
        assert not left()
        assert store.put(keys[1], arrays, tokens=1, kind="chunk")


def test_places_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot use"):
        KVStore(tmp_path / "file")
    with pytest.raises(ConfigError, match="no KV store"):
        KVStore(tmp_path / "absent", create=False)
    with pytest.raises(ConfigError, match="at least"):
        KVStore(tmp_path / "small", max_bytes=1000)
    env = lmdb.open(str(tmp_path / "theirs"))
    with env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    env.close()
    with pytest.raises(ConfigError, match="no KV store of"):
        KVStore(tmp_path / "theirs")
    with lmdb.open(str(tmp_path / "theirs")) as env, env.begin() as txn:
        assert txn.get(b"k") == b"v"
    store = KVStore(tmp_path / "good")
    store.close()
    store.close()
    with pytest.raises(ConfigError, match="closed"):
        store.get(name(1), [])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot use"):
        KVStore(tmp_path)
    tmp_path.chmod(0o700)


def test_two_handles_of_one_process_share_the_environment(tmp_path):
    one = KVStore(tmp_path, max_bytes=4 * MIB)
    two = KVStore(tmp_path / ".." / tmp_path.name, max_bytes=32 * MIB)
    fill(one, [1])
    assert check(two) == 1
    fill(two, range(2, 60))
    assert two.num_bytes > 5 * MIB
    one.close()
    check(two)
    del one, two  # unclosed: given up with the last reference
    with KVStore(tmp_path, max_bytes=32 * MIB) as store:
        assert check(store)


def test_threads_read_while_one_writes(tmp_path, caplog):
    stop, wrong = threading.Event(), []

    def read(store, seed):
        rng = random.Random(seed)
        while not stop.is_set():
            key = name(rng.randrange(1, 80))
            got = store.get(key, like(key))
            if got is not None and not same(got, key):
                wrong.append(key)

    with KVStore(tmp_path, max_bytes=8 * MIB) as store:
        threads = [threading.Thread(target=read, args=(store, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        try:
            fill(store, range(1, 80))
            for size in range(800):
                store._env.resize(8 * MIB + 4096 * size)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert not store.damaged
        assert not caplog.text


def start(folder, seed, max_bytes=24 * MIB):
    command = [sys.executable, "-m", "tests.store_writer", str(folder), "--seed", str(seed), "--max-bytes", str(max_bytes)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def wait_for_a_write(folder, before):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        data = folder / "data.mdb"
        if data.exists() and data.stat().st_mtime_ns > before:
            return
        time.sleep(0.002)
    raise AssertionError("the writer wrote nothing")


def test_processes_with_different_bounds(tmp_path):
    sizes = [16 * MIB, 32 * MIB]
    writers = [start(tmp_path, seed, size) for seed, size in enumerate(sizes)]
    try:
        wait_for_a_write(tmp_path, 0)
        with KVStore(tmp_path, max_bytes=24 * MIB) as store:
            end, rng, seen = time.monotonic() + 2, random.Random(0), 0
            while time.monotonic() < end:
                key = name(rng.randrange(300))
                got = store.get(key, like(key))
                assert got is None or same(got, key)
                seen += got is not None
                if rng.random() < 0.2:
                    store.put(key, contents(key), tokens=1, kind="chunk")
                assert on_disk(tmp_path) <= max(sizes)
            assert seen
            assert not store.damaged
            assert [writer.poll() for writer in writers] == [None, None], "a writer read something wrong"
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert lmdb.verify.verify(str(tmp_path)) == []


def put_or_wait(store, number):
    if store.put(name(number), contents(name(number)), tokens=number, kind="chunk"):
        return True
    time.sleep(0.5)
    return False


def kill_many_times(folder, times):
    """Two writers, of which the older is killed at a random moment; once all is quiet and once under the other's eyes."""
    rng, found = random.Random(times), 0
    for turn in range(times):
        before = time.time_ns()
        writers = [start(folder, 2 * turn), *([start(folder, 2 * turn + 1)] if turn % 3 == 2 else [])]
        try:
            wait_for_a_write(folder, before)
            time.sleep(rng.random() * 0.15)
            writers[0].send_signal(signal.SIGKILL)
            writers[0].wait()
            if len(writers) == 2:  # the other goes on with the lock of the dead
                with KVStore(folder, max_bytes=24 * MIB) as store:
                    # A put may be refused while the other, starved of CPU, still looks at the pages it needs.
                    assert any(put_or_wait(store, turn) for _ in range(20))
                    assert writers[1].poll() is None
        finally:
            for writer in writers:
                writer.kill()
                assert writer.wait() == -signal.SIGKILL
        assert lmdb.verify.verify(str(folder)) == []
        with KVStore(folder, max_bytes=24 * MIB) as store:
            found = max(found, check(store))
            assert on_disk(folder) <= 24 * MIB
    assert found > 10
    assert not list(folder.glob("*.damaged-*"))


@pytest.mark.ci
def test_killed_writers_leave_a_sound_store(tmp_path):
    kill_many_times(tmp_path, 10)


@pytest.mark.slow
def test_200_killed_writers_leave_a_sound_store(tmp_path):
    kill_many_times(tmp_path, 200)


@pytest.fixture
def store(tmp_path):
    with KVStore(tmp_path, max_bytes=16 * MIB) as store:
        yield store


def test_the_writer_writes_behind(store):
    writer, fetched = StoreWriter(store), []

    def fetch(number):
        fetched.append(number)
        return contents(name(number))

    for number in [1, 2, 3, 2]:
        assert writer.submit(name(number), lambda number=number: fetch(number), tokens=number, kind="chunk")
    assert writer.flush(10)
    assert writer.submit(name(3), lambda: fetch(3), tokens=3, kind="chunk")
    used = {entry.key: entry.last_used for entry in store.entries()}
    writer.touch(name(1))
    assert writer.flush(10)
    assert sorted(fetched) == [1, 2, 3]
    assert check(store) == 3
    assert {entry.key for entry in store.entries() if entry.last_used > used[entry.key]} == {name(1), name(3)}
    assert (writer.written, writer.dropped, writer.failed) == (3, 0, 0)
    writer.close(10)
    writer.close(10)
    assert not writer._thread.is_alive()
    assert not writer.submit(name(4), lambda: fetch(4), tokens=4, kind="chunk")


def test_touches_go_in_batches_unasked(store, monkeypatch):
    fill(store, [1, 2])
    calls = []
    monkeypatch.setattr(StoreWriter, "touch_interval_s", 0.05)
    monkeypatch.setattr(store, "touch", lambda keys: calls.append(set(keys)))
    writer = StoreWriter(store)
    for _ in range(100):
        writer.touch(name(1))
        writer.touch(name(2))
    deadline = time.monotonic() + 10
    while not calls and time.monotonic() < deadline:
        time.sleep(0.01)
    writer.close(10)
    assert set().union(*calls) == {name(1), name(2)}
    assert len(calls) < 10


def test_a_full_queue_drops(store):
    writer, hold, begun = StoreWriter(store, max_pending=2), threading.Event(), threading.Event()

    def fetch():
        begun.set()
        hold.wait(10)
        return contents(name(1))

    assert writer.submit(name(1), fetch, tokens=1, kind="chunk")
    assert begun.wait(10)
    accepted = [writer.submit(name(n), lambda n=n: contents(name(n)), tokens=1, kind="chunk") for n in (2, 3, 4)]
    assert accepted == [True, True, False]
    assert not writer.flush(0.05)
    writer.close(0.05)
    assert writer.dropped == 3
    hold.set()
    writer._thread.join(PATIENCE_S)
    assert not writer._thread.is_alive()
    assert (check(store), writer.written) == (1, 1)


def test_errors_do_not_kill_the_writer(store, caplog):
    writer = StoreWriter(store)
    writer.submit(name(1), lambda: 1 / 0, tokens=1, kind="chunk")
    writer.submit(name(2), lambda: [np.zeros(20 * MIB, np.uint8)], tokens=1, kind="chunk")
    writer.submit(name(3), lambda: contents(name(3)), tokens=1, kind="chunk")
    writer.close(10)
    assert (writer.written, writer.dropped, writer.failed) == (1, 0, 2)
    assert "ZeroDivisionError" in caplog.text
    assert check(store) == 1


def test_an_unclosed_writer_does_not_hold_up_the_exit(tmp_path):
    code = (
        "import sys; from chunkattn.cache.disk.store import KVStore\n"
        "from chunkattn.cache.disk.writer import StoreWriter\n"
        "from tests.store_writer import name, contents\n"
        "writer = StoreWriter(KVStore(sys.argv[1], max_bytes=16 << 20))\n"
        "for n in range(20): writer.submit(name(n), lambda n=n: contents(name(n)), tokens=n, kind='chunk')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT, timeout=PATIENCE_S)
    with KVStore(tmp_path, max_bytes=16 * MIB) as store:
        assert check(store) == 20
