"""Evaluation of each kind of lines: rows of a comparison, its conclusion, and facts for the report of `chunkattn eval`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from chunkattn.llm import LLM
from chunkattn.terminal.progress import Steps
from chunkattn.tools.eval import decisions
from chunkattn.tools.eval.conditions import conditions_for, focus_conditions, tokenize
from chunkattn.tools.eval.data import Decisions, Question, Ranking
from chunkattn.tools.eval.data_options import EvalData
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.rankings import measured
from chunkattn.tools.eval.rankings import rank as order_documents
from chunkattn.tools.eval.report import Row, compare, compare_rankings, conclusion, focus_hint, ranking_conclusion

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
    rankings = data.of(Ranking)
    with Steps("queries", len(rankings)) as steps:
        orders = order_documents(llm, rankings, data.results, steps.advance)
    before = [list(range(len(ranking.documents))) for ranking in rankings]
    rows = compare_rankings(measured(before, rankings), measured(orders, rankings))
    return rows, ranking_conclusion(rows), {}


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
