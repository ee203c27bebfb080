"""`ScoreMemory`: what scoring calls leave for later ones, that is results, cached queries, choices and the engine's rates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import compress
from threading import Lock
from typing import TypeVar

import numpy as np
import xxhash
from jaxtyping import Float32

from chunkattn.calls.algorithms import ScoreInputs
from chunkattn.engine.limits import EngineLimits

_REMEMBERED = 4096
"""Maximum number of queries, and of call shapes, that are remembered."""
_MAX_BYTES = 32 << 20
"""Size limit of the results."""
_ENTRY_BYTES = 256
"""Size of an entry beside its values: key, array header and place in the order."""

T = TypeVar("T")


class ScoreMemory:
    """Memory of one engine's scoring calls. Threads share it, and hold `lock` while they choose an algorithm.

    Args:
        caches: whether results are kept: whether the engine caches prefixes.

    Attributes:
        lock: lock of the queries and choices.
        results: results of earlier calls.
        choices: algorithms chosen before, by the digest of a call's shape.
        rates: the engine's rates, as known now.
    """

    def __init__(self, caches: bool) -> None:
        self.lock = Lock()
        self.results = ResultCache(caches)
        self.choices: OrderedDict[bytes, str] = OrderedDict()
        self._queries: OrderedDict[bytes, int] = OrderedDict()  # tokens of the queries left in the cache

    def connect(self, limits: EngineLimits) -> None:
        """Store the rates and the pool's size of a new engine with an empty cache."""
        self.rates, self._kv_tokens = limits.rates, limits.kv_tokens
        self.forget_cached()

    def forget_cached(self) -> None:
        """Forget the results and the cached queries, after the engine's cache is emptied."""
        self.results.clear()
        with self.lock:
            self._queries.clear()

    def has_query(self, query: bytes) -> bool:
        """Return whether a query is probably in the engine's cache.

        Args:
            query: digest of the query.
        """
        return query in self._queries

    def keep_query(self, query: bytes, tokens: int) -> None:
        """Remember a query that the engine has cached, and forget the oldest ones that the pool cannot hold beside it.

        Args:
            query: digest of the query.
            tokens: number of its tokens.
        """
        with self.lock:
            _remember(self._queries, query, tokens)
            while sum(self._queries.values()) > self._kv_tokens and len(self._queries) > 1:
                self._queries.popitem(last=False)

    def keep_choice(self, shape: bytes, algorithm: str) -> None:
        """Remember the algorithm of a call's shape. The caller holds `lock`."""
        _remember(self.choices, shape, algorithm)


def _remember(known: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def digests(call: ScoreInputs, salt_key: str | None) -> tuple[bytes, bytes]:
    """Return the digests of a query, and of a query with the number and lengths of its items, both with the cache salt.

    The digests omit the items' contents, because the contents of one item must not change the algorithm of other items.
    """
    digest = xxhash.xxh3_128(repr((salt_key, len(call.before))).encode())
    digest.update(call.prefix_ids.tobytes())
    query = digest.digest()
    digest.update(np.asarray([call.item_first, *call.lens], np.int64).tobytes())
    return query, digest.digest()


def item_keys(call: ScoreInputs, algorithm: str, salt_key: str | None, raw: bool = False, *, whole: bool = True) -> list[bytes]:
    """Return a key for each item. Items of equal keys have equal results.

    The key is a cryptographic digest of everything that the bits of the result depend on in one engine, so no chosen text can
    get the result of another text.

    Args:
        call: query, items and labels.
        algorithm: name that the caller asked for, which may be `"auto"`.
        salt_key: digest of the call's cache salt.
        raw: whether logits are read instead of log-probabilities.
        whole: whether the bits of a result depend on all items, which decide the layout, and on the algorithm. Else they depend
            on query, item and the item's labels alone.
    """
    documents = None if call.documents is None else len(call.documents.chunks)
    # Either order makes the same sequences; `auto` may lay them out differently.
    form = (salt_key, (algorithm, call.item_first) if whole else None, raw, len(call.before), documents)
    shared = blake2b(repr(form).encode(), digest_size=32)
    shared.update(call.prefix_ids.tobytes())
    if call.documents is not None:
        for part in (*call.documents.chunks, np.asarray(call.documents.state)):
            shared.update(np.asarray([len(part)], np.int64).tobytes())
            shared.update(np.asarray(part, np.int64).tobytes())
    labels = call.labels or [()] * len(call.items)
    lists = {ids: np.asarray([len(ids), *ids], np.int64).tobytes() for ids in {*labels}}
    items = [lists[ids] + item for item, ids in zip(call.listed.encoded, labels, strict=True)]
    if call.reads:
        items = [np.asarray([-reads], np.int64).tobytes() + item for reads, item in zip(call.reads, items, strict=True)]
    if call.backs:
        items = [np.asarray([-len(b), *b], np.int64).tobytes() + item for b, item in zip(call.backs, items, strict=True)]
    if whole:
        shared.update(np.asarray([len(item) for item in items], np.int64).tobytes())
        shared.update(b"".join(items))
    keys = []
    for item in items:
        digest = shared.copy()
        digest.update(item)
        keys.append(digest.digest())
    return keys


class ResultCache:
    """Results of scored items by key, the least recently used evicted first. Threads may share it.

    Attributes:
        enabled: whether results are kept.
    """

    def __init__(self, enabled: bool, max_bytes: int = _MAX_BYTES) -> None:
        self.enabled, self._max_bytes, self._bytes = enabled, max_bytes, 0
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Float32[np.ndarray, " L"]]:
        """Return the results that are known, by key."""
        with self._lock:
            rows = {key: self._rows[key] for key in keys if key in self._rows}
            for key in rows:
                self._rows.move_to_end(key)
            return rows

    def put(self, key: bytes, row: Float32[np.ndarray, " L"]) -> None:
        """Keep a result, unless it is not finite.

        Args:
            key: key of the item.
            row: log-probabilities or logits of the labels, or class logits.
        """
        self.put_all([key], row[None])

    def put_all(self, keys: Sequence[bytes], values: Float32[np.ndarray, "N L"]) -> list[Float32[np.ndarray, " L"]]:
        """Keep the results of items with as many labels, in order, except those that are not finite.

        Args:
            keys: key of each item.
            values: log-probabilities or logits of the labels, or class logits, of each item.

        Returns:
            The result of each item, an array of its own: a view would keep the whole batch.
        """
        rows = [row.copy() for row in values]
        size = values.shape[1] * values.itemsize + _ENTRY_BYTES
        if not self.enabled or size > self._max_bytes:
            return rows
        finite = np.isfinite(values).all(1)
        with self._lock:
            before = len(self._rows)
            for key, row in zip(compress(keys, finite), compress(rows, finite), strict=True):
                self._rows.setdefault(key, row)
            self._bytes += size * (len(self._rows) - before)
            while self._bytes > self._max_bytes:
                _, old = self._rows.popitem(last=False)
                self._bytes -= old.nbytes + _ENTRY_BYTES
        return rows

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0
