"""Commands `chunkattn eval` and `chunkattn calibrate`: measure a model on your data, and find its calibration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkattn.calibration import FILE_NAME, OFF, write_calibration, write_label_scales
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, RequestError
from chunkattn.picture import save_picture
from chunkattn.terminal.commands import (
    Model,
    TemplateOptions,
    Verbose,
    app,
    command,
    console,
    figures,
    log_to_stderr,
    make_llm,
    print_lines,
    template_options,
)
from chunkattn.terminal.files import JsonFile, Plot, check_file, check_files, write_json
from chunkattn.terminal.flags import check_positive, with_options
from chunkattn.terminal.progress import Steps, say
from chunkattn.tools.eval.data_options import RecipeOptions, results_file, take_data

if TYPE_CHECKING:
    from chunkattn.llm import LLM
    from chunkattn.tools.eval.data import Decisions, Question, Ranking
    from chunkattn.tools.eval.measures import Mean
    from chunkattn.tools.eval.report import Row
    from chunkattn.tools.eval.results import Results
    from chunkattn.tools.eval.search import Trial

Data = Annotated[
    Path,
    typer.Argument(
        help="File of JSON lines: questions with documents and answers, rankings, or decisions; with --recipe, passages."
    ),
]
Limit = Annotated[int | None, typer.Option(help="Number of lines of DATA to read; by default all.")]
ResultsFile = Annotated[
    Path | None,
    typer.Option(help="File of single results, so that a run can stop and continue; by default DATA.results.jsonl here."),
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(help="Number of tokens of a greedy answer at most, by default 32; every prompt leaves room for them."),
]
FocusScores = Annotated[
    list[str] | None,
    typer.Option("--focus-score", help="Score by which a focus chooses documents; repeatable. Default: likelihood."),
]
_ANSWER_TOKENS = 32
_NO_CHUNK_LIMIT = (1 << 31) - 1
"""`max_chunk_len` of the engines: the control joins all documents into one chunk, which only the model's positions bound."""


_ENGINE = (
    "tokenizer document_template chat_template dtype kv_cache_dtype attention_backend tensor_parallel_size "
    "kv_cache_memory_bytes"
)


