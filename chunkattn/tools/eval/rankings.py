"""Rankings of a data file by the model, measured against the grades of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from chunkattn.llm import LLM
from chunkattn.tools.eval.data import Ranking, at_line
from chunkattn.tools.eval.measures import RANKING_MEASURES, ranking_measures
from chunkattn.tools.eval.results import Results, result_key


def rank(llm: LLM, rankings: Sequence[Ranking], results: Results, advance: Callable[[int], None]) -> list[list[int]]:
    """Return the model's order of the documents of every query, as places, the best first.

    Args:
        llm: engine.
        rankings: queries and documents.
        results: earlier results; new results are added.
        advance: called with 1 after every query.

    Raises:
        RequestError: a query cannot be ranked. The message names its line.
        EngineError: a step failed.
    """
    model, orders = llm.core.runner.fingerprint().hex(), []
    for ranking in rankings:
        key = result_key("ranking", model, llm.config.model, ranking.query, ranking.documents)
        if key not in results:
            with at_line(ranking.line):
                output = llm.rerank(ranking.query, ranking.documents, use_tqdm=False)
            results.add([{"key": key, "line": ranking.line, "order": [result.index for result in output.results]}])
        orders.append([*results[key]["order"]])
        advance(1)
    return orders


def measured(orders: Sequence[Sequence[int]], rankings: Sequence[Ranking]) -> dict[str, np.ndarray]:
    """Return every measure of every ranking, float64 `[rankings]`, by name.

    Args:
        orders: places of the documents, the best first.
        rankings: queries with the grades of their documents.
    """
    rows = [ranking_measures(order, ranking.relevance) for order, ranking in zip(orders, rankings, strict=True)]
    return {name: np.asarray([row[name] for row in rows]) for name in RANKING_MEASURES}
