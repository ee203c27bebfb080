"""Commands `chunkattn eval` and `chunkattn calibrate`: what isolation costs a model, and the values that win it back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from chunkattn.calibration import FILE_NAME, OFF, write_calibration
from chunkattn.cli.bench import JsonFile, Plot, check_files, save_picture
from chunkattn.cli.common import Backend, Dtype, KVCacheDtype, Model, Verbose, app, command, console, log_to_stderr, make_llm
from chunkattn.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from chunkattn.evaluation.data import Ranking
    from chunkattn.evaluation.measures import Mean
    from chunkattn.evaluation.report import Row
    from chunkattn.evaluation.results import Results
    from chunkattn.evaluation.search import Trial

Data = Annotated[Path, typer.Argument(help="File of JSON lines: questions with documents and answers, or rankings.")]
Template = Annotated[
    str | None,
    typer.Option("--document-template", help="Text of a document's chunk, {document} in it; by default the engine's own."),
]
Limit = Annotated[int | None, typer.Option(help="Number of questions or rankings to read; by default all.")]
ResultsFile = Annotated[
    Path | None,
    typer.Option(help="File of single results, so that a run can stop and continue; by default DATA.results.jsonl here."),
]
PoolBytes = Annotated[int | None, typer.Option("--kv-cache-memory-bytes", help="Size of the KV pool in bytes.")]


@command(app, "eval")
def evaluate(
    data: Data,
    model: Model = None,
    document_template: Template = None,
    chunk_position_gap: Annotated[int | None, typer.Option(help="Positions left free before every chunk.")] = None,
    chunk_temperature: Annotated[
        float | None, typer.Option(help="Divisor of the question's attention scores to chunks.")
    ] = None,
    chunk_scale: Annotated[float | None, typer.Option(help="Factor of the log-sum-exp of those scores.")] = None,
    chunk_calibration: Annotated[
        str | None, typer.Option(help="File of the three values; 'off' ignores the file in the model's folder.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Number of tokens of a greedy answer at most.")] = 32,
    limit: Limit = None,
    results: ResultsFile = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    attention_backend: Backend = "auto",
    kv_cache_memory_bytes: PoolBytes = None,
    verbose: Verbose = False,
) -> None:
    """Measure what isolated documents cost a model on your questions, or how well it ranks your documents."""
    log_to_stderr(verbose)
    from chunkattn.evaluation.conditions import DEFAULT_TEMPLATE, check_template, conditions_for
    from chunkattn.evaluation.data import Ranking, read_data
    from chunkattn.evaluation.examiner import Examiner
    from chunkattn.evaluation.report import as_json, compare, conclusion
    from chunkattn.evaluation.results import Results

    check_files(json_file, plot)
    template = check_template(DEFAULT_TEMPLATE if document_template is None else document_template)
    read = read_data(data, _at_least_one("limit", limit))
    known = Results(results or Path(f"{data.stem}.results.jsonl"))
    options: dict[str, Any] = {
        "chunk_position_gap": chunk_position_gap,
        "chunk_temperature": chunk_temperature,
        "chunk_scale": chunk_scale,
        "chunk_calibration": chunk_calibration,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "attention_backend": attention_backend,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
    }
    rankings = [line for line in read if isinstance(line, Ranking)]
    questions = [line for line in read if not isinstance(line, Ranking)]
    if rankings:
        _rank(rankings, known, data, model, options, json_file, plot)
        return
    llm = make_llm(model, **options)
    calibration = llm.config.calibration
    conditions = conditions_for(calibration, gold=all(question.gold is not None for question in questions))
    with Steps("answers", 2 * len(conditions) * len(questions)) as steps:
        examiner = Examiner(llm, questions, template, known, max_tokens=max_tokens, advance=steps.advance)
        examiner.check(conditions)
        values = examiner.examine(conditions, range(len(questions)), texts=True)
    rows, said = compare(values), conclusion(values, calibration)
    report = {
        "data": data.name,
        "questions": len(questions),
        "model": _name(model),
        "document_template": template,
        **asdict(calibration),
        "rows": as_json(rows),
        "conclusion": said,
    }
    _show(rows, f"{_name(model)}, {len(questions)} questions of {data.name}", said, report, json_file, plot)


def _rank(
    rankings: Sequence[Ranking],
    known: Results,
    data: Path,
    model: str | None,
    options: dict[str, Any],
    json_file: str | None,
    plot: Path | None,
) -> None:
    from chunkattn.evaluation.measures import check_ranking_measures
    from chunkattn.evaluation.rankings import measured, rank
    from chunkattn.evaluation.report import as_json, compare_rankings, ranking_conclusion

    check_ranking_measures()
    llm = make_llm(model, **options)
    with Steps("queries", len(rankings)) as steps:
        orders = rank(llm, rankings, known, steps.advance)
    given = [list(range(len(ranking.documents))) for ranking in rankings]
    rows = compare_rankings(measured(given, rankings), measured(orders, rankings))
    said = ranking_conclusion(rows)
    report = {
        "data": data.name,
        "queries": len(rankings),
        "model": _name(model),
        "rows": as_json(rows),
        "conclusion": said,
    }
    _show(rows, f"{_name(model)}, {len(rankings)} queries of {data.name}", said, report, json_file, plot)


@command(app)
def calibrate(
    data: Data,
    output: Annotated[Path, typer.Option(help="File to write, for the option chunk_calibration.")] = Path(FILE_NAME),
    model: Model = None,
    document_template: Template = None,
    gap: Annotated[list[int] | None, typer.Option(help="Gap of the coarse grid; repeatable. Default: 0, 16, 64, 256.")] = None,
    weighing: Annotated[bool, typer.Option(help="Search temperature and scale as well as the gap.")] = True,
    limit: Limit = None,
    results: ResultsFile = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    attention_backend: Backend = "auto",
    kv_cache_memory_bytes: PoolBytes = None,
    verbose: Verbose = False,
) -> None:
    """Find a model's chunk gap, temperature and scale on half of your questions, and measure them on the other half."""
    log_to_stderr(verbose)
    from chunkattn.evaluation.calibrate import calibrate as find
    from chunkattn.evaluation.calibrate import halves_of
    from chunkattn.evaluation.conditions import DEFAULT_TEMPLATE, check_template
    from chunkattn.evaluation.data import Question, read_data
    from chunkattn.evaluation.examiner import Examiner
    from chunkattn.evaluation.report import as_json, compare
    from chunkattn.evaluation.results import Results
    from chunkattn.evaluation.search import GAPS

    check_files(json_file, plot)
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent} is not a folder")
    if gap and min(gap) < 0:
        raise ConfigError(f"--gap must be at least 0, got {min(gap)}")
    template = check_template(DEFAULT_TEMPLATE if document_template is None else document_template)
    questions = [line for line in read_data(data, _at_least_one("limit", limit)) if isinstance(line, Question)]
    if not questions:
        raise RequestError(f"{data} holds rankings; calibrate needs questions, because scores are exact without a calibration")
    searched = len(halves_of(len(questions)).search)
    known = Results(results or Path(f"{data.stem}.results.jsonl"))
    llm = make_llm(
        model,
        chunk_calibration=OFF,
        chunk_temperature=0.8 if weighing else None,  # any value unlike 1 builds an engine with a calibration
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=attention_backend,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    gaps = sorted(set(gap or GAPS))
    examiner = Examiner(llm, questions, template, known, max_tokens=1)
    console.print(
        f"{len(questions)} questions: {searched} for the search, {len(questions) - searched} for the report\n"
        "objective: mean log-probability of a token of the gold answer, shared positions",
        markup=False,
    )
    log = _TrialLog(len(gaps))
    found = find(examiner, gaps=gaps, weighs=weighing, tried=log.tried)
    rows = compare(found.values)
    notes = {
        "model": _name(model),
        "document_template": template,
        "data": data.name,
        "objective": "mean log-probability of a token of the gold answer",
        **found.notes(),
    }
    write_calibration(output, found.calibration, notes)
    report = {
        **asdict(found.calibration),
        **notes,
        "trials": [{**asdict(trial.calibration), "value": trial.value} for trial in found.trials],
        "rows": as_json(rows),
        "conclusion": found.conclusion,
    }
    title = f"{_name(model)}, {len(found.halves.report)} other questions of {data.name}"
    _show(rows, title, found.conclusion, report, json_file, plot)
    if json_file != "-":
        console.print(f"written: {escape(str(output))}", soft_wrap=True)


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
            # Each gap takes about as long. The refinement takes about four, the report two.
            taken = time.monotonic() - self._began
            _say(f"two gaps took {taken:.0f} s; about {taken / 2 * (self._left + 4) / 60:.0f} minutes are left")
            self._left = 0
        better, self._best = trial.value > self._best, max(trial.value, self._best)
        _say(f"gap {gap:4}  T {temperature:4.2f}  S {scale:4.2f}  {trial.value:8.4f}{'  best so far' if better else ''}")


class Steps:
    """Progress of a command on stderr: a bar on a terminal, elsewhere a line at every tenth.

    Args:
        name: name of the things that are counted.
        total: number of them.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done, self._began = name, total, 0, time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(name, total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count more of them as done."""
        before, self._done = self._done, self._done + count
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif (tenth := 10 * self._done // self._total) > 10 * before // self._total:
            left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            _say(f"{self._done} of {self._total} {self._name}, {10 * tenth}%, about {left / 60:.1f} minutes left")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"--{name} must be at least 1, got {value}")
    return value


def _name(model: str | None) -> str:
    return "the demo model" if model is None else Path(model).name


def _show(rows: Sequence[Row], title: str, said: str, report: dict[str, Any], json_file: str | None, plot: Path | None) -> None:
    """Print table and conclusion, or the JSON alone, and write the files."""
    from chunkattn.evaluation.chart import draw

    text = json.dumps(report, indent=2, ensure_ascii=False)
    if json_file == "-":
        print(text)
    else:
        console.print(_table(rows, title))
        if json_file:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        save_picture(draw(rows, title), plot)
    if json_file != "-":
        console.print(said, soft_wrap=True, markup=False)


def _table(rows: Sequence[Row], title: str) -> Table:
    from chunkattn.evaluation.report import LOGPROB

    names = list(rows[0].means)
    others = [name for name in names if name != LOGPROB]
    has_logprob, has_control = LOGPROB in names, any(row.against_control for row in rows)
    columns = ["", *(["logprob", "- full (95%)"] if has_logprob else []), *(["- full, same T S (95%)"] if has_control else [])]
    table = Table(*columns, *others, title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap, column.justify = True, "right" if column.header else "left"
    for row in rows:
        cells = [row.name]
        if has_logprob:
            cells += [f"{row.means[LOGPROB].mean:.3f}", _change(row.against_full)]
        if has_control:
            cells.append(_change(row.against_control))
        table.add_row(*cells, *(f"{row.means[name].mean:.3f}" for name in others))
    return table


def _change(against: dict[str, Mean] | None) -> str:
    from chunkattn.evaluation.report import LOGPROB

    if against is None:
        return ""
    change = against[LOGPROB]
    return f"{change.mean:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
