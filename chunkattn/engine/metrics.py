"""What the engine counts, in one Prometheus registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chunkattn.engine.messages import CachedTokens

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_PREFIX = "chunkattn_"


class EngineMetrics:
    """Counters, gauges and histograms of one engine. Times are in seconds.

    Attributes:
        registry: for `prometheus_client.generate_latest`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[Counter, float] = {}
        self.steps = self._counter("steps", "Steps run")
        self.failed_steps = self._counter("failed_steps", "Steps that raised")
        self.tokens = self._counter("tokens", "Tokens computed", "kind")
        self.scored = self._counter("score_rows", "Rows read for scores", "algorithm")
        self.padding = self._counter("padding_rows", "Rows computed for nothing, to fill a bucket")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests, cached or not", "part")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that did not have to be computed", "part")
        self.evictions = self._counter("evictions", "Cached blocks given up for their pages")
        self.preemptions = self._counter("preemptions", "Requests sent back for want of pages")
        self.compiles = self._counter("compiles", "Programs compiled", "program")
        self.late_compiles = self._counter("compiles_after_warmup", "Programs compiled after the warm-up had ended")
        self.requests = self._counter("requests", "Requests ended", "outcome")
        self.store = self._counter("kv_store_events", "Parts read from, written to or refused by the KV store", "event")
        self.pages = Gauge(_PREFIX + "pages", "KV pages", ["state"], registry=self.registry)
        self.queue = Gauge(_PREFIX + "requests_now", "Requests in the engine", ["state"], registry=self.registry)
        self.step_time = self._histogram("step_seconds", "Of a whole step")
        self.host_time = self._histogram("step_host_seconds", "Of a step's scheduling and metadata")
        self.queue_time = self._histogram("queue_seconds", "From arrival to the first admission")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self.inter_token = self._histogram("inter_token_seconds", "Between tokens of one sample")
        self.end_to_end = self._histogram("request_seconds", "From arrival to the end")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=_SECONDS, registry=self.registry)

    def count_cached(self, cached: CachedTokens, totals: CachedTokens) -> None:
        """Note what a prompt found in the cache, by kind of part."""
        for counter, tokens in ((self.prompt_tokens, totals), (self.cached_tokens, cached)):
            counter.labels("prefix").inc(tokens.prefix)
            counter.labels("chunk").inc(sum(tokens.chunks))
            counter.labels("question").inc(tokens.question)

    def value(self, name: str, **labels: str) -> float:
        """One sample by its name without the common prefix, e.g. `value("tokens_total", kind="decode")`; 0 if never set."""
        return self.registry.get_sample_value(_PREFIX + name, labels) or 0.0

    def raise_to(self, counter: Counter, total: float) -> None:
        """Bring a counter up to a total that is kept elsewhere."""
        counter.inc(total - self._totals.get(counter, 0.0))
        self._totals[counter] = total
