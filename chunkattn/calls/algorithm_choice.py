"""Choice of a scoring algorithm: which ones can serve a call, their predicted cost, and the one that runs.

The predicted cost is the steps, rows and visited tiles of a call, times the engine's rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from chunkattn.calls.algorithms import ALGORITHMS, AUTO, PACKED, ScoreInputs
from chunkattn.engine.messages import StepRates
from chunkattn.engine.rates import TILE_ROWS, TILE_SLOTS
from chunkattn.engine.step_sizes import StepSizes
from chunkattn.errors import ConfigError, RequestError

EQUAL = 1.01
"""Costs within this factor count as equal; the first of `AUTO` then wins."""
STEADY = 1.13
"""Maximum loss accepted to keep the choice independent of the cache's contents, and to leave the query in the cache."""


def predict(call: ScoreInputs, rates: StepRates, steps: StepSizes) -> tuple[dict[str, float], float]:
    """Return the predicted seconds of every algorithm of `AUTO` by name, and those of `prefill_extend` with a cached query.

    Args:
        call: query and items.
        rates: the engine's rates.
        steps: sizes of the engine's steps.
    """
    query, lens = call.query_len, call.lens

    def seconds(rows: Sequence[int], area: float) -> float:
        """Return the time in seconds of parts that run one at a time.

        Args:
            rows: rows of each part.
            area: tile area of all parts together.
        """
        padded = [size for part in rows for size in steps.cut(part)]
        return rates.step * len(padded) + rates.row * sum(padded) + rates.area * area

    filled = [n for n in lens if n]
    packs, batches = list(call.packs(lens)), list(call.batches(filled))
    alone = _causal(query)
    extend = seconds(
        [sum(filled[first:last]) for first, last in batches],
        sum(_behind(query, filled[first:last]) for first, last in batches),
    )
    if len(filled) < len(lens):
        again = (query - 1) % call.cut_size + 1
        extend += seconds([again], _behind(query - again, [again]))
    costs = {
        "serial": seconds(
            [sum(lens) + query * len(lens)], sum(number * _causal(query + n) for n, number in Counter(lens).items())
        ),
        "packed_segment": seconds(
            [query + sum(lens[first:last]) for first, last in packs],
            sum(alone + _behind(query, lens[first:last], query) for first, last in packs),
        ),
        "prefill_extend": extend + seconds([query], alone),
    }
    return costs, extend


def _causal(tokens: int) -> int:
    """Return the area of the tiles that plain causal rows visit."""
    tiles = -(-tokens // TILE_ROWS)
    return sum(-(-min((tile + 1) * TILE_ROWS, tokens) // TILE_SLOTS) for tile in range(tiles)) * TILE_ROWS * TILE_SLOTS


def _behind(query: int, lens: Sequence[int], before: int = 0) -> float:
    """Return the area of the tiles that items packed after a query visit: the query's tiles, and about the item's own.

    Args:
        query: tokens of the query.
        lens: tokens of each item.
        before: rows of the same sequence before the items. The items fill up the last query tile of these rows.
    """
    rows = sum(lens)
    if not rows:
        return 0.0
    seen = sum(n * n for n in lens) / rows / 2  # mean slots before a row in its own item
    tiles = -(-query // TILE_SLOTS) + (TILE_ROWS + seen) / TILE_SLOTS + 0.5
    query_tiles = -(-(before + rows) // TILE_ROWS) - -(-before // TILE_ROWS)
    return query_tiles * tiles * TILE_ROWS * TILE_SLOTS


def refusals(call: ScoreInputs, *, caching: bool, backends: Mapping[str, tuple[str | None, int]]) -> dict[str, str]:
    """Return the reason for each algorithm that cannot serve a call.

    Args:
        call: query and items.
        caching: whether the engine caches prefixes.
        backends: see `EngineLimits`.
    """
    refused = {name: reason for name, (reason, _) in backends.items() if reason}
    first, last = "query", f"longest {call.names.chunk}"
    if call.item_first:
        first, last = call.names.chunk, "query"
        turned = f"every {first} comes before the query, which leaves no shared prefix"
        refused |= dict.fromkeys(PACKED, turned)
    if not caching:
        refused["prefill_extend"] = f"it keeps the {first} in the cache, and this engine has enable_prefix_caching=False"
    item = max(call.lens, default=0)
    longest = call.query_len + item
    if item > call.max_extend_tokens:
        refused.setdefault(
            "prefill_extend",
            f"the {last} of {item} tokens does not fit the KV pool on pages of its own beside the {first}'s; "
            f"there is room for {max(call.max_extend_tokens, 0)}",
        )
    for name, (_, rows) in backends.items():
        if longest > rows:
            text = f"the query and its longest {call.names.chunk} are {longest} tokens, a pack has at most {rows}"
            refused.setdefault(name, text)
    return refused


def too_costly(calls: Sequence[ScoreInputs], limit: int) -> dict[str, str]:
    """Return the reason for each algorithm that would compute too much.

    Args:
        calls: all queries of one call, with their items.
        limit: the engine's `max_tokens_per_call`.
    """
    totals: Counter[str] = Counter()
    for call in calls:
        totals.update(call.tokens())
    return {
        name: f"it would compute {tokens} tokens for this call, max_tokens_per_call is {limit}"
        for name, tokens in totals.items()
        if tokens > limit
    }


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
    item_first: bool = False,
) -> tuple[str, dict[str, float]]:
    """Choose the algorithm to run: the named algorithm, or for `"auto"` the cheapest algorithm.

    Where the item comes first, `"auto"` takes `prefill_extend` if the item is cached, else `serial`, which keeps no item.

    Args:
        name: name of an algorithm, or `"auto"`.
        refused: see `refusals`.
        costs: predicted seconds by algorithm, for a query that is not in the cache.
        cached: predicted seconds of `prefill_extend` with a cached query.
        query_cached: whether the query is probably in the cache.
        before: earlier choice of `"auto"` for a request of the same query and lengths, to be repeated where algorithms round
            differently; else None.
        item_first: see `ScoreInputs`.

    Returns:
        The name of the algorithm, and the predicted seconds of each algorithm that `"auto"` may choose and that can serve the
        call.

    Raises:
        RequestError: the algorithm is unknown or cannot serve this call; the message gives the reason.
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
        return name, possible
    if item_first:
        return "prefill_extend" if query_cached and "prefill_extend" in possible else "serial", possible
    if before in possible:
        return before, possible
    others = {n: cost for n, cost in possible.items() if n != "prefill_extend"}
    least = min(others.values(), default=float("inf"))
    chosen = next((n for n, cost in others.items() if cost <= EQUAL * least), "prefill_extend")
    if "prefill_extend" in possible and least > STEADY * cached:  # the cache saves time
        gains = query_cached or costs["prefill_extend"] <= STEADY * least
        chosen = "prefill_extend" if gains else chosen
    return chosen, possible
