"""`EngineGauges`: metrics of the engine that the server knows without asking it."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge, generate_latest


class _Client(Protocol):
    @property
    def unresponsive_s(self) -> float: ...
    @property
    def compiling_s(self) -> float: ...


class EngineGauges:
    """Gauges of an engine that may be too busy to answer, in a Prometheus registry of their own. Times are in seconds.

    Attributes:
        registry: the Prometheus registry.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"chunkattn_engine_{name}_seconds", text, registry=self.registry)

        self._age = gauge("metrics_age", "Age of the engine's metrics in this answer; above 0 while the engine is busy")
        self._compiling = gauge("compiling", "Time for which the engine compiles a program at this moment")
        self._unresponsive = gauge("unresponsive", "Time for which the engine has not answered, compilations apart")

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
