"""Statistics of the connector, from scheduler and workers to vLLM's Prometheus output."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "loads": "Requests whose K/V was loaded from the store.",
    "loaded_segments": "Prefixes and chunks loaded from the store.",
    "hit_segments": "Loaded prefixes and chunks that were not computed for the prompt that loads them.",
    "loaded_bytes": "K/V bytes loaded from the store, over all ranks.",
    "load_seconds": "Time to read, rotate and write loaded K/V, summed over ranks.",
    "saved_segments": "Prefixes and chunks saved to the store.",
    "saved_bytes": "K/V bytes saved to the store, over all ranks.",
    "save_seconds": "Time to copy saved K/V, summed over ranks.",
    "evicted_segments": "Prefixes and chunks evicted from the store.",
    "evicted_bytes": "K/V bytes evicted from the store, over all ranks.",
    "waits": "Scheduling attempts put off because a queued request computes the K/V.",
}
GAUGES = {
    "stored_segments": "Prefixes and chunks in the store.",
    "stored_bytes": "K/V bytes in the store, over all ranks.",
}
REFUSAL_REASONS = ("malformed", "unsupported", "missing")


class ConnectorStats(KVConnectorStats):
    """Counts since the last report. Its data is a flat mapping from names to numbers."""

    def count(self, **amounts: float) -> None:
        """Add to counters, by name."""
        for name, amount in amounts.items():
            if amount:
                self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: int) -> None:
        """Set a gauge."""
        self.data[name] = value

    def take(self) -> ConnectorStats | None:
        """Return the counts and forget them; None if nothing was counted."""
        taken = None if self.is_empty() else ConnectorStats(data=dict(self.data))
        self.reset()
        return taken

    def reset(self) -> None:
        """Forget all counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's counters and take its gauges."""
        for name, value in other.data.items():
            if name in GAUGES:
                self.gauge(name, value)
            else:
                self.count(**{name: value})
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for vLLM's periodic log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics `vllm:chunkattn_*`, one series per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]

        def per_engine(metric: Any, *labels: object) -> dict[int, Any]:
            values = {engine: [*values, *labels] for engine, values in per_engine_labelvalues.items()}
            return create_metric_per_engine(metric, values)

        self._metrics = {
            name: per_engine(kind(f"vllm:chunkattn_{name}", text, labelnames=labelnames))
            for kind, texts in ((counter, COUNTERS), (gauge, GAUGES))
            for name, text in texts.items()
        }
        refused = counter("vllm:chunkattn_refused_requests", "Requests refused, by reason.", labelnames=[*labelnames, "reason"])
        self._metrics |= {f"refused_{reason}": per_engine(refused, reason) for reason in REFUSAL_REASONS}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report of an engine."""
        for name, value in transfer_stats_data.items():
            if name in self._metrics:
                metric = self._metrics[name][engine_idx]
                (metric.set if name in GAUGES else metric.inc)(value)
