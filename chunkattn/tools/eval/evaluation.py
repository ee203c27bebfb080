"""Evaluation of each kind of lines: rows of a comparison, its conclusion, and facts for the report of `chunkattn eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from chunkattn.llm import LLM
from chunkattn.terminal.progress import Steps
from chunkattn.tools.eval import decisions
from chunkattn.tools.eval.conditions import conditions_for, focus_conditions, tokenize
from chunkattn.tools.eval.data import Decisions, Question, Ranking, at_line
from chunkattn.tools.eval.data_options import EvalData
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.measures import RANKING_MEASURES, ranking_measures
from chunkattn.tools.eval.report import Row, compare, compare_rankings, conclusion, focus_hint, ranking_conclusion
from chunkattn.tools.eval.results import Results, result_key

Evaluation = tuple[list[Row], str, dict[str, Any]]
"""Rows, conclusion, and fields of the report."""


def answer(llm: LLM, data: EvalData) -> Evaluation:
    """Answer questions under every condition.

    Args:
        llm: engine.
        data: questions.
    """
    questions, calibration, top_n = data.of(Question), llm.config.calibration, data.options.focus
    gold = all(question.gold is not None for question in questions)
    conditions = [
        *conditions_for(calibration, gold=gold),
        *focus_conditions(calibration, top_n, data.focus_scores, gold=gold and top_n > 0),
    ]
    prompts = tokenize(llm.parser, questions)
    with Steps("answers", 2 * len(conditions) * len(questions)) as steps:
        examiner = Examiner(llm, questions, prompts, data.results, max_tokens=data.max_tokens, advance=steps.advance)
        examiner.check(conditions)
        values = examiner.examine(conditions, range(len(questions)), texts=True)
    text = conclusion(values, calibration) + (f" {focus_hint(values)}" if top_n else "")
    return compare(values), text, {"document_template": llm.parser.documents.template, **asdict(calibration)}


def rank(llm: LLM, data: EvalData) -> Evaluation:
    """Rank the documents of every query.

    Args:
        llm: engine.
        data: rankings.
    """
    rankings, model = data.of(Ranking), llm.core.runner.fingerprint().hex()
    orders = []
    with Steps("queries", len(rankings)) as steps:
        for ranking in rankings:
            orders.append(_order(llm, ranking, data.results, model))
            steps.advance(1)
    before = [list(range(len(ranking.documents))) for ranking in rankings]
    rows = compare_rankings(_measured(before, rankings), _measured(orders, rankings))
    return rows, ranking_conclusion(rows), {}


def _order(llm: LLM, ranking: Ranking, results: Results, model: str) -> list[int]:
    """Return the model's order of a query's documents, as places, the best first. A new result is kept."""
    key = result_key("ranking", model, llm.config.model, ranking.query, ranking.documents)
    if key not in results:
        with at_line(ranking.line):
            output = llm.rerank(ranking.query, ranking.documents, use_tqdm=False)
        results.add([{"key": key, "line": ranking.line, "order": [result.index for result in output.results]}])
    return [*results[key]["order"]]


def _measured(orders: Sequence[Sequence[int]], rankings: Sequence[Ranking]) -> dict[str, np.ndarray]:
    """Return every measure of every ranking, float64 `[rankings]`, by name.

    Args:
        orders: places of the documents, the best first.
        rankings: queries with the grades of their documents.
    """
    rows = [ranking_measures(order, ranking.relevance) for order, ranking in zip(orders, rankings, strict=True)]
    return {name: np.asarray([row[name] for row in rows]) for name in RANKING_MEASURES}


def decide(llm: LLM, data: EvalData) -> Evaluation:
    """Make decisions in every way.

    Args:
        llm: engine.
        data: decisions.
    """
    lines = data.of(Decisions)
    with Steps("states", len(lines)) as steps:
        ways = decisions.ways_of(llm)
        answers = decisions.examine(llm, lines, ways, data.results, steps.advance, data.template_options)
    rows = decisions.compare(lines, answers)
    return rows, decisions.conclusion(rows, len(lines)), {"questions": sum(len(line.questions) for line in lines)}
