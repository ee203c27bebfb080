"""`ResultCache`: the results of scored items, so that an equal call is not computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock

import numpy as np
from jaxtyping import Float32

from chunkattn.calls.algorithms import QueryItems

_MAX_BYTES = 32 << 20
"""Size limit of the results."""
_ENTRY_BYTES = 256
"""Size of an entry beside its values: key, array header and place in the order."""


def item_keys(
    job: QueryItems, labels: Sequence[int], algorithm: str, cache_salt: str | None, raw: bool = False, *, whole: bool = True
) -> list[bytes]:
    """Return a key for each item. Items of equal keys have equal results.

    The key is a cryptographic digest of everything that the bits of the result depend on in one engine, so no chosen text can
    get the result of another text.

    Args:
        job: query and items.
        labels: token ids to read.
        algorithm: name that the caller asked for, which may be `"auto"`.
        cache_salt: cache salt of the call.
        raw: whether logits are read instead of log-probabilities.
        whole: whether the bits of a result depend on all items, which decide the layout, and on the algorithm. Else they depend
            on query and item alone.
    """
    form = (cache_salt, algorithm if whole else None, raw, job.item_first, list(labels), len(job.leading), len(job.query))
    shared = blake2b(repr(form).encode(), digest_size=32)
    shared.update(np.asarray(job.prefix, np.int64).tobytes())
    items = [np.asarray(item, np.int64).tobytes() for item in job.items]
    if whole:
        shared.update(np.asarray([len(item) for item in items], np.int64).tobytes())
        for item in items:
            shared.update(item)
    keys = []
    for item in items:
        own = shared.copy()
        own.update(item)
        keys.append(own.digest())
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
            found = {key: self._rows[key] for key in keys if key in self._rows}
            for key in found:
                self._rows.move_to_end(key)
            return found

    def put(self, key: bytes, row: Float32[np.ndarray, " L"]) -> None:
        """Keep a result, unless it is not finite.

        Args:
            key: key of the item.
            row: log-probabilities or logits of the labels, or class logits.
        """
        size = row.nbytes + _ENTRY_BYTES
        if not self.enabled or size > self._max_bytes or not np.isfinite(row).all():
            return
        with self._lock:
            if key not in self._rows:
                self._rows[key] = row.copy()  # a view would keep its whole batch
                self._bytes += size
            while self._bytes > self._max_bytes:
                _, old = self._rows.popitem(last=False)
                self._bytes -= old.nbytes + _ENTRY_BYTES

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._rows.clear()
            self._bytes = 0
