"""Command `chunkattn eval`: measure a model on your data."""

from __future__ import annotations

from typing import Any

from chunkattn.config import EngineConfig
from chunkattn.terminal.commands import Model, Verbose, app, command, log_to_stderr, make_llm
from chunkattn.terminal.files import JsonFile, Plot, check_files
from chunkattn.terminal.flags import with_options
from chunkattn.tools.eval.data_options import (
    ENGINE,
    NO_CHUNK_LIMIT,
    Data,
    EvalOptions,
    RecipeOptions,
    model_name,
    take_data,
)
from chunkattn.tools.eval.tables import show

_ENGINE = f"{ENGINE} chunk_position_gap chunk_temperature chunk_scale chunk_calibration"


@command(app, "eval")
@with_options((EvalOptions, None), (RecipeOptions, None), (EngineConfig, None, _ENGINE))
def evaluate(
    data: Data, model: Model = None, json_file: JsonFile = None, plot: Plot = None, verbose: Verbose = False, **options: Any
) -> None:
    """Measure a model's loss to isolated documents on your questions, or how well it ranks documents or makes decisions."""
    log_to_stderr(verbose)
    from chunkattn.tools.eval import evaluation
    from chunkattn.tools.eval.data import Decisions, Question, Ranking
    from chunkattn.tools.eval.measures import check_ranking_measures
    from chunkattn.tools.eval.report import as_json

    check_files(json_file, plot)
    taken = take_data(data, options)
    kind = type(taken.lines[0])
    evaluate_kind = {Question: evaluation.answer, Ranking: evaluation.rank, Decisions: evaluation.decide}[kind]
    if kind is Ranking:
        check_ranking_measures()
    llm = make_llm(model, max_chunk_len=NO_CHUNK_LIMIT, **{name: options[name] for name in _ENGINE.split()})
    rows, conclusion, facts = evaluate_kind(llm, taken)
    head = {**taken.facts, kind.counted: len(taken.lines), "model": model_name(model), **facts}
    report = {**head, "rows": as_json(rows), "conclusion": conclusion}
    show(rows, f"{model_name(model)}, {len(taken.lines)} {kind.counted} of {taken.name}", conclusion, report, json_file, plot)
