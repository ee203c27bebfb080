"""`ScoreCall`: scoring of one query and its items, from token ids to scores."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Float64
from scipy.special import expit, softmax

from chunkattn.calls.algorithm_choice import predict, refusals, select_algorithm
from chunkattn.calls.algorithms import ALGORITHMS, AUTO, ScoreInputs, SharedDocuments, extend_documents
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import STAGE_STEPS, Ask, Flow, stages
from chunkattn.calls.score_memory import digests, item_keys
from chunkattn.config import EngineConfig
from chunkattn.engine.limits import ITEMS, EngineLimits
from chunkattn.engine.messages import CachedTokens, PrecomputeRequest, ScoreRequest, ScoreResult
from chunkattn.errors import CapacityError
from chunkattn.layout import Names
from chunkattn.models.activation import ACTIVATIONS
from chunkattn.outputs import ScoreOutput, ScoreUsage
from chunkattn.parsers.arguments import salt_key
from chunkattn.rope.positions import make_layout

logger = logging.getLogger(__name__)

_OTHERS = 8
"""Rows of a step left to decodes of other requests."""


class StateReader(Protocol):
    """Head that reads hidden states of one item.

    Attributes:
        backs: tokens that are read, counted from the item's end, see `ScoreInputs`.
        key: numbers that tell readers of one model apart.
    """

    @property
    def backs(self) -> tuple[int, ...]:
        """See the class."""
        ...

    @property
    def key(self) -> tuple[int, ...]:
        """See the class."""
        ...

    def scores(self, hidden: Float32[np.ndarray, "R H"]) -> Float64[np.ndarray, " N"]:
        """Return the score of each option.

        Args:
            hidden: hidden states of the tokens.
        """
        ...


class ScoreCall(ScoreInputs):
    """Scoring of one query and its items: inputs, requests and output.

    `plan` must be called before the flow. A request is laid out only when its stage is asked for.

    Items of equal keys, which include their labels, are scored once, and items of known results not at all. Where the layout
    decides the bits, results are used only if all are known.

    Args:
        frontend: frontend of the engine.
        before: token ids before every item.
        items: token ids of each item, which fit the engine with the query.
        labels: token ids to read after each item, one list per item; empty for a classifier. All token ids have been checked.
        algorithm: see `LLM.score`.
        apply_softmax: whether scores are normalised over the labels.
        cache_salt: see `LLM.generate`.
        priority: rank in the queue; lower goes first.
        raw: whether to read the labels' logits, whose scores are their sigmoid or softmax.
        names: the caller's names of query and items.
        reads: see `ScoreInputs`.
        documents: see `ScoreInputs`; the algorithm is `prefill_extend` then.
        readers: heads that read the hidden states of each item, instead of labels; empty for none. The results are logits.
        item_first: see `ScoreInputs`. `prefill_extend` then keeps `before` in the KV store as well, if the engine has one.

    Attributes:
        total: number of items to score.
        done: number of items that have been scored.
        is_whole: whether the layout of all items decides the bits of each result.
        cached_query: tokens of the query that were in the cache when the query was computed by itself.
        is_missing: whether the engine has told that more than the last block of `before` is not in the cache.

    Raises:
        RequestError: the priority or the salt is invalid.
    """

    def __init__(
        self,
        frontend: Frontend,
        before: list[int],
        items: list[list[int]],
        labels: Sequence[tuple[int, ...]],
        *,
        algorithm: str | None = None,
        apply_softmax: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
        raw: bool = False,
        names: Names = ITEMS,
        reads: Sequence[int] = (),
        documents: SharedDocuments | None = None,
        item_first: bool = False,
        readers: Sequence[StateReader] = (),
    ) -> None:
        limits = frontend.limits
        labels = [reader.key for reader in readers] or labels
        backs = [reader.backs for reader in readers]
        self.algorithm = algorithm or frontend.config.score_algorithm
        bounds = _bounds(frontend.config, limits, len(before), self.algorithm)
        super().__init__(before, items, labels, reads, names, documents, item_first, backs=backs, **bounds)
        self._frontend, self._memory = frontend, frontend.scores
        (self.priority,), self._salt_key = check_priorities(priority, 1), salt_key(cache_salt)
        self.apply_softmax, self.raw, self._readers = apply_softmax, raw or bool(readers), readers
        self.is_whole = not limits.batch_invariant or self.algorithm in limits.backends
        self._keys = item_keys(self, self.algorithm, self._salt_key, raw, whole=self.is_whole)
        known, first = self._memory.results.get(self._keys), dict[bytes, int]()
        for place, key in enumerate(self._keys):
            first.setdefault(key, place)
        if self.is_whole and len(known) < len(first):
            known = {}
        self._first = [first[key] for key in self._keys]
        self._values = {first[key]: row for key, row in known.items()}  # of items, one for each label or class
        self._open = [place for key, place in first.items() if key not in known]  # items to score
        self._computed = self.cached_query = 0
        self.is_missing = False
        self.total, self.done = len(self._open), 0
        self._chosen: tuple[str, dict[str, float]] | None = None

    # The algorithm

    def plan(self, costly: dict[str, str]) -> None:
        """Choose the algorithm, unless the choice depends on whether an unknown query is cached. `decide` chooses then.

        Args:
            costly: result of `too_costly` for the caller's queries.

        Raises:
            RequestError: the algorithm is unknown or cannot serve the call.
            CapacityError: every suitable algorithm would compute more than `max_tokens_per_call`.
        """
        config, limits, name = self._frontend.config, self._frontend.limits, self.algorithm
        if self.documents is not None:
            if reason := costly.get("prefill_extend"):
                text = f"the {self.names.chunks} cannot be served: {reason}; send fewer or shorter {self.names.chunks}"
                raise CapacityError(text, param=self.names.chunks)
            self._chosen = "prefill_extend", {}
            return
        refused = refusals(self, caching=config.enable_prefix_caching, backends=limits.backends) | costly
        names = AUTO if name == "auto" else (name,)
        if all(name in refused for name in names) and (over := [name for name in names if name in costly]):
            text = f"algorithm {over[-1]!r} cannot serve this request: {costly[over[-1]]}; "
            raise CapacityError(f"{text}send fewer or shorter {self.names.chunks}", param=self.names.chunks)
        costs = predict(self, self._memory.rates, limits.steps)
        self._select = partial(select_algorithm, name, refused, *costs, item_first=self.item_first)
        self._query, self._shape = digests(self, self._salt_key)
        with self._memory.lock:
            known = self._memory.has_query(self._query) or self._shape in self._memory.choices
        depends = len({self._select(query_cached=cached)[0] for cached in (False, True)}) > 1
        # For items that come first, a guess is not enough: an item that was evicted is not kept again.
        if name != "auto" or (known and not self.item_first) or not depends or not self._open:
            self._choose(None)

    def _choose(self, query_cached: bool | None) -> tuple[str, dict[str, float]]:
        """Choose the algorithm.

        Args:
            query_cached: whether the query is cached; None if the engine was not asked.
        """
        memory, is_auto = self._memory, self.algorithm == "auto"
        with memory.lock:
            known = memory.has_query(self._query) if query_cached is None else query_cached
            chosen = self._chosen = self._select(query_cached=known, before=memory.choices.get(self._shape))
            if is_auto and self.is_whole and not self.item_first:
                memory.keep_choice(self._shape, chosen[0])
        if is_auto and not self.item_first:
            expected = ", ".join(f"{name} {cost:.3g} s" for name, cost in chosen[1].items())
            logger.info("scoring by %s; predicted: %s", chosen[0], expected)
        return chosen

    @property
    def choice(self) -> tuple[str, dict[str, float]]:
        """Return the algorithm, and the predicted seconds of those compared. A call that was not looked up chooses now."""
        return self._choose(None) if self._chosen is None else self._chosen

    @property
    def extends(self) -> bool:
        """Return whether every stage needs the stage before it."""
        return self.choice[0] == "prefill_extend"

    @property
    def asks(self) -> bool:
        """Return whether the choice of the algorithm, or the order of calls, depends on whether the query is cached."""
        return self._chosen is None or (self.item_first and self.extends and bool(self._open))

    def decide(self, cached: CachedTokens) -> None:
        """Choose the algorithm. A query counts as cached when at most its last block is missing.

        Args:
            cached: tokens of `query_request` in the cache.
        """
        lacks_all = self.item_first and not cached.total  # an item may be shorter than a block
        self.is_missing = lacks_all or len(self.before) - cached.total >= self.block_size
        if self._chosen is None:
            self._choose(not self.is_missing)

    # Requests and results

    def flow(self) -> Flow[None]:
        """Score the items."""
        apart = self.extends and self.documents is None
        # Batches that share steps would run unlike batches alone, which decides the bits of some backends.
        self._series = self._frontend.new_id() if apart and self.is_whole else None
        most, room = STAGE_STEPS * self._frontend.config.max_num_batched_tokens, self.max_batch_slots if self._series else None
        if apart and self._open:
            # The query runs first by itself, so that batches of items run alike with and without a cached query.
            request = self.query_request()
            self._frontend.limits.check(request, self.names)
            (query,) = yield Ask([request])
            self._memory.keep_query(self._query, self.query_len)
            self.cached_query = query.cached.total
            self._computed += len(self.before) - self.cached_query
        places: dict[str, list[int]] = {}
        size = computed_rows if self.extends else lambda request: len(request.layout)
        for stage in stages(self._requests(places), most, size, (room, self._slots)):
            for result in (yield Ask(stage)):
                self._keep(result, places.pop(result.request_id))

    def _requests(self, placed: dict[str, list[int]]) -> Iterator[ScoreRequest]:
        """Make the scoring requests one by one, and add the items of each to `placed` by its id."""
        algorithm = ALGORITHMS[self.choice[0]] if self.documents is None else extend_documents
        for layout, rows, places in algorithm(self, self._open):
            lists, row_labels = self._read_lists(places)
            request = ScoreRequest(
                self._frontend.new_id(),
                layout,
                rows,
                lists,
                row_labels,
                share_prefix=self.extends,
                state_len=0 if self.documents is None else len(self.documents.state),
                algorithm=self.choice[0],
                salt_key=self._salt_key,
                priority=self.priority,
                backend=self.choice[0] if self.choice[0] in self._frontend.limits.backends else None,
                raw=self.raw,
                hidden=bool(self._readers),
                series=self._series,
            )
            self._frontend.limits.check(request, self.names)
            placed[request.request_id] = places
            yield request

    def _slots(self, request: ScoreRequest) -> int:
        """Return the KV slots that a request takes beside the query."""
        return sum(-(-size // self.unit) * self.unit for size in request.layout.chunk_lens)

    def _read_lists(self, places: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], np.ndarray | None]:
        """Return the different lists of labels of some items, and the place of each item's list; None if there is only one."""
        if not self.labels or self._readers:
            return (), None
        lists: dict[tuple[int, ...], int] = {}
        if not self.reads and len({*map(id, map(self.labels.__getitem__, places))}) == 1:
            return (self.labels[places[0]],), None
        read = Counter[int]()  # rows of each item
        numbers = []
        for place in places:
            labels = self.labels[place]
            if self.reads_of(place) > 1:
                labels = (labels[read[place]],)
                read[place] += 1
            numbers.append(lists.setdefault(labels, len(lists)))
        return tuple(lists), np.asarray(numbers, np.int32) if len(lists) > 1 else None

    def query_request(self) -> PrecomputeRequest:
        """Return the request that computes the query."""
        layout, name = make_layout(self.prefix_ids, [], []), self._frontend.new_id()
        return PrecomputeRequest(name, layout, self._salt_key, persist=self.item_first, priority=self.priority)

    def _keep(self, result: ScoreResult, places: Sequence[int]) -> None:
        """Keep the values of some items, one row for each token that is read of them."""
        self._computed += result.computed
        self._memory.rates = result.rates
        if self._is_uniform:
            kept = self._memory.results.put_all([self._keys[place] for place in places], result.logprobs)
            self._values.update(zip(places, kept, strict=True))
            self.done += len(places)
            return
        rows: dict[int, list[np.ndarray]] = {}
        for place, row in zip(places, result.logprobs, strict=True):
            rows.setdefault(place, []).append(row)
        for place, (first, *others) in rows.items():
            if self._readers:
                values = self._readers[place].scores(np.stack([first, *others]))
            elif others:
                values = np.asarray([row[0] for row in (first, *others)])
            else:
                values = first[: len(self.labels[place]) if self.labels else len(first)].copy()  # a view keeps all rows
            self._values[place] = values
            self._memory.results.put(self._keys[place], values)
        self.done += len(rows)

    def result(self) -> ScoreOutput:
        """Return the scores, after the flow has ended."""
        rows = [*map(self._values.__getitem__, self._first)]
        values: list[list[float]] = [[]] * len(rows)
        scores = values.copy()
        # Padding would change the order in which a softmax adds, so rows of one length form an array.
        for size in {*map(len, rows)}:
            numbers = [number for number, row in enumerate(rows) if len(row) == size]
            array = np.concatenate([rows[number] for number in numbers]).astype(np.float64).reshape(-1, size)
            for number, row, score in zip(numbers, array.tolist(), self._scores(array).tolist(), strict=True):
                values[number], scores[number] = row, score
        is_logits = self._is_logits
        return ScoreOutput(
            scores=scores,
            logprobs=None if is_logits else values,
            logits=values if is_logits else None,
            algorithm=self.choice[0],
            predicted_seconds=self.choice[1],
            usage=self._usage(),
        )

    @cached_property
    def _is_uniform(self) -> bool:
        """Return whether one token is read of every item, with as many values."""
        return not self._readers and not self.reads and len({*map(len, self.labels)}) < 2

    @property
    def _is_logits(self) -> bool:
        return self.raw or self._frontend.limits.num_labels is not None

    def _scores(self, values: np.ndarray) -> np.ndarray:
        """Return the scores of rows of log-probabilities or logits, float64 `[items, labels]`."""
        if (name := self._frontend.reranker.activation) is not None and self._frontend.limits.num_labels is not None:
            return np.asarray(ACTIVATIONS[name](values))
        if self._is_logits and values.shape[1] == 1:
            return np.asarray(expit(values))
        return np.asarray(softmax(values, axis=1)) if self._is_logits or self.apply_softmax else np.exp(values)

    def _usage(self) -> ScoreUsage:
        """Return the token counts. Tokens of repeated and known items are cached; so is a query that no item needed."""
        lens = self.lens
        spared = sum(lens) - sum(lens[place] for place in self._open)
        total = self.query_len + sum(lens)
        if self.documents is not None:
            return ScoreUsage(total, self._computed, max(total - self._computed, 0))
        query = self.cached_query if self._open else self.query_len * bool(lens)
        return ScoreUsage(total, self._computed, query + spared)


