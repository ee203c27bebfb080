"""`ItemsFirst`: scoring of items that come before their query, each item as the prefix of a call of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from chunkattn.calls.frontend import Frontend
from chunkattn.calls.score import ScoreCall
from chunkattn.outputs import ScoreOutput, ScoreUsage


class ItemsFirst:
    """Calls that score one query behind each of its items. Equal items with equal labels share a call.

    Cached items are read from the prefix cache by `prefill_extend`; `serial` computes them. Both give equal bits, because the
    item is a part of its own in both, and the query another.

    Args:
        frontend: frontend of the engine.
        items: token ids of each item with all tokens before it; they fit the engine with the query.
        query: token ids after every item, at least one.
        labels: token ids to read after the query, one list per item; empty for a classifier.
        algorithm: see `LLM.score`.
        **options: other options of `ScoreCall`.

    Attributes:
        calls: the calls, at least one, so that an algorithm is checked without items as well.

    Raises:
        RequestError: the priority or the salt is invalid.
    """

    def __init__(
        self,
        frontend: Frontend,
        items: Sequence[list[int]],
        query: list[int],
        labels: Sequence[tuple[int, ...]],
        *,
        algorithm: str | None,
        **options: Any,
    ) -> None:
        different: dict[tuple[tuple[int, ...], tuple[int, ...] | None], int] = {}
        keys = [(tuple(item), labels[place] if labels else None) for place, item in enumerate(items)]
        self._places = [different.setdefault(key, len(different)) for key in keys]
        self._items, self._query = items, query
        algorithm = algorithm or frontend.config.score_algorithm

        def call(item: list[int], queries: list[list[int]], read: list[tuple[int, ...]]) -> ScoreCall:
            nothing_to_keep = queries and not item and algorithm in ("auto", "prefill_extend")
            chosen = "serial" if nothing_to_keep else algorithm
            return ScoreCall(frontend, item, queries, read, algorithm=chosen, item_first=True, **options)

        self.calls = [call([*item], [query], [] if read is None else [read]) for item, read in different]
        self.calls = self.calls or [call([], [], [])]

    def merge(self, outputs: Sequence[ScoreOutput]) -> ScoreOutput:
        """Return the scores of all items.

        Args:
            outputs: output of each of `calls`.
        """
        used = [outputs[place] for place in self._places]
        seconds = Counter[str]()
        for output in outputs:
            seconds.update(output.predicted_seconds)
        first = outputs[0]
        return ScoreOutput(
            scores=[output.scores[0] for output in used],
            logprobs=None if first.logprobs is None else [row for output in used for row in output.logprobs or ()],
            logits=None if first.logits is None else [row for output in used for row in output.logits or ()],
            algorithm="+".join(sorted({output.algorithm for output in outputs})),
            predicted_seconds=dict(seconds),
            usage=self._usage(outputs),
        )

    def _usage(self, outputs: Sequence[ScoreOutput]) -> ScoreUsage:
        """Return the token counts. The query counts once; tokens of repeated and known items are cached."""
        prompt = len(self._query) + sum(map(len, self._items))
        computed = sum(output.usage.computed_tokens for output in outputs)
        if not computed:
            return ScoreUsage(prompt, 0, prompt if self._items else 0)
        cached, seen = 0, set[int]()
        for place, item in zip(self._places, self._items, strict=True):
            usage = outputs[place].usage
            is_new = usage.computed_tokens and place not in seen
            cached += usage.cached_tokens if is_new else len(item)
            seen.add(place)
        return ScoreUsage(prompt, computed, cached)
