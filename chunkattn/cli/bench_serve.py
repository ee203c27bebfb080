"""Command `chunkattn bench serve`."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

import chunkattn
from chunkattn.cli.bench import JsonFile, check_files, group
from chunkattn.cli.common import Tokenizer, command, console
from chunkattn.cli.environment import processor
from chunkattn.cli.progress import say
from chunkattn.errors import ChunkAttnError, ConfigError

if TYPE_CHECKING:
    from chunkattn.bench.load.summary import Spread, Summary
    from chunkattn.bench.load.sweep import Plan
    from chunkattn.bench.load.workloads import Form, Workload

_WORKLOADS = ("rag-8x100", "rerank-10x300")
_OTHER_FILES = 64
"""Files that the client may have open beside its connections."""
_SERVER, _REQUESTS, _GOOD, _BOUNDS = "Server", "Requests", "Objective", "Bounds"


def _milliseconds(what: str) -> Any:
    return typer.Option(help=f"Longest {what} of a good request, in milliseconds.", rich_help_panel=_GOOD)


@command(group)
def serve(
    url: Annotated[
        str | None,
        typer.Option(help="Base URL of the server; without it, the command starts one.", rich_help_panel=_SERVER),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="With --url the served model's name, by default the first that the server lists; without --url the folder, "
            "GGUF file or hub id to serve, by default the demo model.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option(help="Serve random weights of this shape: qwen3-0.6b or small.", rich_help_panel=_SERVER),
    ] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of `chunkattn serve` for the server to start, with = and its value; repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the server at --url.", rich_help_panel=_SERVER)] = None,
    tokenizer: Tokenizer = None,
    generation: Annotated[
        str,
        typer.Option(
            help="How documents are sent: chunks (this project's completions), prompt (one text), chat.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "chunks",
    scoring: Annotated[
        str,
        typer.Option(
            help="How items are sent: rerank (/v1/rerank), score (/v1/score of this project and SGLang), "
            "pairs (/v1/score of vLLM), generative_scoring (vLLM).",
            rich_help_panel=_REQUESTS,
        ),
    ] = "rerank",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="rag-DOCUMENTSxTOKENS or rerank-ITEMSxTOKENS, the tokens being those of a document or of the query; "
            f"repeatable. Default: {', '.join(_WORKLOADS)}.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    rates: Annotated[str, typer.Option(help="Requests per second, separated by commas.", rich_help_panel=_REQUESTS)] = "1,2,4",
    seconds: Annotated[float, typer.Option(help="Length of the arrivals at one rate.", rich_help_panel=_REQUESTS)] = 30.0,
    requests: Annotated[int | None, typer.Option(help="Limit on the requests at one rate.", rich_help_panel=_REQUESTS)] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of arrivals and texts. By default random: a server has the texts of a seed it has seen cached.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of the shared prefix.", rich_help_panel=_REQUESTS)] = 32,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", rich_help_panel=_REQUESTS)] = 24,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate.", rich_help_panel=_REQUESTS)] = 32,
    item_tokens: Annotated[int, typer.Option(help="Tokens of an item.", rich_help_panel=_REQUESTS)] = 20,
    document_pool: Annotated[
        int,
        typer.Option(help="Documents to draw from; 0 makes new documents for every request.", rich_help_panel=_REQUESTS),
    ] = 64,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Generate all tokens, by a field of vLLM and this project that other servers may refuse.",
            rich_help_panel=_REQUESTS,
        ),
    ] = True,
    slo_latency_ms: Annotated[float | None, _milliseconds("time to the end of the answer")] = None,
    slo_ttft_ms: Annotated[float | None, _milliseconds("time to the first token")] = None,
    slo_tpot_ms: Annotated[float | None, _milliseconds("mean time per token after the first")] = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Requests without an answer that end the arrivals.", rich_help_panel=_BOUNDS)
    ] = 512,
    drain_s: Annotated[
        float, typer.Option(help="Longest wait for answers after the last arrival.", rich_help_panel=_BOUNDS)
    ] = 60.0,
    warm_up_s: Annotated[
        float, typer.Option(help="Longest wait for a request before the measurement.", rich_help_panel=_BOUNDS)
    ] = 300.0,
    max_lag_ms: Annotated[
        float, typer.Option(help="Delay of this client beyond which a note says so.", rich_help_panel=_BOUNDS)
    ] = 50.0,
    json_file: JsonFile = None,
) -> None:
    """Measure latency, first token and goodput of a server while requests arrive at a rate, whether or not it keeps up."""
    from chunkattn.bench.load.client import Client
    from chunkattn.bench.load.summary import Objective
    from chunkattn.bench.load.sweep import Plan, random_seed
    from chunkattn.bench.load.workloads import Form, Workload

    check_files(json_file, None)
    numbers = {
        "--seconds": seconds,
        "--drain-s": drain_s,
        "--warm-up-s": warm_up_s,
        "--max-lag-ms": max_lag_ms,
        "--slo-latency-ms": slo_latency_ms,
        "--slo-ttft-ms": slo_ttft_ms,
        "--slo-tpot-ms": slo_tpot_ms,
    }
    counts = {
        "--requests": requests,
        "--prefix-tokens": prefix_tokens,
        "--question-tokens": question_tokens,
        "--output-tokens": output_tokens,
        "--item-tokens": item_tokens,
        "--max-in-flight": max_in_flight,
    }
    _check_numbers(numbers, counts)
    workloads = tuple(Workload.parse(name) for name in dict.fromkeys(workload or _WORKLOADS))
    _check_choices(generation, scoring, document_pool, workloads)
    _check_server(url, model, geometry, server_option, api_key)
    _check_open_files(max_in_flight)
    seed = random_seed() if seed is None else seed
    objective = Objective(slo_latency_ms, slo_ttft_ms, slo_tpot_ms)
    plan = Plan(workloads, _rates(rates), seconds, requests, seed, max_in_flight, drain_s, warm_up_s, max_lag_ms, objective)
    form = Form(
        model or "", generation, scoring, prefix_tokens, question_tokens, output_tokens, item_tokens, document_pool, ignore_eos
    )
    if url is not None:
        Client(url, api_key)  # checks both before the work begins
    report = Report(_facts(url, geometry, server_option), plan, form)
    try:
        with _server(url, model, geometry, server_option or []) as base:
            _run(_measure(base, api_key, tokenizer, report))
    except (ChunkAttnError, KeyboardInterrupt) as error:
        report.error = " ".join(str(error).split()) or "interrupted"
        if report.runs:
            _show(report, json_file)
        raise
    _show(report, json_file)


@dataclass
class Report:
    """Results of the command, as its JSON holds them.

    Attributes:
        facts: server, machine and versions.
        plan: workloads, rates and limits.
        form: wire format and sizes.
        runs: figures of each workload at each rate.
        error: reason for a sweep that ended early.
    """

    facts: dict[str, str]
    plan: Plan
    form: Form
    runs: list[Summary] = field(default_factory=list)
    error: str | None = None


def _check_numbers(numbers: dict[str, float | None], counts: dict[str, int | None]) -> None:
    for name, number in numbers.items():
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ConfigError(f"{name} must be a finite number above 0; got {number:g}")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1; got {count}")


def _check_choices(generation: str, scoring: str, document_pool: int, workloads: tuple[Workload, ...]) -> None:
    from chunkattn.bench.load.workloads import GENERATIONS, SCORINGS

    for name, value, known in (("--generation", generation, GENERATIONS), ("--scoring", scoring, SCORINGS)):
        if value not in known:
            raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join(known)}")
    largest = max((w.count for w in workloads if not w.is_rerank), default=0)
    if document_pool < 0 or 0 < document_pool < largest:
        raise ConfigError(
            f"--document-pool must be 0, for new documents in every request, or at least the {largest} of a request; "
            f"got {document_pool}"
        )


def _check_server(
    url: str | None, model: str | None, geometry: str | None, options: list[str] | None, api_key: str | None
) -> None:
    if url is not None and (geometry is not None or options):
        raise ConfigError("--geometry and --server-option belong to a server that the command starts; leave out --url")
    if url is None and api_key is not None:
        raise ConfigError("--api-key belongs to the server at --url; the command starts its own without a key")
    if geometry is not None:
        if model is not None:
            raise ConfigError("give --model or --geometry, not both")
        from chunkattn.bench.geometry import GEOMETRIES

        if geometry not in GEOMETRIES:
            raise ConfigError(f"unknown geometry {geometry!r}; choose one of {', '.join(GEOMETRIES)}")
    if wrong := [option for option in options or () if not option.startswith("--")]:
        raise ConfigError(f"--server-option takes one option of `chunkattn serve`, such as --max-num-seqs=32; got {wrong[0]!r}")


def _check_open_files(max_in_flight: int) -> None:
    try:
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
    except ImportError:  # Windows has no such limit
        return
    needed, (allowed, _) = max_in_flight + _OTHER_FILES, getrlimit(RLIMIT_NOFILE)
    if allowed != RLIM_INFINITY and needed > allowed:
        raise ConfigError(
            f"--max-in-flight {max_in_flight} needs {needed} open files, and this process may have {allowed}; "
            "lower it, or raise the limit with `ulimit -n`"
        )


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ConfigError(f"--rates must be numbers above 0, separated by commas, such as 1,2,4; got {text!r}")
    return rates


def _facts(url: str | None, geometry: str | None, options: list[str] | None) -> dict[str, str]:
    facts = {"server": url or " ".join(["chunkattn serve, on this machine", *(options or ())])}
    if geometry:
        facts["weights"] = f"random, of the shape of {geometry}"
    return facts | {
        "client": f"chunkattn {chunkattn.__version__}",
        "client's processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
    }


@contextmanager
def _server(url: str | None, model: str | None, geometry: str | None, options: list[str]) -> Iterator[str]:
    """Yield the base URL of the server, which is started and ended unless it has a URL."""
    if url is not None:
        yield url
        return
    from chunkattn.bench.load.server import Server

    with TemporaryDirectory() as folder:
        if geometry is not None:
            from chunkattn.bench.geometry import save_model

            say(f"writing a model of the shape of {geometry}")
            save_model(geometry, Path(folder))
            model, options = folder, [f"--served-model-name={geometry}", *options]
        say("starting a server")
        server = Server(*([model] if model else []), *options)
        try:
            yield server.url
        finally:
            server.end()


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop where it is installed: the client then takes less of a machine that it shares."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # uvloop does not support Windows
        new_event_loop = None  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


async def _measure(url: str, api_key: str | None, tokenizer: str | None, report: Report) -> None:
    from chunkattn.bench.load.client import Client
    from chunkattn.bench.load.sweep import served_model, sweep, tokenizer_of

    client = Client(url, api_key)
    own = url != report.facts["server"]
    name = await served_model(client) if own or not report.form.model else report.form.model
    report.form, report.facts["model"] = replace(report.form, model=name), name
    try:
        tokens = await tokenizer_of(client, name, tokenizer)
        async for summary in sweep(client, report.plan, report.form, tokens, say):
            report.runs.append(summary)
            say(_line(summary))
    finally:
        client.close()


def _show(report: Report, json_file: str | None) -> None:
    records = json.dumps(asdict(report), indent=2)
    if json_file == "-":
        print(records)
        return
    for workload in report.plan.workloads:
        if runs := [run for run in report.runs if run.workload == workload.name]:
            console.print(_table(runs))
            for run in runs:
                for note in _notes(run):
                    console.print(f"{run.rate:g}/s: {note}", soft_wrap=True, markup=False)
            console.print()
    facts = report.facts | {
        "rate, done, good": "requests per second that were offered, were answered, and met the objective",
        "times": "ms from the scheduled arrival to the end of the answer, and to the first token (TTFT); > is beyond the run",
        "seed": f"{report.plan.seed}",
    }
    for name, value in facts.items():
        console.print(f"{name}: {value}", soft_wrap=True, markup=False)
    if json_file:
        Path(json_file).write_text(records + "\n")


def _table(runs: list[Summary]) -> Table:
    streamed = any(run.ttft_ms for run in runs)
    judged = any(run.goodput is not None for run in runs)
    columns = ["rate", "done", *(["good"] if judged else []), "p50", "p90", "p99"]
    columns += ["TTFT", "p99", "token", "p99"] if streamed else []
    title = f"{runs[0].workload}: {_mean(runs[0].prompt_tokens)} prompt tokens"
    table = Table(*columns, "failed", title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap, column.justify = True, "right"
    for run in runs:
        rates = [run.rate, run.achieved_rate, *([] if run.goodput is None else [run.goodput])]
        times = [_cell(run.latency_ms, name) for name in ("p50", "p90", "p99")]
        if streamed:
            times += [_cell(spread, name) for spread in (run.ttft_ms, run.tpot_ms) for name in ("p50", "p99")]
        table.add_row(*(f"{rate:.3g}" for rate in rates), *times, str(run.scheduled - run.succeeded))
    return table


def _notes(run: Summary) -> list[str]:
    statuses = ", ".join(f"{count} x {status}" for status, count in run.statuses.items())
    late = run.lag_ms.max if run.lag_ms and run.lag_ms.max is not None else 0.0
    return [
        f"{run.scheduled} requests in {run.seconds:.1f} s, {statuses or 'none sent'}; "
        f"{run.in_flight} in flight at the last arrival; sent at most {late:.0f} ms late",
        *run.notes,
    ]


def _line(run: Summary) -> str:
    """Return the line of progress of a finished run."""
    times = ", ".join(f"{name} {_cell(run.latency_ms, name) or 'unknown'} ms" for name in ("p50", "p99"))
    overloaded = ", overloaded" if run.is_overloaded else ""
    return f"{run.workload} at {run.rate:g}/s: {run.succeeded} of {run.scheduled} in {run.seconds:.1f} s, {times}{overloaded}"


def _cell(spread: Spread | None, name: str) -> str:
    if spread is None:
        return ""
    value = getattr(spread, name)
    return ">" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _mean(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