def _bounds(config: EngineConfig, limits: EngineLimits, query_len: int, algorithm: str) -> dict[str, Any]:
    """Return the bounds of `ScoreInputs` within an engine.

    Args:
        config: options of the engine.
        limits: limits of the engine.
        query_len: tokens of the query, leading special tokens included.
        algorithm: name of the algorithm, or `"auto"`.
    """
    _, rows = limits.backends.get(algorithm, (None, 1 << 31))
    budget, room, block = config.max_num_batched_tokens, limits.kv_tokens // 4, limits.block_size
    beside_query = limits.max_request_tokens + query_len // -block * block
    # Leave room for a few decodes of other requests in the same step.
    batch = budget - _OTHERS if budget >= 8 * _OTHERS else budget
    return {
        # Large packs keep the query's share small; several packs must fit the pool.
        "max_pack_tokens": min(max(8192, 4 * query_len, budget), rows),
        "max_pack_slots": max(room, min(2 * query_len, limits.max_request_tokens)),
        "max_batch_tokens": max(batch, 1),
        "max_batch_slots": min(room, beside_query),
        "max_extend_tokens": min(beside_query, config.max_chunk_len),
        "block_size": block,
        "cut_size": limits.cut_size,
        "items_on_pages": limits.items_on_pages or limits.windowed or limits.recurrent,
    }


def computed_rows(request: PrecomputeRequest | ScoreRequest) -> int:
    """Return the tokens that a request computes when the cache holds its prefix for a scoring request, and nothing else."""
    layout = request.layout
    if not isinstance(request, ScoreRequest) or not request.share_prefix:
        return len(layout)
    return layout.question_len - request.state_len if request.state_len else len(layout) - layout.prefix_len
