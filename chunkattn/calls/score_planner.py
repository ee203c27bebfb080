"""`ScorePlanner`: chooses the algorithm of a query and its items, and plans their requests."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TypeVar

import numpy as np
import xxhash

from chunkattn.calls.algorithms import (
    AUTO,
    BACKENDS,
    ITEMS,
    Nouns,
    QueryItems,
    check_algorithm,
    predict,
    refusals,
    select_algorithm,
)
from chunkattn.calls.result_cache import ResultCache, item_keys
from chunkattn.calls.score_plan import QueryPlan
from chunkattn.config import EngineConfig
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import PrecomputeRequest, PrecomputeResult, ScoreRequest, ScoreResult
from chunkattn.errors import CapacityError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout

logger = logging.getLogger(__name__)

_REMEMBERED = 4096
"""Maximum number of queries, and of call shapes, that the planner remembers."""
_OTHERS = 8
"""Rows of a step left to decodes of other requests."""
STAGE_STEPS = 4
"""Tokens of one stage, in steps' worth: other requests wait for at most this much of a long job at a time."""

T = TypeVar("T")


class ScorePlanner:
    """A planner that chooses algorithms and turns their sequences into requests.

    Attributes:
        config: options of the engine.
        results: results of earlier calls; empty for an engine without prefix caching.

    Raises:
        ConfigError: the engine's `score_algorithm` is unknown.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_algorithm(config.score_algorithm)
        self.config = config
        self._lock = Lock()  # several threads plan calls
        self.results = ResultCache(config.enable_prefix_caching)
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # tokens of the queries left in the cache
        self._chosen: OrderedDict[bytes, str] = OrderedDict()  # algorithms chosen before

    def connect(self, limits: EngineLimits) -> None:
        """Store the limits and rates of a new engine with an empty cache."""
        self.limits, self._rates = limits, limits.rates
        self.forget_cached()

    def forget_cached(self) -> None:
        """Forget the results and the cached queries, after the engine's cache is emptied."""
        self.results.clear()
        with self._lock:
            self._cached.clear()

    def _note(self, event: ScoreResult | PrecomputeResult, query: bytes, tokens: int) -> None:
        """Update the rates from a score result, or remember the query that a precompute result cached."""
        if isinstance(event, ScoreResult):
            self._rates = event.rates
            return
        with self._lock:
            _remember(self._cached, query, tokens)
            while sum(self._cached.values()) > self.limits.kv_tokens and len(self._cached) > 1:
                self._cached.popitem(last=False)

    def query_items(
        self, query: list[int], items: list[list[int]], leading: list[int], item_first: bool, nouns: Nouns = ITEMS
    ) -> QueryItems:
        """Return a job within this engine's limits.

        Args:
            query: token ids of the query.
            items: token ids of each item.
            leading: special tokens at the start of every sequence.
            item_first: whether each sequence is item + query.
            nouns: the caller's nouns.
        """
        prefix, budget, limits = len(leading) + len(query), self.config.max_num_batched_tokens, self.limits
        room, block = limits.kv_tokens // 4, limits.block_size
        beside_query = limits.max_request_tokens + prefix // -block * block
        # Leave room for a few decodes of other requests in the same step.
        batch = budget - _OTHERS if budget >= 8 * _OTHERS else budget
        return QueryItems(
            query,
            items,
            leading,
            item_first,
            # Large packs keep the query's share small; several packs must fit the pool.
            max_pack_tokens=max(8192, 4 * prefix, budget),
            max_pack_slots=max(room, min(2 * prefix, limits.max_request_tokens)),
            max_multi_item_seq_len=self.config.max_multi_item_seq_len,
            max_batch_tokens=max(batch, 1),
            max_batch_slots=min(room, beside_query),
            max_extend_tokens=beside_query,
            block_size=block,
            items_on_pages=limits.items_on_pages,
            nouns=nouns,
        )

    def too_costly(self, jobs: Sequence[QueryItems]) -> dict[str, str]:
        """Return the reason for each algorithm that cannot serve a call of these jobs within `max_tokens_per_call`."""
        totals: Counter[str] = Counter()
        for job in jobs:
            totals.update(job.tokens())
        limit = self.config.max_tokens_per_call
        return {
            name: f"it would compute {tokens} tokens for this call, max_tokens_per_call is {limit}"
            for name, tokens in totals.items()
            if tokens > limit
        }

    def plan(
        self,
        job: QueryItems,
        algorithm: str | None,
        labels: tuple[int, ...],
        *,
        apply_softmax: bool,
        cache_salt: str | None,
        priority: int,
        raw: bool = False,
        new_id: Callable[[], str],
        too_costly: Mapping[str, str],
        check: Callable[[PrecomputeRequest | ScoreRequest], None] = lambda _: None,
    ) -> QueryPlan:
        """Plan a job. Requests are laid out only when a stage is asked for.

        The algorithm is chosen here, unless it depends on whether an unknown query is cached. The driver may then
        ask the engine.

        Args:
            job: the job to score.
            algorithm: name of an algorithm; None uses the engine's default.
            labels: token ids to read.
            apply_softmax: see `QueryPlan`.
            cache_salt: cache salt of the requests.
            priority: priority of the requests.
            raw: whether to read the labels' logits, whose scores are their sigmoid or softmax.
            new_id: makes request ids.
            too_costly: result of `too_costly` for the call that the job belongs to.
            check: called with every new request.

        Raises:
            RequestError: the algorithm is unknown or cannot serve the job.
            CapacityError: every suitable algorithm would compute more than `max_tokens_per_call`.
        """
        config = self.config
        wanted = algorithm or config.score_algorithm
        whole = not self.limits.batch_invariant or wanted in BACKENDS
        refused = refusals(
            job,
            sliding_window=self.limits.sliding_window,
            caching=config.enable_prefix_caching,
            backends=self.limits.backends,
        )
        refused |= too_costly
        names = AUTO if wanted == "auto" else (wanted,)
        if all(name in refused for name in names) and (over := [name for name in names if name in too_costly]):
            text = f"algorithm {over[-1]!r} cannot serve this request: {too_costly[over[-1]]}; "
            raise CapacityError(f"{text}send fewer or shorter {job.nouns.items}", param=job.nouns.items)
        costs, cached = (
            predict(job, self._rates, config.max_num_batched_tokens, query_cached=known) for known in (False, True)
        )
        asked, shape = _digests(job, cache_salt)
        select = partial(select_algorithm, wanted, refused, costs, cached["prefill_extend"])

        def choose(known: bool | None) -> tuple[str, dict[str, float]]:
            with self._lock:
                found = asked in self._cached if known is None else known
                choice = select(query_cached=found, before=self._chosen.get(shape))
                if wanted == "auto" and whole:
                    _remember(self._chosen, shape, choice[0])
            expected = ", ".join(f"{name} {cost:.3g} s" for name, cost in choice[1].items())
            if wanted == "auto":
                logger.info("scoring by %s; predicted: %s", choice[0], expected)
            return choice

        with self._lock:
            unknown = wanted == "auto" and asked not in self._cached and shape not in self._chosen
        undecided = unknown and len({select(query_cached=found)[0] for found in (False, True)}) > 1

        def lookup() -> PrecomputeRequest:
            return PrecomputeRequest(new_id(), make_layout(job.prefix, [], []), cache_salt, persist=False, priority=priority)

        def request(layout: ChunkLayout, rows: np.ndarray | None, algorithm: str) -> PrecomputeRequest | ScoreRequest:
            made: PrecomputeRequest | ScoreRequest
            if rows is None:
                made = PrecomputeRequest(new_id(), layout, cache_salt, persist=False, priority=priority)
            else:
                shared, backend = algorithm == "prefill_extend", BACKENDS.get(algorithm)
                made = ScoreRequest(new_id(), layout, rows, labels, shared, algorithm, cache_salt, priority, backend, raw)
            check(made)
            return made

        classes = self.limits.num_labels
        columns = len(labels) if classes is None else classes
        note = partial(self._note, query=asked, tokens=len(job.prefix))
        most = STAGE_STEPS * config.max_num_batched_tokens
        keys = item_keys(job, labels, wanted, cache_salt, raw, whole=whole)
        return QueryPlan(
            job,
            keys,
            self.results,
            choose,
            lookup if undecided else None,
            request,
            most,
            columns,
            apply_softmax,
            whole,
            raw or classes is not None,
            note,
        )


def _remember(known: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _digests(job: QueryItems, cache_salt: str | None) -> tuple[bytes, bytes]:
    """Return the digests of a query, and of a query with the number and lengths of its items, both with the cache salt.

    The digests omit the items' contents, because the contents of one item must not change the algorithm of other items.
    """
    digest = xxhash.xxh3_128(repr(cache_salt).encode())
    digest.update(np.asarray(job.prefix, np.int64).tobytes())
    query = digest.digest()
    digest.update(np.asarray([len(item) for item in job.items], np.int64).tobytes())
    return query, digest.digest()
