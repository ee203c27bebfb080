"""`EngineMetrics`: the engine's metrics in one Prometheus registry."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence

from prometheus_client import Counter, generate_latest

from chunkattn.described_metrics import DescribedMetrics
from chunkattn.engine.messages import CachedTokens
from chunkattn.engine.request import Request
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.states import States
from chunkattn.engine.step import Step
from chunkattn.engine.warmup import WarmUp
from chunkattn.layout import ChunkLayout

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_PREFIX = "chunkattn_"


class EngineMetrics(DescribedMetrics):
    """Counters, gauges and histograms of one engine in one `registry`. Times are in seconds.

    Metrics:
        steps: engine steps run.
        failed_steps: engine steps that raised an exception.
        non_finite_requests: requests that failed because a value is NaN or infinite.
        tokens: tokens computed by steps, by kind: prefill, decode or score.
        score_rows: rows read for scores, by scoring algorithm.
        padding_rows: padding rows computed to fill steps up to a bucket.
        prompt_tokens: prompt tokens of requests, cached or computed, by part.
        cached_tokens: prompt tokens cached or computed by other requests, by part.
        evictions: cached blocks evicted to reuse their pages.
        state_evictions: kept states of recurrent layers evicted to reuse their slots.
        preemptions: preemptions of running requests for lack of pages.
        compiles: programs compiled, by kind of program.
        compiles_after_warmup: programs compiled after the end of the warm-up.
        warmup_seconds: seconds of the warm-up, compiling or loading, by kind.
        warm: 1 once the warm-up has compiled every program.
        requests: requests ended, by outcome: finished, failed or aborted.
        kv_store_events: parts of prompts handled by the KV store, by event.
        pages: KV pages of the pool, by state.
        block_size: token slots of a KV page.
        state_slots: slots for states of recurrent layers, by state: free, cached or used. All are 0 without such layers.
        requests_now: requests in the engine, by state.
        step_seconds: seconds per engine step.
        step_host_seconds: seconds per step for scheduling and metadata while no step runs.
        queue_seconds: seconds from a request's arrival to its first admission, waits for compilations included.
        time_to_first_token_seconds: seconds from a request's arrival to its first token, of requests that generate.
        inter_token_seconds: seconds between consecutive tokens of one sample.
        request_seconds: seconds from a request's arrival to its end.
    """

    def __init__(self) -> None:
        super().__init__(_PREFIX, _SECONDS)
        self._totals: dict[Counter, float] = {}
        self.steps = self.counter("steps")
        self.failed_steps = self.counter("failed_steps")
        self.non_finite = self.counter("non_finite_requests")
        self.tokens = self.counter("tokens", "kind")
        self.scored = self.counter("score_rows", "algorithm")
        self.padding = self.counter("padding_rows")
        self.prompt_tokens = self.counter("prompt_tokens", "part")
        self.cached_tokens = self.counter("cached_tokens", "part")
        self.evictions = self.counter("evictions")
        self.state_evictions = self.counter("state_evictions")
        self.preemptions = self.counter("preemptions")
        self.compiles = self.counter("compiles", "program")
        self.late_compiles = self.counter("compiles_after_warmup")
        self.warm_up_time = self.counter("warmup_seconds", "kind")
        self.warm = self.gauge("warm")
        self.requests = self.counter("requests", "outcome")
        self.store = self.counter("kv_store_events", "event")
        self.pages = self.gauge("pages", "state")
        self.block_size = self.gauge("block_size")
        self.state_slots = self.gauge("state_slots", "state")
        self.queue = self.gauge("requests_now", "state")
        self.step_time = self.histogram("step_seconds")
        self.host_time = self.histogram("step_host_seconds")
        self.queue_time = self.histogram("queue_seconds")
        self.first_token = self.histogram("time_to_first_token_seconds")
        self.inter_token = self.histogram("inter_token_seconds")
        self.end_to_end = self.histogram("request_seconds")

    def count_end(self, request: Request, outcome: str) -> None:
        """Count a request that has ended."""
        self.requests.labels(outcome).inc()
        self.end_to_end.observe(time.perf_counter() - request.added_at)

    def count_cached(self, cached: CachedTokens, layout: ChunkLayout) -> None:
        """Add the prompt tokens of a request to the counters.

        Args:
            cached: prompt tokens that the request did not compute.
            layout: layout of the prompt.
        """
        whole = CachedTokens(layout.prefix_len, layout.chunk_lens, layout.question_len)
        for counter, tokens in ((self.prompt_tokens, whole), (self.cached_tokens, cached)):
            counter.labels("prefix").inc(tokens.prefix)
            counter.labels("chunk").inc(sum(tokens.chunks))
            counter.labels("question").inc(tokens.question)

    def count_step(self, step: Step) -> None:
        """Count the tokens, padding rows and score rows of a step."""
        scored_by = collections.Counter(request.score.algorithm if request.score else "" for _, request, _ in step.scores)
        for algorithm, count in scored_by.items():
            self.scored.labels(algorithm).inc(count)
        decodes = sum(s.end - s.start == 1 and s.start >= len(s.sample.request.layout) for s in step.spans)
        scored = sum(s.end - s.start for s in step.spans if s.sample.request.score)
        rows = step.num_rows
        for kind, count in (("decode", decodes), ("score", scored), ("prefill", rows - decodes - scored)):
            self.tokens.labels(kind).inc(count)
        self.padding.inc(len(step.arrays.token_ids) - rows)

    def count_run(self, size: int, tokens: Sequence[int], number: int, seconds: float, host: float) -> None:
        """Count a run of decodes as so many steps.

        Args:
            size: number of rows, padding included.
            tokens: number of tokens of each row.
            number: number of decodes.
            seconds: seconds that the run took.
            host: seconds of them before the run was sent.
        """
        self.tokens.labels("decode").inc(sum(tokens))
        self.padding.inc(size * number - sum(tokens))
        self.steps.inc(number)
        self.step_time.observe_many(seconds / number, number)
        self.host_time.observe_many(host / number, number)

    def text(self, scheduler: Scheduler, warm_ups: WarmUp, compiles: Mapping[str, int], store: Mapping[str, int]) -> str:
        """Return the metrics in Prometheus' text format, after copying the counts that other objects keep.

        Args:
            scheduler: scheduler of the engine, with its cache.
            warm_ups: warm-up of the engine.
            compiles: number of compiled programs by kind.
            store: number of events of the KV store by kind.
        """
        trie = scheduler.trie
        labelled = ((self.compiles, compiles), (self.store, store), (self.warm_up_time, warm_ups.seconds))
        totals = [(self.evictions, trie.evictions), (self.preemptions, scheduler.preemptions)]
        states = scheduler.states or States(0, 0)
        totals += [(self.state_evictions, states.evictions), (self.late_compiles, warm_ups.late_compiles)]
        self.warm.set(warm_ups.is_warm)
        by_label = [(counter.labels(label), count) for counter, counts in labelled for label, count in counts.items()]
        for counter, total in (*totals, *by_label):
            counter.inc(total - self._totals.get(counter, 0.0))
            self._totals[counter] = total
        pinned = len({b for r in scheduler.pinned for s in r.samples for b in s.held if b.page >= 0})
        used = trie.num_pages - trie.num_available - pinned
        for state, pages in {"free": trie.num_free, "cached": trie.num_cached, "used": used, "pinned": pinned}.items():
            self.pages.labels(state).set(pages)
        self.block_size.set(scheduler.block_size)
        slots = {"free": states.num_free, "cached": states.num_idle, "used": states.num_slots - states.num_available}
        for state, count in slots.items():
            self.state_slots.labels(state).set(count)
        self.queue.labels("waiting").set(len(scheduler.waiting))
        self.queue.labels("running").set(len(scheduler.running))
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a metric; 0 if it was never set.

        Args:
            name: sample name without the common prefix, such as `"tokens_total"`.
            **labels: values of the metric's labels, such as `kind="decode"`.
        """
        return self.registry.get_sample_value(_PREFIX + name, labels) or 0.0
