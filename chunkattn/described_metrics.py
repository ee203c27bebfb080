"""`DescribedMetrics`: Prometheus metrics described by the docstring of their class."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chunkattn.options import as_help, descriptions


class ManyHistogram(Histogram):
    """Histogram that observes an amount several times at the cost of one observation."""

    def observe_many(self, amount: float, count: int) -> None:
        """Observe `amount` `count` times."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class DescribedMetrics:
    """Metrics in one Prometheus registry. An entry in the docstring of the class describes each.

    Args:
        prefix: prefix of all names.
        buckets: buckets of the histograms.
        registry: registry of the metrics; None makes a new one.
    """

    def __init__(self, prefix: str, buckets: Sequence[float] = (), registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._prefix, self._buckets, self._texts = prefix, buckets, descriptions(type(self))

    def counter(self, name: str, *labels: str) -> Counter:
        """Return a new counter."""
        return Counter(self._prefix + name, self._help(name), labels, registry=self.registry)

    def gauge(self, name: str, *labels: str) -> Gauge:
        """Return a new gauge."""
        return Gauge(self._prefix + name, self._help(name), labels, registry=self.registry)

    def histogram(self, name: str, *labels: str) -> ManyHistogram:
        """Return a new histogram."""
        return ManyHistogram(self._prefix + name, self._help(name), labels, buckets=self._buckets, registry=self.registry)

    def _help(self, name: str) -> str:
        return as_help(self._texts[name]).removesuffix(".")
