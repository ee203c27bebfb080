"""`QueryPlan`: the requests of one query, stage by stage, and the scores made of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy.special import expit, softmax

from chunkattn.calls.algorithms import ALGORITHMS, QueryItems
from chunkattn.calls.result_cache import ResultCache
from chunkattn.engine.messages import CachedTokens, PrecomputeRequest, PrecomputeResult, ScoreRequest, ScoreResult
from chunkattn.layout import ChunkLayout
from chunkattn.outputs import ScoreOutput, ScoreUsage
from chunkattn.rope.positions import make_layout

Stage = list[PrecomputeRequest | ScoreRequest]
"""Requests sent together once all requests of the previous stage have ended."""


class QueryPlan:
    """The scoring of one query: requests made stage by stage, and the output collected from their results.

    Items of equal keys are scored once, and items of known results not at all. Where the layout decides the bits, results are
    used only if all are known.

    Args:
        job: the job to score.
        keys: key of each item.
        results: cache of results, read here and filled by `add`.
        choose: chooses the algorithm, see `select_algorithm`, given whether the query is cached; None if the engine was not
            asked.
        lookup: makes the request that asks the engine whether the query is cached; None if the choice does not depend on it.
        request: makes the request of a part under an algorithm; None as rows makes the request of the query alone.
        max_stage_tokens: maximum number of tokens of a stage with more than one request.
        columns: number of labels, or of classes of a classifier.
        apply_softmax: whether scores are normalised over the labels.
        whole: whether the layout of the items decides the bits.
        logits: whether results are logits, of a classifier's classes or of labels.
        note: called with every result.
    """

    def __init__(
        self,
        job: QueryItems,
        keys: Sequence[bytes],
        results: ResultCache,
        choose: Callable[[bool | None], tuple[str, dict[str, float]]],
        lookup: Callable[[], PrecomputeRequest] | None,
        request: Callable[[ChunkLayout, np.ndarray | None, str], PrecomputeRequest | ScoreRequest],
        max_stage_tokens: int,
        columns: int,
        apply_softmax: bool,
        whole: bool,
        logits: bool,
        note: Callable[[ScoreResult | PrecomputeResult], None],
    ) -> None:
        self._job, self._choose, self._request, self._note = job, choose, request, note
        self._max_stage_tokens, self._apply_softmax, self._logits = max_stage_tokens, apply_softmax, logits
        self._keys, self._results, known = keys, results, results.get(keys)
        first = {key: place for place, key in reversed([*enumerate(keys)])}  # of each distinct item
        if whole and len(known) < len(first):
            known = {}
        self._first = [first[key] for key in keys]
        self._values = np.zeros((len(job.items), columns), np.float32)
        for key, row in known.items():
            self._values[first[key]] = row
        self._open = sorted(place for key, place in first.items() if key not in known)  # items to score
        self._places: dict[str, list[int]] = {}  # items of the requests in flight
        self._rows = self.cached_query = 0
        self._lookup = lookup if self._open else None
        self._chosen = None if self._lookup else choose(None)

    @property
    def _choice(self) -> tuple[str, dict[str, float]]:
        if self._chosen is None:
            self._chosen = self._choose(None)
        return self._chosen

    @property
    def is_undecided(self) -> bool:
        """Return whether the algorithm depends on whether the query is cached, and is not chosen yet."""
        return self._chosen is None

    def make_lookup(self) -> PrecomputeRequest:
        """Return the request that asks the engine whether the query of an undecided plan is cached."""
        assert self._lookup is not None
        return self._lookup()

    def decide(self, cached: CachedTokens) -> None:
        """Choose the algorithm of an undecided plan.

        Args:
            cached: tokens of the query that are cached. A query counts as cached when at most its last block is missing.
        """
        self._chosen = self._choose(len(self._job.prefix) - cached.total < self._job.block_size)

    @property
    def num_items(self) -> int:
        """Return the number of items to score."""
        return len(self._open)

    @property
    def independent(self) -> bool:
        """Return whether requests of several stages could be sent together."""
        return self._choice[0] != "prefill_extend"

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order, each a list of requests.

        For a request in flight, the plan stores only its item indices.
        """
        most = self._max_stage_tokens if self.independent else 0
        job = replace(self._job, items=[self._job.items[place] for place in self._open])
        if not self.independent and job.items:
            # The query runs first by itself, so that batches of items run alike with and without a cached query.
            query = make_layout(job.prefix, [], [])
            self._rows += len(query)
            yield [self._request(query, None, self._choice[0])]
        stage: Stage = []
        tokens = 0
        for part in ALGORITHMS[self._choice[0]](job):
            size = len(part.layout)
            if stage and tokens + size > most:
                yield stage
                stage, tokens = [], 0
            request = self._request(part.layout, part.rows, self._choice[0])
            self._places[request.request_id] = [self._open[item] for item in part.items]
            self._rows += size if self.independent else size - part.layout.prefix_len
            stage.append(request)
            tokens += size
        if stage:
            yield stage

    def add(self, event: ScoreResult | PrecomputeResult) -> int:
        """Store one request's result and return the number of items that the request scores."""
        self._note(event)
        if isinstance(event, PrecomputeResult):
            self.cached_query = event.cached.total
            return 0
        for place, row in zip(self._places.pop(event.request_id), event.logprobs, strict=True):
            self._values[place] = row
            self._results.put(self._keys[place], row)
        return len(event.logprobs)

    def output(self) -> ScoreOutput:
        """Return the output; call it after every result is added."""
        values = self._values[self._first].astype(np.float64)
        if self._logits:
            scores = expit(values) if values.shape[1] == 1 else softmax(values, axis=1)
        else:
            scores = softmax(values, axis=1) if self._apply_softmax else np.exp(values)
        return ScoreOutput(
            scores=scores.tolist(),
            logprobs=None if self._logits else values.tolist(),
            logits=values.tolist() if self._logits else None,
            algorithm=self._choice[0],
            predicted_seconds=self._choice[1],
            usage=self._usage(),
        )

    def _usage(self) -> ScoreUsage:
        """Return the token counts. Tokens of repeated and known items are cached; so is a query that no item needed."""
        prefix, lens = len(self._job.prefix), [len(item) for item in self._job.items]
        spared = sum(lens) - sum(lens[place] for place in self._open)
        query = self.cached_query if self._open else prefix * bool(lens)
        return ScoreUsage(prefix + sum(lens), self._rows - self.cached_query, query + spared)
