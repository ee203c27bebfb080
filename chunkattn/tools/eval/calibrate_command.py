"""Command `chunkattn calibrate`: find a model's calibration on your data."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from chunkattn.calibration import FILE_NAME, OFF, write_calibration, write_label_scales
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, RequestError
from chunkattn.terminal.commands import Model, Verbose, app, command, console, figures, log_to_stderr, make_llm
from chunkattn.terminal.files import JsonFile, Plot, check_file, check_files, write_json
from chunkattn.terminal.flags import options_for, with_options
from chunkattn.terminal.progress import Steps, say
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
from chunkattn.tools.eval.search import GAPS
from chunkattn.tools.eval.tables import interval, show

if TYPE_CHECKING:
    from chunkattn.llm import LLM
    from chunkattn.tools.eval.search import Trial


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search, and the file of its result.

    Attributes:
        output: file to write, for the option chunk_calibration.
        gap: gap of the coarse grid; repeatable.
        weighing: search temperature and scale as well as the gap.
    """

    output: Path = Path(FILE_NAME)
    gap: tuple[int, ...] = GAPS
    weighing: bool = True


@command(app)
@with_options((SearchOptions, None), (EvalOptions, None), (RecipeOptions, None), (EngineConfig, None, ENGINE))
def calibrate(
    data: Data, model: Model = None, json_file: JsonFile = None, plot: Plot = None, verbose: Verbose = False, **options: Any
) -> None:
    """Find a model's chunk gap, temperature and scale, or its calibration of labels, on half of your data; measure the rest."""
    log_to_stderr(verbose)
    from chunkattn.tools.eval.calibrate import calibrate as find
    from chunkattn.tools.eval.calibrate import few_questions, halves_of
    from chunkattn.tools.eval.conditions import tokenize
    from chunkattn.tools.eval.data import Decisions, Question
    from chunkattn.tools.eval.examiner import Examiner
    from chunkattn.tools.eval.report import as_json, compare

    check_files(json_file, plot)
    how = options_for(SearchOptions, options)
    check_file(how.output)
    if min(how.gap) < 0:
        raise ConfigError(f"--gap must be at least 0, got {min(how.gap)}")
    taken = take_data(data, options)
    engine = {"chunk_calibration": OFF, **{name: options[name] for name in ENGINE.split()}}
    if taken.of(Decisions):
        if how.gap != GAPS or not how.weighing or plot is not None:
            raise ConfigError(f"--gap, --no-weighing and --plot are for questions over documents; {data} holds decisions")
        _fit_labels(make_llm(model, **engine), taken, how.output, model_name(model), json_file)
        return
    if not (questions := taken.of(Question)):
        reason = "calibrate needs questions or decisions, because scores are exact without a calibration"
        raise RequestError(f"{data} holds rankings; {reason}")
    searched = len(halves_of(len(questions)).search)
    weights = 0.8 if how.weighing else None  # any value unlike 1 builds an engine with a calibration
    llm = make_llm(model, max_chunk_len=NO_CHUNK_LIMIT, chunk_temperature=weights, **engine)
    examiner = Examiner(llm, questions, tokenize(llm.parser, questions), taken.results, max_tokens=taken.max_tokens)
    say(
        f"{len(questions)} questions: {searched} for the search, {len(questions) - searched} for the report\n"
        "objective: mean log-probability of a token of the gold answer, shared positions"
    )
    if few := few_questions(len(questions)):
        say(f"warning: {few}")
    gaps = sorted(set(how.gap))
    tried = _TrialLog(len(gaps)).tried
    result = find(examiner, gaps=gaps, weighs=how.weighing, top_n=taken.options.focus, scores=taken.focus_scores, tried=tried)
    rows = compare(result.values)
    notes = {
        "model": model_name(model),
        "document_template": llm.parser.documents.template,
        **taken.facts,
        "objective": "mean log-probability of a token of the gold answer",
        **result.notes(),
    }
    report = {
        **asdict(result.calibration),
        **notes,
        "trials": [{**asdict(trial.calibration), "value": trial.value} for trial in result.trials],
        "rows": as_json(rows),
        "written": str(how.output),
    }
    title = f"{model_name(model)}, {len(result.halves.report)} other questions of {taken.name}"
    text = "\n".join(line for line in (result.conclusion, result.focus_conclusion) if line)
    show(rows, title, text, report, json_file, plot)
    write_calibration(how.output, result.calibration, notes)
    values = "gap {}, temperature {:g}, scale {:g}".format(*asdict(result.calibration).values())
    off = "" if result.calibration == result.best else ", the defaults, because no gain was shown"
    _say_written(how.output, values + off, json_file)


class _TrialLog:
    """Lines about the trials of a search on stderr, with an estimate of its time after two gaps.

    Args:
        gaps: number of gaps of the coarse grid.
    """

    def __init__(self, gaps: int) -> None:
        self._left, self._began, self._seen = gaps, time.monotonic(), set[int]()
        self._best = float("-inf")

    def tried(self, trial: Trial) -> None:
        """Print a trial."""
        gap, temperature, scale = asdict(trial.calibration).values()
        self._seen.add(gap)
        if len(self._seen) == 2 and self._left > 2:
            # Each gap takes about as long. The refinement takes as long as three gaps, the report as one.
            taken = time.monotonic() - self._began
            say(f"two gaps took {taken:.0f} s; about {taken / 2 * (self._left + 2) / 60:.0f} minutes are left")
            self._left = 0
        better, self._best = trial.value > self._best, max(trial.value, self._best)
        say(f"gap {gap:4}  T {temperature:4.2f}  S {scale:4.2f}  {trial.value:8.4f}{'  best so far' if better else ''}")


def _fit_labels(llm: LLM, data: EvalData, output: Path, model: str, json_file: str | None) -> None:
    """Fit the calibration of labels, print its table, and write what the other half shows to be a gain."""
    from chunkattn.tools.eval.data import Decisions
    from chunkattn.tools.eval.decisions import examine
    from chunkattn.tools.eval.labels import SOURCES, calibrate_labels, notes_of, samples_of

    lines, variables = data.of(Decisions), data.template_options
    with Steps("states", len(lines)) as steps:
        answers = examine(llm, lines, SOURCES, data.results, steps.advance, variables)
    fits = calibrate_labels(samples_of(llm, lines, answers, variables), len(lines))
    report = notes_of(fits, data.name)
    kept = {kind: fit.scale for kind, fit in fits.items() if fit.is_kept}
    if write_json({**report, "written": str(output)}, json_file):
        title = escape(f"{model}, labels fitted on half of {data.name}, measured on the other half")
        columns = ("labels", "temperature", "log loss", "calibrated", "change [95%]", "kept")
        table = figures(*columns, title=title, texts=("labels",))
        for kind, fit in fits.items():
            losses = (f"{value:.3f}" for value in (fit.scale.temperature, fit.before, fit.after))
            table.add_row(kind, *losses, interval(fit.change), "yes" if fit.is_kept else "no")
        table.caption = "log loss: nats per question; only kinds whose interval lies below 0 are kept"
        console.print(table)
    write_label_scales(output, kept, model, report)
    _say_written(output, ", ".join(kept) or "no calibration of labels, because no gain was shown", json_file)


def _say_written(output: Path, text: str, json_file: str | None) -> None:
    if json_file != "-":
        console.print(f"written: {escape(str(output))} ({text})", soft_wrap=True)
