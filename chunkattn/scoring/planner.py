"""From a scoring job to requests in stages, and from their results to its output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from threading import Lock
from typing import TypeVar

import numpy as np
import xxhash
from scipy.special import expit, softmax

from chunkattn.config import EngineConfig
from chunkattn.engine.messages import EngineLimits, PrecomputeRequest, PrecomputeResult, ScoreRequest, ScoreResult
from chunkattn.outputs import ScoreOutput, ScoreUsage
from chunkattn.rope.positions import make_layout
from chunkattn.scoring.algorithms import ALGORITHMS, ScoreJob, groups
from chunkattn.scoring.cost import predict
from chunkattn.scoring.selector import Choice, check_algorithm, refusals, select_algorithm

_REMEMBERED = 4096
"""Queries, and requests, that are remembered."""
_OTHERS = 8
"""Rows of a step left to others' decodes."""
_STAGE_STEPS = 4
"""Steps' worth of tokens that are sent to the engine together: others wait for no more of a long job at a time."""

T = TypeVar("T")


class ScoringJob:
    """The requests of one scoring call, and its output as results come in.

    Args:
        columns: labels, or classes of a classifier.
        classifier: results are class logits.

    Attributes:
        stages: lists of requests; a list is sent when all of the one before have ended.
    """

    def __init__(
        self,
        job: ScoreJob,
        choice: Choice,
        stages: list[list[PrecomputeRequest | ScoreRequest]],
        places: dict[str, list[int]],
        columns: int,
        apply_softmax: bool,
        classifier: bool,
        note: Callable[[ScoreResult | PrecomputeResult], None],
    ) -> None:
        self.stages = stages
        self._job, self._choice, self._places, self._note = job, choice, places, note
        self._apply_softmax, self._classifier = apply_softmax, classifier
        self._values = np.zeros((len(job.items), columns), np.float32)
        self._cached = 0

    @property
    def requests(self) -> list[PrecomputeRequest | ScoreRequest]:
        """Those of all stages."""
        return list(chain.from_iterable(self.stages))

    def add(self, event: ScoreResult | PrecomputeResult) -> int:
        """Take one request's result. Returns how many items it has scored."""
        self._note(event)
        if isinstance(event, PrecomputeResult):
            self._cached = event.cached.total
            return 0
        self._values[self._places[event.request_id]] = event.logprobs
        return len(event.logprobs)

    def output(self) -> ScoreOutput:
        """The scores, once every result is in."""
        values, job = self._values.astype(np.float64), self._job
        rows = sum(
            len(r.layout) - (r.layout.prefix_len if isinstance(r, ScoreRequest) and r.share_prefix else 0)
            for r in self.requests
        )
        if self._classifier:
            scores = expit(values) if values.shape[1] == 1 else softmax(values, axis=1)
        else:
            scores = softmax(values, axis=1) if self._apply_softmax else np.exp(values)
        return ScoreOutput(
            scores=scores.tolist(),
            logprobs=None if self._classifier else values.tolist(),
            logits=values.tolist() if self._classifier else None,
            algorithm=self._choice.algorithm,
            predicted_seconds=dict(self._choice.predicted_seconds),
            usage=ScoreUsage(len(job.prefix) + sum(map(len, job.items)), rows - self._cached, self._cached),
        )


