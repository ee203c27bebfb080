"""Predicted cost of the scoring algorithms: steps, rows and visited tiles of a job, times the engine's rates."""

from __future__ import annotations

from collections.abc import Sequence

from chunkattn.accounting import groups
from chunkattn.engine.buckets import bucket_for, buckets, trimmed
from chunkattn.engine.messages import StepRates
from chunkattn.engine.rates import TILE_ROWS, TILE_SLOTS
from chunkattn.scoring.algorithms import QueryItems


def predict(job: QueryItems, rates: StepRates, budget: int, *, query_cached: bool) -> dict[str, float]:
    """Return the predicted seconds of every algorithm of `AUTO`, by name.

    Args:
        job: the job to score.
        rates: the engine's rates.
        budget: maximum number of rows of a step.
        query_cached: whether `prefill_extend` finds the query in the cache.
    """
    query, lens = len(job.prefix), [len(item) for item in job.items]
    sizes = buckets(8, max(budget, 8), 2)

    def seconds(rows: Sequence[int], area: float) -> float:
        """Return the time in seconds of parts that run one at a time.

        Args:
            rows: rows of each part.
            area: tile area of all parts together.
        """
        padded = [size for part in rows for size in _steps(part, sizes)]
        return rates.step * len(padded) + rates.row * sum(padded) + rates.area * area

    packs = list(groups(lens, job.max_pack_tokens - query, job.unit))
    batches = list(groups([n for n in lens if n], job.max_batch_tokens, job.unit))
    filled = [n for n in lens if n]
    alone = _causal(query)
    costs = {
        "serial": seconds([sum(lens) + query * len(lens)], sum(_causal(query + n) for n in lens)),
        "packed_segment": seconds(
            [query + sum(lens[first:last]) for first, last in packs],
            sum(alone + _behind(query, lens[first:last], query) for first, last in packs),
        ),
        "prefill_extend": seconds(
            [sum(filled[first:last]) for first, last in batches],
            sum(_behind(query, filled[first:last]) for first, last in batches),
        ),
    }
    if not query_cached:
        costs["prefill_extend"] += seconds([query], alone)
    if len(filled) < len(lens):
        again = (query - 1) % job.block_size + 1
        costs["prefill_extend"] += seconds([again], _behind(query - again, [again]))
    return costs


def _steps(rows: int, sizes: Sequence[int]) -> list[int]:
    """Return the padded sizes of the steps that `rows` rows of one part take."""
    steps = []
    while rows > 0:
        taken = trimmed(rows, sizes)
        steps.append(bucket_for(taken, sizes))
        rows -= taken
    return steps


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
    own = sum(n * n for n in lens) / rows / 2  # mean slots before a row in its own item
    tiles = -(-query // TILE_SLOTS) + (TILE_ROWS + own) / TILE_SLOTS + 0.5
    query_tiles = -(-(before + rows) // TILE_ROWS) - -(-before // TILE_ROWS)
    return query_tiles * tiles * TILE_ROWS * TILE_SLOTS
