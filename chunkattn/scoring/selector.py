"""The selection of the algorithm for a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chunkattn.errors import ConfigError, RequestError
from chunkattn.scoring.algorithms import ALGORITHMS, AUTO, BACKENDS, QueryItems

EQUAL = 1.01
"""Costs within this factor count as equal; the first of `AUTO` then wins."""
STEADY = 1.13
"""Maximum loss accepted to keep the choice independent of the cache's contents, and to leave the query in the cache."""


@dataclass(frozen=True)
class Choice:
    """The algorithm of a job.

    Attributes:
        algorithm: name of the algorithm.
        predicted_seconds: predicted seconds of each algorithm that `"auto"` may choose and that can serve the job.
    """

    algorithm: str
    predicted_seconds: Mapping[str, float]


def refusals(
    job: QueryItems, *, sliding_window: int | None, caching: bool, backends: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the reason for each algorithm that cannot serve a job.

    Args:
        job: the job to score.
        sliding_window: the model's sliding window in tokens, or None.
        caching: whether the engine caches prefixes.
        backends: see `EngineLimits`.
    """
    reason = None
    if job.item_first:
        reason = "item_first leaves no shared prefix"
    elif sliding_window is not None:
        reason = f"the checkpoint's sliding window of {sliding_window} tokens has no meaning across packed items"
    if reason:
        return {name: reason for name in ALGORITHMS if name != "serial"}
    refused = {name: reason for name, backend in BACKENDS.items() if (reason := backends.get(backend))}
    if not caching:
        refused["prefill_extend"] = "it keeps the query in the cache, and this engine has enable_prefix_caching=False"
    item = max(map(len, job.items), default=0)
    longest = len(job.prefix) + item
    if item > job.max_extend_tokens:
        refused.setdefault(
            "prefill_extend",
            f"an item of {item} tokens does not fit the KV pool on pages of its own beside the query's; there is room for "
            f"{max(job.max_extend_tokens, 0)}",
        )
    if longest > job.max_multi_item_seq_len:
        refused.setdefault(
            "packed_dense",
            f"the query and its longest item are {longest} tokens, the mask of a pack is bounded by "
            f"max_multi_item_seq_len {job.max_multi_item_seq_len}",
        )
    return refused


def check_algorithm(name: str) -> None:
    """Check the name of an engine's default algorithm.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in (*ALGORITHMS, "auto"):
        raise ConfigError(f"score_algorithm {name!r} is unknown; choose auto, {', '.join(ALGORITHMS)}")


def select_algorithm(
    name: str,
    refused: Mapping[str, str],
    costs: Mapping[str, float],
    cached: float,
    *,
    query_cached: bool,
    before: str | None = None,
) -> Choice:
    """Choose the algorithm to run: the named algorithm, or for `"auto"` the cheapest algorithm.

    Args:
        name: name of an algorithm, or `"auto"`.
        refused: see `refusals`.
        costs: predicted seconds by algorithm, for a query that is not in the cache.
        cached: predicted seconds of `prefill_extend` with a cached query.
        query_cached: whether the query is probably in the cache.
        before: earlier choice of `"auto"` for a request of the same query and lengths, to be repeated where algorithms round
            differently; else None.

    Raises:
        RequestError: the algorithm is unknown or cannot serve this job; the message gives the reason.
    """
    if name not in (*ALGORITHMS, "auto"):
        raise RequestError(f"unknown algorithm {name!r}; choose auto, {', '.join(ALGORITHMS)}", param="algorithm")
    if name in refused:
        fit = next((f"; use {n!r}" for n in ALGORITHMS if n not in refused), "")
        raise RequestError(f"algorithm {name!r} cannot serve this request: {refused[name]}{fit}", param="algorithm")
    possible = {n: costs[n] for n in AUTO if n not in refused}
    if query_cached and "prefill_extend" in possible:
        possible["prefill_extend"] = cached
    if name != "auto":
        return Choice(name, possible)
    if before in possible:
        return Choice(before, possible)
    others = {n: cost for n, cost in possible.items() if n != "prefill_extend"}
    least = min(others.values(), default=float("inf"))
    chosen = next((n for n, cost in others.items() if cost <= EQUAL * least), "prefill_extend")
    if "prefill_extend" in possible and least > STEADY * cached:  # the cache saves time
        gains = query_cached or costs["prefill_extend"] <= STEADY * least
        chosen = "prefill_extend" if gains else chosen
    return Choice(chosen, possible)