class ScorePlanner:
    """Chooses algorithms, and makes requests of what they lay out.

    Raises:
        ConfigError: the engine's `score_algorithm` is unknown.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_algorithm(config.score_algorithm)
        self.config = config
        self._lock = Lock()  # calls are planned in several threads
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # queries left in the cache, and their tokens
        self._chosen: OrderedDict[bytes, str] = OrderedDict()  # what requests were given

    def connect(self, limits: EngineLimits) -> None:
        """Learn what the engine can hold and how fast it is. Its cache is empty."""
        self.limits, self._rates = limits, limits.rates
        self.forget_cached()

    def forget_cached(self) -> None:
        """The engine's cache has been emptied."""
        with self._lock:
            self._cached.clear()

    def _note(self, event: ScoreResult | PrecomputeResult, query: bytes, tokens: int) -> None:
        """Learn how fast the engine is by now, or that it has just computed a query."""
        if isinstance(event, ScoreResult):
            self._rates = event.rates
            return
        with self._lock:
            _remember(self._cached, query, tokens)
            while sum(self._cached.values()) > self.limits.kv_tokens and len(self._cached) > 1:
                self._cached.popitem(last=False)

    def job(self, query: list[int], items: list[list[int]], leading: list[int], item_first: bool) -> ScoreJob:
        """A job within this engine's sizes."""
        prefix, budget, limits = len(leading) + len(query), self.config.max_num_batched_tokens, self.limits
        room, block = limits.kv_tokens // 4, limits.block_size
        beside_query = (limits.num_pages + prefix // -block) * block
        # Room for a few decodes of others in the same step.
        batch = budget - _OTHERS if budget >= 8 * _OTHERS else budget
        return ScoreJob(
            query,
            items,
            leading,
            item_first,
            # Large enough that the query's share of a pack is small, small enough that several fit the pool.
            max_pack_tokens=min(max(8192, 4 * prefix, budget), max(room, min(2 * prefix, limits.kv_tokens))),
            max_dense_tokens=self.config.max_multi_item_seq_len,
            max_batch_tokens=max(min(batch, room, beside_query), 1),
            max_extend_tokens=beside_query,
            block_size=block,
        )

    def plan(
        self,
        job: ScoreJob,
        algorithm: str | None,
        labels: tuple[int, ...],
        *,
        apply_softmax: bool,
        cache_salt: str | None,
        priority: int,
        new_id: Callable[[], str],
    ) -> ScoringJob:
        """Requests of a job.

        Raises:
            RequestError: the algorithm is unknown or cannot serve the job.
        """
        config = self.config
        refused = refusals(
            job,
            sliding_window=self.limits.sliding_window,
            caching=config.enable_prefix_caching,
            dense_refusal=self.limits.dense_refusal,
        )
        costs, cached = (
            predict(job, self._rates, config.max_num_batched_tokens, query_cached=known) for known in (False, True)
        )
        asked, shape = _digests(job, cache_salt)
        with self._lock:
            choice = select_algorithm(
                algorithm or config.score_algorithm,
                refused,
                costs,
                cached["prefill_extend"],
                query_cached=asked in self._cached,
                before=self._chosen.get(shape),
            )
            if (algorithm or config.score_algorithm) == "auto":
                _remember(self._chosen, shape, choice.algorithm)
        name = choice.algorithm
        parts = ALGORITHMS[name](job)
        requests, places = [], {}
        for part in parts:
            shared = name == "prefill_extend"
            request = ScoreRequest(new_id(), part.layout, part.rows, labels, shared, name, cache_salt, priority)
            requests.append(request)
            places[request.request_id] = part.items
        stages: list[list[PrecomputeRequest | ScoreRequest]] = []
        if name == "prefill_extend" and requests:
            query = make_layout(job.prefix, [], [])
            # On its own first, so that every batch of items runs alike whether the query was in the cache or not.
            stages.append([PrecomputeRequest(new_id(), query, cache_salt, persist=False, priority=priority)])
            stages += [[request] for request in requests]
        else:
            most = _STAGE_STEPS * config.max_num_batched_tokens
            stages += [list(requests[a:b]) for a, b in groups([len(r.layout) for r in requests], most)]
        classes = self.limits.num_labels
        columns = len(labels) if classes is None else classes
        note = partial(self._note, query=asked, tokens=len(job.prefix))
        return ScoringJob(job, choice, stages, places, columns, apply_softmax, classes is not None, note)


def _remember(known: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _digests(job: ScoreJob, cache_salt: str | None) -> tuple[bytes, bytes]:
    """What tells a query from others, and a query with so many items of such lengths, for whom shares its cache.

    Not the items themselves: one's contents must not choose the others' algorithm.
    """
    digest = xxhash.xxh3_128(repr(cache_salt).encode())
    digest.update(np.asarray(job.prefix, np.int64).tobytes())
    query = digest.digest()
    digest.update(np.asarray([len(item) for item in job.items], np.int64).tobytes())
    return query, digest.digest()
