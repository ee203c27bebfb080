"""`CacheReports`: the pieces that a server was sent, which gateways read to know what its KV cache holds."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chunkattn.schema.piece_keys import Keys

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM

_MOST_PIECES = 1 << 16


class CacheReports:
    """Log of the pieces of all requests, the least recently sent first; a piece has one place in it.

    The engine evicts in this order, so a gateway that knows the log and the capacity knows what the cache holds.

    Args:
        llm: engine whose cache is reported.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._started, self._restarts = time.time_ns(), llm.client.restarts
        self._version = 0
        self._pieces: OrderedDict[int, tuple[int, int]] = OrderedDict()  # size and version by key

    @contextmanager
    def sent(self, keys: Keys) -> Iterator[None]:
        """Log the pieces of a request, and take them back if the `with` statement raises: the request is refused.

        Args:
            keys: keys of the request.
        """
        for key, size in reversed(keys.pieces):  # engines evict what comes last first
            self._version += 1
            self._pieces[key] = size, self._version
            self._pieces.move_to_end(key)
        while len(self._pieces) > _MOST_PIECES:
            self._pieces.popitem(last=False)
        try:
            yield
        except BaseException:
            for key, _ in keys.pieces:
                self._pieces.pop(key, None)
            raise

    def report(self, since: int = 0) -> dict[str, Any]:
        """Return generation, capacity in tokens and the pieces sent; see `chunkattn.gateway.replicas.Report`.

        Args:
            since: version of an earlier report, after which the pieces were sent; 0, or a version of another log, returns all.
        """
        if self._restarts != self._llm.client.restarts:
            self._restarts = self._llm.client.restarts
            self._pieces.clear()
        held = []
        for key, (size, version) in reversed(self._pieces.items()):
            if version <= since <= self._version:
                break
            held.append([key, size])
        limits = self._llm.client.limits
        return {
            "object": "cache.report",
            "generation": f"{self._started:x}-{self._restarts}",
            "capacity": None if limits is None else limits.kv_tokens,
            "version": self._version,
            "held": held[::-1],
            "adapters": list(self._llm.config.lora_names),
            "decide_method": self._llm.decide_method,
        }
