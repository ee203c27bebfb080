"""Command `chunkattn bench serve`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

import chunkattn
from chunkattn.errors import ConfigError
from chunkattn.terminal.commands import command, console, figures, print_lines
from chunkattn.terminal.files import JsonFile, check_files, write_json
from chunkattn.terminal.flags import check_choice, check_positive, numbers_in, options_for, with_options
from chunkattn.terminal.progress import say
from chunkattn.tools.bench.command import group
from chunkattn.tools.bench.measure import processor
from chunkattn.tools.bench.sizes import check_geometry
from chunkattn.tools.load.client import Client
from chunkattn.tools.load.reports import reporting
from chunkattn.tools.load.server import Server
from chunkattn.tools.load.summary import Objective, Spread, Summary
from chunkattn.tools.load.sweep import LoadPlan, random_seed, served_model, sweep, tokenizer_of
from chunkattn.tools.load.workloads import GENERATIONS, SCORINGS, WireForm, Workload

_OTHER_FILES = 64
"""Files that the client may have open beside its connections."""
_SERVER, _REQUESTS = "Server", "Requests"
_FORM = "generation scoring prefix_tokens question_tokens output_tokens item_tokens document_pool ignore_eos"


@dataclass(frozen=True)
class Target:
    """Server to load: the one at a URL, or one that the command starts.

    Attributes:
        url: base URL of the server; without it, the command starts one.
        model: with --url the served model's name, by default the first that the server lists; without --url the folder, GGUF
            file or hub id to serve, by default the demo model.
        geometry: serve random weights of this shape: qwen3-0.6b, qwen3-30b-a3b or small.
        server_option: option of `chunkattn serve` for the server to start, with = and its value; repeatable.
        api_key: API key of the server at --url.
        tokenizer: folder, GGUF file or hub id of the tokenizer; by default the server's `/tokenize` is asked.
    """

    url: str | None = None
    model: str | None = None
    geometry: str | None = None
    server_option: tuple[str, ...] = ()
    api_key: str | None = None
    tokenizer: str | None = None

    def check(self) -> None:
        """Check that the options agree.

        Raises:
            ConfigError: options exclude each other, or one is malformed.
        """
        if self.url is not None and (self.geometry is not None or self.server_option):
            raise ConfigError("--geometry and --server-option belong to a server that the command starts; leave out --url")
        if self.url is None and self.api_key is not None:
            raise ConfigError("--api-key belongs to the server at --url; the command starts its own without a key")
        if self.geometry is not None:
            if self.model is not None:
                raise ConfigError("give --model or --geometry, not both")
            check_geometry(self.geometry)
        if wrong := [option for option in self.server_option if not option.startswith("--")]:
            text = "--server-option takes one option of `chunkattn serve`, such as --max-num-seqs=32"
            raise ConfigError(f"{text}; got {wrong[0]!r}")
        if self.url is not None:
            Client(self.url, self.api_key)  # checks both

    def facts(self) -> dict[str, str]:
        """Return the server, its weights and the client, by name."""
        facts = {"server": self.url or " ".join(["chunkattn serve, on this machine", *self.server_option])}
        if self.geometry:
            facts["weights"] = f"random, of the shape of {self.geometry}"
        return facts | {
            "client": f"chunkattn {chunkattn.__version__}",
            "client's processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        }

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yield the base URL of the server, which is started and ended unless it has a URL."""
        if self.url is not None:
            yield self.url
            return
        with TemporaryDirectory() as folder:
            model, options = self.model, [*self.server_option]
            if self.geometry is not None:
                from chunkattn.tools.bench.geometry import save_model

                say(f"writing a model of the shape of {self.geometry}")
                save_model(self.geometry, Path(folder))
                model, options = folder, [f"--served-model-name={self.geometry}", *options]
            say("starting a server")
            server = Server(*([model] if model else []), *options)
            try:
                yield server.url
            finally:
                server.end()


@dataclass(frozen=True)
class Offer:
    """Offered requests.

    Attributes:
        workload: rag-DOCUMENTSxTOKENS or rerank-ITEMSxTOKENS, the tokens being those of a document or of the query; repeatable.
        rates: requests per second, separated by commas.
        slo_latency_ms: longest time to the end of the answer of a good request, in milliseconds.
        slo_ttft_ms: longest time to the first token of a good request, in milliseconds.
        slo_tpot_ms: longest mean time per token after the first of a good request, in milliseconds.
    """

    workload: tuple[str, ...] = ("rag-8x100", "rerank-10x300")
    rates: str = "1,2,4"
    slo_latency_ms: float | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None


