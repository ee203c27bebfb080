"""`ReplicaMetrics`: the metrics of all replicas, of one that does not answer in time the last known ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chunkattn.gateway.replicas import ReplicaGoneError, Replicas

_WAIT_S = 0.15
"""Seconds to wait for the metrics of now."""


class ReplicaMetrics:
    """Reader of the replicas' metrics. A replica that is slow to answer delays no other and not the gateway.

    Args:
        replicas: connection to the replicas.
        timeout_s: seconds after which a replica is asked again.
    """

    def __init__(self, replicas: Replicas, timeout_s: float) -> None:
        self._replicas, self._timeout_s = replicas, timeout_s
        self._texts: dict[str, str] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the metrics in Prometheus's text format by replica; an empty text where none is known.

        Args:
            names: names of the replicas.
        """
        for name in self._texts.keys() - set(names):
            del self._texts[name]
        for name in names:
            if name not in self._reading:
                self._reading[name] = asyncio.create_task(self._read(name))
        if awaited := {self._reading[name] for name in names}:
            await asyncio.wait(awaited, timeout=_WAIT_S)
        return {name: self._texts.get(name, "") for name in names}

    async def close(self) -> None:
        """Stop to read."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._texts[name] = await self._replicas.metrics(name)
        except ReplicaGoneError:
            self._texts.pop(name, None)
        except TimeoutError:
            pass  # the last ones stay
        finally:
            self._reading.pop(name, None)
