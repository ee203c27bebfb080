"""Scores and tokens of a server's answers, and the difference between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chunkattn.errors import EngineError

Score = tuple[float, ...]
"""Values of one item: its relevance, or one for each label."""


def read_scores(answer: Any, items: int) -> list[Score]:
    """Return the scores of a rerank or score answer, in the order of the items.

    Args:
        answer: body of the answer, in any form of `SCORINGS`; a list is text-embeddings-inference's (TEI).
        items: number of items asked for.

    Raises:
        EngineError: the answer has no scores, another number of them, or a value that is no finite number.
    """
    entries = answer
    if isinstance(answer, dict):
        entries = next((answer[name] for name in ("results", "scores", "data") if isinstance(answer.get(name), list)), None)
    if not isinstance(entries, list):
        raise EngineError(f"the answer has no scores: {_short(answer)}")
    if len(entries) != items:
        raise EngineError(f"the answer has {len(entries)} scores for {items} items")
    scores: dict[int, Score] = {}
    for place, entry in enumerate(entries):
        index, value = place, entry
        if isinstance(entry, dict):
            index, value = entry.get("index", place), entry.get("relevance_score", entry.get("score"))
        if not isinstance(index, int) or not 0 <= index < items or index in scores:
            raise EngineError(f"the answer has a score of item {_short(index)}, which is no item or has one already")
        scores[index] = tuple(_number(each) for each in (value if isinstance(value, list) and value else [value]))
    return [scores[index] for index in range(items)]


@dataclass(frozen=True)
class Tokens:
    """Greedy answer of a generation.

    Attributes:
        names: names of the tokens.
        likeliest: log-probabilities at each token, of the token itself and of the likeliest tokens, by name.
    """

    names: tuple[str, ...]
    likeliest: tuple[dict[str, float], ...]


def read_tokens(answer: Any) -> Tokens:
    """Return the tokens of a completion or chat that was asked for log-probabilities.

    Raises:
        EngineError: the answer has no tokens with log-probabilities.
    """
    try:
        logprobs = answer["choices"][0]["logprobs"]
        if "content" in logprobs:
            entries = [(entry, entry.get("top_logprobs") or []) for entry in logprobs["content"]]
            names = [entry["token"] for entry, _ in entries]
            tables = [{each["token"]: each["logprob"] for each in (*tops, entry)} for entry, tops in entries]
        else:
            names = logprobs["tokens"]
            tops = logprobs.get("top_logprobs") or [{}] * len(names)
            tables = [
                {**(top or {}), name: value} for name, value, top in zip(names, logprobs["token_logprobs"], tops, strict=True)
            ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise EngineError(f"the answer has no log-probabilities of tokens: {_short(answer)}") from None
    return Tokens(tuple(names), tuple({name: _number(value) for name, value in table.items()} for table in tables))


@dataclass
class Tally:
    """Comparison of one condition's answers with the first answers.

    Attributes:
        kind: `scores` or `texts`.
        condition: name of the condition.
        answers: number of compared answers: scores of an item, or generated texts.
        differ: number of answers with any differing number or token.
        flips: number of answers that say something else.
        drift: largest change of a score, or of a token's probability.
    """

    kind: str
    condition: str
    answers: int = 0
    differ: int = 0
    flips: int = 0
    drift: float = 0.0

    def add_scores(self, first: Sequence[Score], now: Sequence[Score], *, is_labelled: bool) -> None:
        """Compare the scores of one query's items.

        A score flips if its item has another place in the order of the items, or its first label's probability is on the
        other side of 0.5.

        Args:
            first: first scores of the items.
            now: scores of the same items, in the same order.
            is_labelled: whether scores are probabilities of labels, so that 0.5 decides something.
        """
        for before, after, place, new_place in zip(first, now, _places(first), _places(now), strict=True):
            if len(before) != len(after):
                raise EngineError(f"a score had {len(before)} values first and {len(after)} values later")
            crosses = is_labelled and (before[0] >= 0.5) != (after[0] >= 0.5)
            self._add(before != after, crosses or place != new_place, max(abs(a - b) for a, b in zip(before, after)))

    def add_tokens(self, first: Tokens, now: Tokens) -> None:
        """Compare a generated text. It flips if any token is another one; probabilities count up to the first such token."""
        drift, same = 0.0, first.names == now.names
        for name, new_name, before, after in zip(first.names, now.names, first.likeliest, now.likeliest):
            # At the edge of the likeliest tokens, ties decide which ones are listed.
            changed = [abs(math.exp(before[each]) - math.exp(after[each])) for each in before if each in after]
            same = same and all(before[each] == after[each] for each in before if each in after)
            drift = max(drift, *changed) if changed else drift
            if name != new_name:
                break
        self._add(not same, first.names != now.names, drift)

    def _add(self, differs: bool, flips: bool, drift: float) -> None:
        self.answers += 1
        self.differ += differs
        self.flips += flips
        self.drift = max(self.drift, drift)


def verdict(tallies: Sequence[Tally]) -> str:
    """Return one line about all conditions."""
    answers, differ, flips = (sum(getattr(tally, name) for tally in tallies) for name in ("answers", "differ", "flips"))
    drift = max((tally.drift for tally in tallies), default=0.0)
    if not differ:
        return f"0 of {answers} answers flip, 0 differ; probabilities move by 0.0"
    return (
        f"{flips} of {answers} answers flip ({flips / answers:.1%}), {differ} differ ({differ / answers:.1%}); "
        f"probabilities move by up to {drift:.2g}. A first answer that is the odd one counts in every condition."
    )


def _places(scores: Sequence[Score]) -> list[int]:
    """Return the place of each item in the order of falling scores; items of equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda item: -scores[item][0])
    return sorted(range(len(scores)), key=order.__getitem__)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineError(f"the answer has {_short(value)} where a finite number belongs")
    return float(value)


def _short(answer: Any) -> str:
    text = repr(answer)
    return text if len(text) <= 200 else text[:200] + " ..."
