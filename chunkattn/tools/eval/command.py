"""Command `chunkattn eval`: measure a model on your data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chunkattn.config import EngineConfig
from chunkattn.terminal.commands import Model, Verbose, app, command, log_to_stderr, make_llm
from chunkattn.terminal.files import JsonFile, Plot, check_files
from chunkattn.terminal.flags import with_options
from chunkattn.terminal.progress import Steps
from chunkattn.tools.eval.data_options import (
    ENGINE,
    NO_CHUNK_LIMIT,
    Data,
    EvalData,
    EvalOptions,
    RecipeOptions,
    model_name,
    take_data,
)
from chunkattn.tools.eval.tables import show

if TYPE_CHECKING:
    from chunkattn.llm import LLM
    from chunkattn.tools.eval.report import Row

_ENGINE = f"{ENGINE} chunk_position_gap chunk_temperature chunk_scale chunk_calibration"


@command(app, "eval")
@with_options((EvalOptions, None), (RecipeOptions, None), (EngineConfig, None, _ENGINE))
def evaluate(
    data: Data, model: Model = None, json_file: JsonFile = None, plot: Plot = None, verbose: Verbose = False, **options: Any
) -> None:
    """Measure a model's loss to isolated documents on your questions, or how well it ranks documents or makes decisions."""
    log_to_stderr(verbose)
    from chunkattn.tools.eval.data import Decisions, Question, Ranking
    from chunkattn.tools.eval.measures import check_ranking_measures
    from chunkattn.tools.eval.report import as_json

    check_files(json_file, plot)
    taken = take_data(data, options)
    kind = type(taken.lines[0])
    if kind is Ranking:
        check_ranking_measures()
    llm = make_llm(model, max_chunk_len=NO_CHUNK_LIMIT, **{name: options[name] for name in _ENGINE.split()})
    rows, conclusion, facts = {Question: _answer, Ranking: _rank, Decisions: _decide}[kind](llm, taken)
    head = {**taken.facts, kind.counted: len(taken.lines), "model": model_name(model), **facts}
    report = {**head, "rows": as_json(rows), "conclusion": conclusion}
    show(rows, f"{model_name(model)}, {len(taken.lines)} {kind.counted} of {taken.name}", conclusion, report, json_file, plot)


def _answer(llm: LLM, data: EvalData) -> tuple[list[Row], str, dict[str, Any]]:
    from chunkattn.tools.eval.conditions import conditions_for, focus_conditions, tokenize
    from chunkattn.tools.eval.data import Question
    from chunkattn.tools.eval.examiner import Examiner
    from chunkattn.tools.eval.report import compare, conclusion, focus_hint

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


def _rank(llm: LLM, data: EvalData) -> tuple[list[Row], str, dict[str, Any]]:
    from chunkattn.tools.eval.data import Ranking
    from chunkattn.tools.eval.rankings import measured, rank
    from chunkattn.tools.eval.report import compare_rankings, ranking_conclusion

    rankings = data.of(Ranking)
    with Steps("queries", len(rankings)) as steps:
        orders = rank(llm, rankings, data.results, steps.advance)
    before = [list(range(len(ranking.documents))) for ranking in rankings]
    rows = compare_rankings(measured(before, rankings), measured(orders, rankings))
    return rows, ranking_conclusion(rows), {}


def _decide(llm: LLM, data: EvalData) -> tuple[list[Row], str, dict[str, Any]]:
    from chunkattn.tools.eval.data import Decisions
    from chunkattn.tools.eval.decisions import compare, conclusion, examine, ways_of

    lines = data.of(Decisions)
    with Steps("states", len(lines)) as steps:
        rows = compare(lines, examine(llm, lines, ways_of(llm), data.results, steps.advance, data.template_options))
    return rows, conclusion(rows, len(lines)), {"questions": sum(len(line.questions) for line in lines)}