@command(app, "eval")
@with_options(
    (RecipeOptions, None), (EngineConfig, None, f"{_ENGINE} chunk_position_gap chunk_temperature chunk_scale chunk_calibration")
)
def evaluate(
    data: Data,
    model: Model = None,
    max_tokens: AnswerTokens = None,
    focus: Annotated[
        int, typer.Option(help="Also ask with a focus on 1 to this many documents, in both modes; 0 for none.", min=0)
    ] = 0,
    focus_score: FocusScores = None,
    chat_template_kwargs: TemplateOptions = None,
    limit: Limit = None,
    results: ResultsFile = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Measure a model's loss to isolated documents on your questions, or how well it ranks documents or makes decisions."""
    log_to_stderr(verbose)
    from chunkattn.tools.eval.data import Decisions, Question, Ranking
    from chunkattn.tools.eval.measures import check_ranking_measures
    from chunkattn.tools.eval.report import as_json
    from chunkattn.tools.eval.results import Results

    check_files(json_file, plot)
    check_positive({"limit": limit})
    given = take_data(data, limit, options)
    read = given.lines
    known = Results(results or results_file(data))
    rankings = [line for line in read if isinstance(line, Ranking)]
    questions = [line for line in read if isinstance(line, Question)]
    decisions = [line for line in read if isinstance(line, Decisions)]
    if (max_tokens is not None or focus) and not questions:
        kind = "rankings" if rankings else "decisions"
        raise ConfigError(f"--max-tokens and --focus are for questions over documents; {data} holds {kind}")
    scores = _focus_scores(focus, focus_score)
    variables = _decision_options(chat_template_kwargs, data, decisions)
    if rankings:
        check_ranking_measures()
    llm, facts = make_llm(model, max_chunk_len=_NO_CHUNK_LIMIT, **options), dict[str, Any]()
    if rankings:
        rows, said = _rank(llm, rankings, known)
    elif decisions:
        rows, said = _decide(llm, decisions, known, variables)
        facts = {"questions": sum(len(line.questions) for line in decisions)}
    else:
        longest = _ANSWER_TOKENS if max_tokens is None else max_tokens
        rows, said = _answer(llm, questions, known, longest, focus, scores)
        facts = {"document_template": llm.parser.documents.template, **asdict(llm.config.calibration)}
    kind = "queries" if rankings else "states" if decisions else "questions"
    head = {**given.facts, kind: len(read), "model": _name(model), **facts}
    report = {**head, "rows": as_json(rows), "conclusion": said}
    _show(rows, f"{_name(model)}, {len(read)} {kind} of {given.name}", said, report, json_file, plot)


def _answer(
    llm: LLM, questions: Sequence[Question], known: Results, max_tokens: int, top_n: int, scores: Sequence[str]
) -> tuple[list[Row], str]:
    from chunkattn.tools.eval.conditions import conditions_for, focus_conditions, tokenize
    from chunkattn.tools.eval.examiner import Examiner
    from chunkattn.tools.eval.report import compare, conclusion, focus_hint

    calibration = llm.config.calibration
    gold = all(question.gold is not None for question in questions)
    conditions = [
        *conditions_for(calibration, gold=gold),
        *focus_conditions(calibration, top_n, scores, gold=gold and top_n > 0),
    ]
    prompts = tokenize(llm.parser, questions)
    with Steps("answers", 2 * len(conditions) * len(questions)) as steps:
        examiner = Examiner(llm, questions, prompts, known, max_tokens=max_tokens, advance=steps.advance)
        examiner.check(conditions)
        values = examiner.examine(conditions, range(len(questions)), texts=True)
    said = conclusion(values, calibration)
    return compare(values), f"{said} {focus_hint(values)}" if top_n else said


def _rank(llm: LLM, rankings: Sequence[Ranking], known: Results) -> tuple[list[Row], str]:
    from chunkattn.tools.eval.rankings import measured, rank
    from chunkattn.tools.eval.report import compare_rankings, ranking_conclusion

    with Steps("queries", len(rankings)) as steps:
        orders = rank(llm, rankings, known, steps.advance)
    given = [list(range(len(ranking.documents))) for ranking in rankings]
    rows = compare_rankings(measured(given, rankings), measured(orders, rankings))
    return rows, ranking_conclusion(rows)


def _decide(llm: LLM, lines: Sequence[Decisions], known: Results, variables: dict[str, Any] | None) -> tuple[list[Row], str]:
    from chunkattn.tools.eval.decisions import compare, conclusion, examine, ways_of

    with Steps("states", len(lines)) as steps:
        rows = compare(lines, examine(llm, lines, ways_of(llm), known, steps.advance, variables))
    return rows, conclusion(rows, len(lines))


@command(app)
@with_options((RecipeOptions, None), (EngineConfig, None, _ENGINE))
def calibrate(
    data: Data,
    output: Annotated[Path, typer.Option(help="File to write, for the option chunk_calibration.")] = Path(FILE_NAME),
    model: Model = None,
    gap: Annotated[list[int] | None, typer.Option(help="Gap of the coarse grid; repeatable. Default: 0, 16, 64, 256.")] = None,
    weighing: Annotated[bool, typer.Option(help="Search temperature and scale as well as the gap.")] = True,
    max_tokens: AnswerTokens = None,
    focus: Annotated[
        int, typer.Option(help="Also choose a focus on 1 to this many documents by right answers; 0 tries none.", min=0)
    ] = 0,
    focus_score: FocusScores = None,
    chat_template_kwargs: TemplateOptions = None,
    limit: Limit = None,
    results: ResultsFile = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    verbose: Verbose = False,
    **options: Any,
) -> None:
    """Find a model's chunk gap, temperature and scale, or its calibration of labels, on half of your data; measure the rest."""
    log_to_stderr(verbose)
    from chunkattn.tools.eval.calibrate import calibrate as find
    from chunkattn.tools.eval.calibrate import few_questions, halves_of
    from chunkattn.tools.eval.conditions import tokenize
    from chunkattn.tools.eval.data import Decisions, Question
    from chunkattn.tools.eval.examiner import Examiner
    from chunkattn.tools.eval.report import as_json, compare
    from chunkattn.tools.eval.results import Results
    from chunkattn.tools.eval.search import GAPS

    check_files(json_file, plot)
    check_positive({"limit": limit})
    check_file(output)
    if gap and min(gap) < 0:
        raise ConfigError(f"--gap must be at least 0, got {min(gap)}")
    given = take_data(data, limit, options)
    questions = [line for line in given.lines if isinstance(line, Question)]
    decisions = [line for line in given.lines if isinstance(line, Decisions)]
    variables = _decision_options(chat_template_kwargs, data, decisions)
    if decisions:
        if gap or not weighing or max_tokens is not None or plot is not None or focus:
            flags = "--gap, --no-weighing, --max-tokens, --focus and --plot"
            raise ConfigError(f"{flags} are for questions over documents; {data} holds decisions")
        known = Results(results or results_file(data))
        llm = make_llm(model, chunk_calibration=OFF, **options)
        _fit_labels(llm, decisions, known, output, _name(model), data.name, json_file, variables)
        return
    scores = _focus_scores(focus, focus_score)
    if not questions:
        reason = "calibrate needs questions or decisions, because scores are exact without a calibration"
        raise RequestError(f"{data} holds rankings; {reason}")
    searched = len(halves_of(len(questions)).search)
    known = Results(results or results_file(data))
    weights = 0.8 if weighing else None  # any value unlike 1 builds an engine with a calibration
    llm = make_llm(model, max_chunk_len=_NO_CHUNK_LIMIT, chunk_calibration=OFF, chunk_temperature=weights, **options)
    gaps = sorted(set(gap or GAPS))
    longest = _ANSWER_TOKENS if max_tokens is None else max_tokens
    examiner = Examiner(llm, questions, tokenize(llm.parser, questions), known, max_tokens=longest)
    say(
        f"{len(questions)} questions: {searched} for the search, {len(questions) - searched} for the report\n"
        "objective: mean log-probability of a token of the gold answer, shared positions"
    )
    if few := few_questions(len(questions)):
        say(f"warning: {few}")
    log = _TrialLog(len(gaps))
    found = find(examiner, gaps=gaps, weighs=weighing, top_n=focus, scores=scores, tried=log.tried)
    rows = compare(found.values)
    notes = {
        "model": _name(model),
        "document_template": llm.parser.documents.template,
        **given.facts,
        "objective": "mean log-probability of a token of the gold answer",
        **found.notes(),
    }
    report = {
        **asdict(found.calibration),
        **notes,
        "trials": [{**asdict(trial.calibration), "value": trial.value} for trial in found.trials],
        "rows": as_json(rows),
        "written": str(output),
    }
    title = f"{_name(model)}, {len(found.halves.report)} other questions of {given.name}"
    said = found.conclusion if found.focus_conclusion is None else f"{found.conclusion}\n{found.focus_conclusion}"
    _show(rows, title, said, report, json_file, plot)
    write_calibration(output, found.calibration, notes)
    if json_file != "-":
        listed = "gap {}, temperature {:g}, scale {:g}".format(*asdict(found.calibration).values())
        off = "" if found.calibration == found.best else ", the defaults, because no gain was shown"
        console.print(f"written: {escape(str(output))} ({listed}{off})", soft_wrap=True)


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


def _fit_labels(
    llm: LLM,
    lines: Sequence[Decisions],
    known: Results,
    output: Path,
    model: str,
    data: str,
    json_file: str | None,
    variables: dict[str, Any] | None,
) -> None:
    """Fit the calibration of labels, print its table, and write what the other half shows to be a gain."""
    from chunkattn.tools.eval.decisions import examine
    from chunkattn.tools.eval.labels import SOURCES, calibrate_labels, notes_of, samples_of

    with Steps("states", len(lines)) as steps:
        given = examine(llm, lines, SOURCES, known, steps.advance, variables)
    fits = calibrate_labels(samples_of(llm, lines, given, variables), len(lines))
    report = notes_of(fits, data)
    kept = {kind: own.scale for kind, own in fits.items() if own.is_kept}
    if write_json({**report, "written": str(output)}, json_file):
        title = escape(f"{model}, labels fitted on half of {data}, measured on the other half")
        table = figures(
            "labels", "temperature", "log loss", "calibrated", "change [95%]", "kept", title=title, texts=("labels",)
        )
        for kind, own in fits.items():
            losses = (f"{value:.3f}" for value in (own.scale.temperature, own.before, own.after))
            table.add_row(kind, *losses, _interval(own.change), "yes" if own.is_kept else "no")
        table.caption = "log loss: nats per question; only kinds whose interval lies below 0 are kept"
        console.print(table)
    write_label_scales(output, kept, model, report)
    if json_file != "-":
        said = ", ".join(kept) or "no calibration of labels, because no gain was shown"
        console.print(f"written: {escape(str(output))} ({said})", soft_wrap=True)


def _decision_options(text: str | None, data: Path, decisions: Sequence[Decisions]) -> dict[str, Any] | None:
    if text is not None and not decisions:
        raise ConfigError(f"--chat-template-kwargs is for decisions; {data} holds none")
    return template_options(text)


def _focus_scores(top_n: int, names: list[str] | None) -> list[str]:
    """Return the scores of a focus, checked."""
    from chunkattn.calls.focus_scores import get_score

    if names and not top_n:
        raise ConfigError("--focus-score needs --focus, the number of documents to choose")
    for name in names or ():
        get_score(name)
    return names or ["likelihood"]


def _name(model: str | None) -> str:
    return "the demo model" if model is None else Path(model).name


def _show(rows: Sequence[Row], title: str, said: str, report: dict[str, Any], json_file: str | None, plot: Path | None) -> None:
    """Print tables and conclusion, or the JSON alone, and write the files."""
    from chunkattn.tools.eval.chart import draw

    shown = write_json(report, json_file)
    if shown:
        console.print(*_tables(rows, title))
    if plot is not None:
        save_picture(draw(rows, title), plot)
    if shown:
        print_lines([said])


def _tables(rows: Sequence[Row], title: str) -> list[Table]:
    """Return a table of log-probabilities and a table of the other measures, as far as the rows have them."""
    from chunkattn.tools.eval.report import CONTAINED, LOGPROB

    names = list(dict.fromkeys(name for row in rows for name in row.means if name != LOGPROB))
    compared = next(([name] for name in ("NDCG@10", "accuracy") if name in names), ["F1", CONTAINED])
    baseline = {"NDCG@10": "given", "accuracy": rows[0].name}.get(compared[0], "full")
    tables = []
    if LOGPROB in rows[0].means:
        controlled = any(row.against_control for row in rows)
        table = figures("", "logprob", "- full [95%]", *(["- control [95%]"] if controlled else []), title=escape(title))
        for row in rows:
            changes = (row.against_full, row.against_control)[: 1 + controlled]
            table.add_row(row.name, _mean(row, LOGPROB), *(_change(against, LOGPROB) for against in changes))
        table.caption = "logprob: mean log-probability of a token of the gold answer"
        table.caption += "; control: full, same T and S" if controlled else ""
        tables.append(table)
    if names:
        title = "greedy answers" if tables else escape(title)
        table = figures("", *names, *(f"{name} - {baseline} [95%]" for name in compared), title=title)
        for row in rows:
            differences = (_change(row.against_full, name) for name in compared)
            table.add_row(row.name, *(_mean(row, name) for name in names), *differences)
        tables.append(table)
    doubt = "an interval that contains 0: the data cannot tell this difference from none"
    tables[-1].caption = f"{tables[-1].caption}; {doubt}" if tables[-1].caption else doubt
    return tables


def _mean(row: Row, name: str) -> str:
    return f"{row.means[name].mean:.3f}" if name in row.means else ""


def _change(against: dict[str, Mean] | None, name: str) -> str:
    if against is None:
        return ""
    return _interval(against[name])


def _interval(change: Mean) -> str:
    if not change.has_interval:
        return escape(f"{change.mean:+.2f} [no interval]")
    return escape(f"{change.mean:+.2f} [{change.low:+.2f}, {change.high:+.2f}]")