@command(group)
@with_options(
    (Target, _SERVER),
    (Offer, _REQUESTS, "workload rates"),
    (WireForm, _REQUESTS, _FORM),
    (LoadPlan, _REQUESTS, "seconds requests seed"),
    (Offer, "Objective", "slo_latency_ms slo_ttft_ms slo_tpot_ms"),
    (LoadPlan, "Bounds", "max_in_flight drain_s warm_up_s max_lag_ms"),
)
def serve(json_file: JsonFile = None, **options: Any) -> None:
    """Measure latency, first token and goodput of a server while requests arrive at a rate, whether or not it keeps up."""
    check_files(json_file)
    check_positive({name: value for name, value in options.items() if name not in ("document_pool", "seed")})
    options["seed"] = random_seed() if options["seed"] is None else options["seed"]
    offer, target = options_for(Offer, options), options_for(Target, options)
    workloads = tuple(map(Workload.parse, dict.fromkeys(offer.workload)))
    form = options_for(WireForm, options, model=target.model or "")
    _check_choices(form, workloads)
    target.check()
    plan = options_for(
        LoadPlan,
        options,
        workloads=workloads,
        rates=numbers_in("--rates", offer.rates, float, "1,2,4"),
        objective=Objective(offer.slo_latency_ms, offer.slo_ttft_ms, offer.slo_tpot_ms),
    )
    _check_open_files(plan.max_in_flight)
    report = LoadReport(target.facts(), plan, form)
    with reporting(report, report.runs, lambda: _show(report, json_file)), target.running() as url:
        _run(_measure(url, target, report))


@dataclass
class LoadReport:
    """Results of the command, as its JSON holds them.

    Attributes:
        facts: server, machine and versions.
        plan: workloads, rates and limits.
        form: wire format and sizes.
        runs: figures of each workload at each rate.
        error: reason for a sweep that ended early.
    """

    facts: dict[str, str]
    plan: LoadPlan
    form: WireForm
    runs: list[Summary] = field(default_factory=list)
    error: str | None = None


def _check_choices(form: WireForm, workloads: tuple[Workload, ...]) -> None:
    for name, value, known in (("--generation", form.generation, GENERATIONS), ("--scoring", form.scoring, SCORINGS)):
        check_choice(name, value, known)
    largest = max((w.count for w in workloads if not w.is_rerank), default=0)
    if form.document_pool < 0 or 0 < form.document_pool < largest:
        raise ConfigError(
            f"--document-pool must be 0, for new documents in every request, or at least the {largest} of a request; "
            f"got {form.document_pool}"
        )


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


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop where it is installed: the client then takes less of a machine that it shares."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # uvloop does not support Windows
        new_event_loop = None  # type: ignore[assignment]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


async def _measure(url: str, target: Target, report: LoadReport) -> None:
    client = Client(url, target.api_key)
    name = await served_model(client) if target.url is None or not report.form.model else report.form.model
    report.form, report.facts["model"] = replace(report.form, model=name), name
    try:
        tokens = await tokenizer_of(client, name, target.tokenizer)
        async for summary in sweep(client, report.plan, report.form, tokens, say):
            report.runs.append(summary)
            say(_line(summary))
    finally:
        client.close()


def _show(report: LoadReport, json_file: str | None) -> None:
    if not write_json(asdict(report), json_file):
        return
    for workload in report.plan.workloads:
        if runs := [run for run in report.runs if run.workload == workload.name]:
            console.print(_table(runs))
            print_lines(f"{run.rate:g}/s: {note}" for run in runs for note in _notes(run))
            console.print()
    facts = report.facts | {
        "rate, done, good": "requests per second that were offered, were answered, and met the objective",
        "times": "ms from the scheduled arrival to the end of the answer, and to the first token (TTFT); > is beyond the run",
        "seed": f"{report.plan.seed}",
    }
    print_lines(f"{name}: {value}" for name, value in facts.items())


def _table(runs: list[Summary]) -> Table:
    streamed = any(run.ttft_ms for run in runs)
    judged = any(run.goodput is not None for run in runs)
    columns = ["rate", "done", *(["good"] if judged else []), "p50", "p90", "p99"]
    columns += ["TTFT", "p99", "token", "p99"] if streamed else []
    title = f"{runs[0].workload}: {_mean(runs[0].prompt_tokens)} prompt tokens"
    table = figures(*columns, "failed", title=title)
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
