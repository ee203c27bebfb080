"""From a scoring job to requests in stages, and from their results to its output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

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
_STAGE_STEPS = 4
"""Steps' worth of tokens that are sent to the engine together: others wait for no more of a long job at a time."""


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
        note: Callable[[ScoreResult], None],
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
        if isinstance(event, PrecomputeResult):
            self._cached = event.cached.total
            return 0
        self._values[self._places[event.request_id]] = event.logprobs
        self._note(event)
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
        self._cached: OrderedDict[bytes, str] = OrderedDict()  # queries left in the cache
        self._chosen: OrderedDict[bytes, str] = OrderedDict()  # what requests were given

    def connect(self, limits: EngineLimits) -> None:
        """Learn what the engine can hold and how fast it is."""
        self.limits, self._rates = limits, limits.rates

    def note(self, event: ScoreResult) -> None:
        """Learn how fast the engine is by now."""
        self._rates = event.rates

    def job(self, query: list[int], items: list[list[int]], leading: list[int], item_first: bool) -> ScoreJob:
        """A job within this engine's sizes."""
        prefix, budget = len(leading) + len(query), self.config.max_num_batched_tokens
        room = self.limits.kv_tokens // 4
        # Room for a decode of everybody else in the same step.
        batch = budget - self.config.max_num_seqs if budget >= 2 * self.config.max_num_seqs else budget
        return ScoreJob(
            query,
            items,
            leading,
            item_first,
            # Large enough that the query's share of a pack is small, small enough that several fit the pool.
            max_pack_tokens=min(max(8192, 4 * prefix, budget), max(room, prefix)),
            max_dense_tokens=self.config.max_multi_item_seq_len,
            max_batch_tokens=min(batch, max(room, 1)),
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
        refused = refusals(job, sliding_window=self.limits.sliding_window, caching=config.enable_prefix_caching)
        costs, cached = (
            predict(job, self._rates, config.max_num_batched_tokens, query_cached=known) for known in (False, True)
        )
        asked, whole = _digests(job, cache_salt)
        choice = select_algorithm(
            algorithm or config.score_algorithm,
            refused,
            costs,
            cached["prefill_extend"],
            query_cached=asked in self._cached,
            before=self._chosen.get(whole),
        )
        if (algorithm or config.score_algorithm) == "auto":
            _remember(self._chosen, whole, choice.algorithm)
        if choice.algorithm == "prefill_extend":
            _remember(self._cached, asked, choice.algorithm)
        name = choice.algorithm
        parts = ALGORITHMS[name](job)
        requests, places = [], {}
        for part in parts:
            shared = name == "prefill_extend" and part.layout.num_chunks > 0
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
        return ScoringJob(job, choice, stages, places, columns, apply_softmax, classes is not None, self.note)


def _remember(known: OrderedDict[bytes, str], key: bytes, value: str) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


def _digests(job: ScoreJob, cache_salt: str | None) -> tuple[bytes, bytes]:
    """What tells a query from others, and a whole request, for whom shares its cache."""
    digest = xxhash.xxh3_128(repr(cache_salt).encode())
    digest.update(np.asarray(job.prefix, np.int64).tobytes())
    query = digest.digest()
    for item in job.items:
        digest.update(np.asarray([len(item), *item], np.int64).tobytes())
    return query, digest.digest()
