"""Puts, reads and removes random entries until it is killed: `python -m tests.store_writer FOLDER --seed N [--max-bytes B]`.

An entry's content follows from its key, so anyone can check it. Exits with an error when a read is wrong.
"""

import argparse
import logging

import numpy as np

from chunkattn.cache.disk.store import KVStore, entry_key

DTYPES = [np.dtype(name) for name in ("uint16", "float32", "uint8")]


def name(number: int) -> bytes:
    """The key of entry `number`."""
    return entry_key(b"a model", None, np.arange(number), None, 0)


def like(key: bytes, most: int = 600_000) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Shapes and dtypes of an entry, each array of at most `most` elements; one entry in twenty has longer ones."""
    rng = np.random.default_rng(int.from_bytes(key))
    if rng.random() < 0.95:
        most //= 10
    return [((int(rng.integers(0, most // 10)), 10), DTYPES[rng.integers(3)]) for _ in range(rng.integers(1, 6))]


def contents(key: bytes) -> list[np.ndarray]:
    """An entry's arrays: bytes drawn by its key."""
    rng = np.random.default_rng(int.from_bytes(key[::-1]))
    made = []
    for shape, dtype in like(key):
        count = int(np.prod(shape))
        made.append(np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape))
    return made


def same(got: list[np.ndarray], key: bytes) -> bool:
    """Return whether these are the entry's arrays, bit for bit."""
    return [(a.shape, a.dtype, a.tobytes()) for a in got] == [(a.shape, a.dtype, a.tobytes()) for a in contents(key)]


def main() -> None:
    """Work until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, default=32 << 20)
    args = parser.parse_args()
    logging.disable()
    rng = np.random.default_rng(args.seed)
    store = KVStore(args.folder, max_bytes=args.max_bytes)
    while True:
        key, choice = name(int(rng.integers(300))), rng.random()
        if choice < 0.6:
            store.put(key, contents(key), tokens=7, kind="chunk")
        elif choice < 0.9:
            got = store.get(key, like(key))
            assert got is None or same(got, key), key.hex()
            store.touch([key])
        else:
            store.delete(key)
        assert not store.damaged


if __name__ == "__main__":
    main()
