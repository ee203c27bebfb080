"""`EngineGauges`: metrics of the engine that the server knows without asking it."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import generate_latest

from chunkattn.described_metrics import DescribedMetrics


class _Client(Protocol):
    @property
    def unresponsive_s(self) -> float: ...
    @property
    def compiling_s(self) -> float: ...


class EngineGauges(DescribedMetrics):
    """Gauges of an engine that may be too busy to answer, in a Prometheus registry of their own. Times are in seconds.

    Metrics:
        metrics_age_seconds: age of the engine's metrics in this answer; above 0 while the engine is busy.
        compiling_seconds: time for which the engine compiles a program at this moment.
        unresponsive_seconds: time for which the engine has not answered, compilations apart.
    """

    def __init__(self) -> None:
        super().__init__("chunkattn_engine_")
        self._age = self.gauge("metrics_age_seconds")
        self._compiling = self.gauge("compiling_seconds")
        self._unresponsive = self.gauge("unresponsive_seconds")

    def text(self, client: _Client, age_s: float) -> str:
        """Return the gauges in Prometheus's text format.

        Args:
            client: client of the engine.
            age_s: age of the engine's metrics in seconds.
        """
        self._age.set(age_s)
        self._compiling.set(client.compiling_s)
        self._unresponsive.set(client.unresponsive_s)
        return generate_latest(self.registry).decode()
