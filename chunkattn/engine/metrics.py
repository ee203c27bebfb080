"""`EngineMetrics`: the engine's metrics in one Prometheus registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chunkattn.engine.messages import CachedTokens

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_PREFIX = "chunkattn_"


class EngineMetrics:
    """Counters, gauges and histograms of one engine. Times are in seconds.

    Attributes:
        registry: registry of all metrics, for `prometheus_client.generate_latest`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[Counter, float] = {}
        self.steps = self._counter("steps", "Engine steps run")
        self.failed_steps = self._counter("failed_steps", "Engine steps that raised an exception")
        self.tokens = self._counter("tokens", "Tokens computed by steps, by kind: prefill, decode or score", "kind")
        self.scored = self._counter("score_rows", "Rows read for scores, by scoring algorithm", "algorithm")
        self.padding = self._counter("padding_rows", "Padding rows computed to fill steps up to a bucket")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests, cached or computed, by part", "part")
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens cached or computed by other requests, by part", "part"
        )
        self.evictions = self._counter("evictions", "Cached blocks evicted to reuse their pages")
        self.preemptions = self._counter("preemptions", "Preemptions of running requests for lack of pages")
        self.compiles = self._counter("compiles", "Programs compiled, by kind of program", "program")
        self.late_compiles = self._counter("compiles_after_warmup", "Programs compiled after the end of the warm-up")
        self.requests = self._counter("requests", "Requests ended, by outcome: finished, failed or aborted", "outcome")
        self.store = self._counter("kv_store_events", "Parts of prompts handled by the KV store, by event", "event")
        self.pages = Gauge(_PREFIX + "pages", "KV pages of the pool, by state", ["state"], registry=self.registry)
        self.queue = Gauge(_PREFIX + "requests_now", "Requests in the engine, by state", ["state"], registry=self.registry)
        self.step_time = self._histogram("step_seconds", "Seconds per engine step")
        self.host_time = self._histogram("step_host_seconds", "Seconds per step for scheduling and metadata on the host")
        self.queue_time = self._histogram("queue_seconds", "Seconds from a request's arrival to its first admission")
        self.first_token = self._histogram("time_to_first_token_seconds", "Seconds from a request's arrival to its first token")
        self.inter_token = self._histogram("inter_token_seconds", "Seconds between consecutive tokens of one sample")
        self.end_to_end = self._histogram("request_seconds", "Seconds from a request's arrival to its end")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=_SECONDS, registry=self.registry)

    def count_cached(self, cached: CachedTokens, totals: CachedTokens) -> None:
        """Add the prompt tokens of a request to the counters.

        Args:
            cached: prompt tokens that the request did not compute.
            totals: all prompt tokens.
        """
        for counter, tokens in ((self.prompt_tokens, totals), (self.cached_tokens, cached)):
            counter.labels("prefix").inc(tokens.prefix)
            counter.labels("chunk").inc(sum(tokens.chunks))
            counter.labels("question").inc(tokens.question)

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 if it was never set.

        Args:
            name: sample name without the common prefix, such as `"tokens_total"`.
            **labels: values of the metric's labels, such as `kind="decode"`.
        """
        return self.registry.get_sample_value(_PREFIX + name, labels) or 0.0

    def raise_to(self, counter: Counter, total: float) -> None:
        """Raise a counter to a total that another object keeps.

        Args:
            counter: counter to raise.
            total: new total, at least the previous total.
        """
        counter.inc(total - self._totals.get(counter, 0.0))
        self._totals[counter] = total
