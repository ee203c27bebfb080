"""Command `chunkattn flips`: whether a server's answers depend on cache, company, order or load."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

import chunkattn
from chunkattn.cli.bench import JsonFile, check_files
from chunkattn.cli.common import Tokenizer, app, command, console
from chunkattn.cli.progress import say
from chunkattn.errors import ChunkAttnError, ConfigError

if TYPE_CHECKING:
    from chunkattn.bench.flips.questions import Plan
    from chunkattn.bench.flips.replies import Tally
    from chunkattn.bench.load.client import Client
    from chunkattn.bench.load.workloads import Texts

_NONE = "none"
_DIFFERENT = 1
"""Exit code when any answer differs."""
_SERVER, _QUESTIONS, _CONDITIONS = "Server", "Questions", "Conditions"


@command(app)
def flips(
    url: Annotated[str, typer.Argument(help="Base URL of the server, with or without /v1.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="The served model's name, by default the first that the server lists.", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.", rich_help_panel=_SERVER)] = None,
    tokenizer: Tokenizer = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for an answer, in seconds.", rich_help_panel=_SERVER)] = 300.0,
    scoring: Annotated[
        str,
        typer.Option(
            help="How items are sent: rerank (/v1/rerank), score (/v1/score of this project and SGLang), "
            "pairs (/v1/score of vLLM), generative_scoring (vLLM); none asks for no scores.",
            rich_help_panel=_QUESTIONS,
        ),
    ] = "rerank",
    generation: Annotated[
        str,
        typer.Option(
            help="How documents are sent: chunks (this project's completions), prompt (one text), chat; "
            "none asks for no texts.",
            rich_help_panel=_QUESTIONS,
        ),
    ] = "chunks",
    queries: Annotated[int, typer.Option(help="Number of queries.", rich_help_panel=_QUESTIONS)] = 4,
    items: Annotated[int, typer.Option(help="Number of compared items behind each query.", rich_help_panel=_QUESTIONS)] = 8,
    prompts: Annotated[int, typer.Option(help="Number of prompts to continue.", rich_help_panel=_QUESTIONS)] = 4,
    documents: Annotated[int, typer.Option(help="Number of documents of a prompt.", rich_help_panel=_QUESTIONS)] = 4,
    query_tokens: Annotated[int, typer.Option(help="Tokens of a query.", rich_help_panel=_QUESTIONS)] = 200,
    item_tokens: Annotated[int, typer.Option(help="Mean tokens of a compared item.", rich_help_panel=_QUESTIONS)] = 20,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of the prefix.", rich_help_panel=_QUESTIONS)] = 32,
    document_tokens: Annotated[int, typer.Option(help="Tokens of a document.", rich_help_panel=_QUESTIONS)] = 60,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question.", rich_help_panel=_QUESTIONS)] = 24,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate.", rich_help_panel=_QUESTIONS)] = 8,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Generate all tokens, by a field of vLLM and this project that other servers may refuse.",
            rich_help_panel=_QUESTIONS,
        ),
    ] = True,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the texts. By default random: a server has the texts of a seed it has seen cached.",
            rich_help_panel=_QUESTIONS,
        ),
    ] = None,
    company: Annotated[
        str,
        typer.Option(
            help="Numbers of other items that an item is scored with, separated by commas.", rich_help_panel=_CONDITIONS
        ),
    ] = "1,7,50",
    rounds: Annotated[int, typer.Option(help="Number of times that each condition is asked.", rich_help_panel=_CONDITIONS)] = 2,
    load: Annotated[
        int, typer.Option(help="Other requests under way at once in the condition under load.", rich_help_panel=_CONDITIONS)
    ] = 8,
    json_file: JsonFile = None,
) -> None:
    """Ask a server the same questions cold, again, in company, in other orders and under load, and count the answers that flip.

    The first answers, each alone and of texts that the server has not seen, are compared with all later ones. An answer is the
    score of one item, or one greedy text. It differs if any of its numbers does. A score flips if its item has another place in
    the order of the query's items, or, with score and generative_scoring, if the probability of "yes" is on the other side of
    0.5. A text flips if any token is another one.

    The exit code is 0 if no answer differs, 1 if any differs, and 2 after an error.
    """
    from chunkattn.bench.flips.questions import Plan
    from chunkattn.bench.load.client import Client
    from chunkattn.bench.load.sweep import random_seed

    check_files(json_file, None)
    counts = {"--queries": queries, "--items": items, "--prompts": prompts, "--documents": documents}
    counts |= {"--query-tokens": query_tokens, "--item-tokens": item_tokens, "--prefix-tokens": prefix_tokens}
    counts |= {"--document-tokens": document_tokens, "--question-tokens": question_tokens}
    counts |= {"--output-tokens": output_tokens, "--rounds": rounds, "--load": load}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1; got {count}")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError(f"--timeout-s must be a finite number above 0; got {timeout_s:g}")
    plan = Plan(
        model=model or "",
        scoring=None if scoring == _NONE else scoring,
        generation=None if generation == _NONE else generation,
        label_ids=(),
        queries=queries,
        items=items,
        prompts=prompts,
        documents=documents,
        query_tokens=query_tokens,
        item_tokens=item_tokens,
        prefix_tokens=prefix_tokens,
        document_tokens=document_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        ignore_eos=ignore_eos,
        company=_company(company),
        rounds=rounds,
        load=load,
        seed=random_seed() if seed is None else seed,
        timeout_s=timeout_s,
    )
    _check_choices(scoring, generation)
    client = Client(url, api_key, name="URL")
    report = Report({"server": url, "client": f"chunkattn {chunkattn.__version__}"}, plan)
    try:
        asyncio.run(_measure(client, tokenizer, report))
    except (ChunkAttnError, KeyboardInterrupt) as error:
        report.error = " ".join(str(error).split()) or "interrupted"
        if report.results:
            _show(report, json_file)
        raise
    _show(report, json_file)
    if any(tally.differ for tally in report.results):
        raise typer.Exit(_DIFFERENT)


@dataclass
class Report:
    """Results of the command, as its JSON holds them.

    Attributes:
        facts: server, client and model.
        plan: questions and conditions.
        results: comparison of each condition.
        notes: kinds of questions that are left out, and failures of the load.
        verdict: one line about all results; empty after an error.
        error: reason for a comparison that ended early.
    """

    facts: dict[str, str]
    plan: Plan
    results: list[Tally] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""
    error: str | None = None


def _company(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(f"--company must be numbers of at least 1, separated by commas, such as 1,7,50; got {text!r}")
    return counts


def _check_choices(scoring: str, generation: str) -> None:
    from chunkattn.bench.load.workloads import GENERATIONS, SCORINGS

    for name, value, known in (("--scoring", scoring, SCORINGS), ("--generation", generation, GENERATIONS)):
        if value not in (*known, _NONE):
            raise ConfigError(f"unknown {name} {value!r}; choose one of {', '.join((*known, _NONE))}")
    if scoring == generation == _NONE:
        raise ConfigError("--scoring none and --generation none leave nothing to ask")


async def _measure(client: Client, tokenizer: str | None, report: Report) -> None:
    from chunkattn.bench.flips.conditions import measure
    from chunkattn.bench.load.sweep import is_ours, label_ids, served_model, tokenizer_of
    from chunkattn.bench.load.workloads import LABELLED

    try:
        name = report.plan.model or await served_model(client)
        report.facts["model"], report.plan = name, replace(report.plan, model=name, salted=await is_ours(client))
        tokens = await tokenizer_of(client, name, tokenizer)
        if report.plan.scoring in LABELLED:
            report.plan = replace(report.plan, label_ids=await label_ids(tokens))
        texts = await _texts(tokens, report.notes)
        async for tally in measure(client, report.plan, texts, say, report.notes.append):
            report.results.append(tally)
            say(f"{tally.kind}, {tally.condition}: {tally.flips} of {tally.answers} flip, {tally.differ} differ")
    finally:
        client.close()


async def _texts(tokens: Callable[[str], Awaitable[list[int]]], notes: list[str]) -> Texts:
    """Return a maker of texts of known token counts, or of word counts where the server does not tokenize."""
    from chunkattn.bench.load.workloads import WORDS, Texts

    async def count(text: str) -> int:
        return len(await tokens(text))

    try:
        return await Texts.measured(count)
    except ConfigError as error:
        notes.append(f"sizes count words instead of tokens: {error}")
        return Texts(dict.fromkeys(WORDS.split(), 1))


def _show(report: Report, json_file: str | None) -> None:
    from chunkattn.bench.flips.replies import verdict

    report.verdict = verdict(report.results) if report.error is None else ""
    records = json.dumps(asdict(report), indent=2)
    if json_file == "-":
        print(records)
        return
    console.print(_table(report.results))
    facts = report.facts | {"scoring": report.plan.scoring or _NONE, "generation": report.plan.generation or _NONE}
    for name, value in (facts | {"seed": str(report.plan.seed)}).items():
        console.print(f"{name}: {value}", soft_wrap=True, markup=False)
    for note in report.notes:
        console.print(" ".join(note.split()), soft_wrap=True, markup=False)
    if report.error is None:
        console.print(report.verdict, soft_wrap=True, markup=False)
    if json_file:
        Path(json_file).write_text(records + "\n")


def _table(results: list[Tally]) -> Table:
    table = Table("", "condition", "answers", "differ", "flip", "drift", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns[2:]:
        column.no_wrap, column.justify = True, "right"
    kind = ""
    for tally in sorted(results, key=lambda tally: tally.kind):  # what was measured under load comes last in time
        counts = (str(count) for count in (tally.answers, tally.differ, tally.flips))
        drift = f"{tally.drift:.2g}" if tally.drift else "0.0"
        table.add_row("" if tally.kind == kind else tally.kind, tally.condition, *counts, drift)
        kind = tally.kind
    return table
