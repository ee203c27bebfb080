"""Command `chunkattn flips`: whether a server's answers depend on cache, company, order or load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.table import Table

import chunkattn
from chunkattn.errors import ChunkAttnError, ConfigError
from chunkattn.terminal.commands import Tokenizer, app, command, console, figures, print_lines
from chunkattn.terminal.files import JsonFile, check_files, write_json
from chunkattn.terminal.flags import check_choice, check_positive, numbers_in, with_options
from chunkattn.terminal.progress import say
from chunkattn.tools.flips.conditions import measure
from chunkattn.tools.flips.questions import FlipPlan
from chunkattn.tools.flips.replies import Tally, verdict
from chunkattn.tools.load.client import Client
from chunkattn.tools.load.reports import reporting
from chunkattn.tools.load.sweep import is_ours, label_ids, random_seed, served_model, tokenizer_of
from chunkattn.tools.load.workloads import GENERATIONS, LABELLED, SCORINGS, WORDS, Texts

_NONE = "none"
_DIFFERENT = 1
"""Exit code when any answer differs."""
_SIZES = (
    "scoring generation queries items prompts documents query_tokens item_tokens prefix_tokens document_tokens question_tokens "
    "output_tokens ignore_eos seed"
)


@dataclass(frozen=True)
class Asked:
    """Options beside those of the plan.

    Attributes:
        api_key: API key of the server.
        company: numbers of other items that an item is scored with, separated by commas.
    """

    api_key: str | None = None
    company: str = "1,7,50"


@command(app)
@with_options(
    (Asked, "Server", "api_key"),
    (FlipPlan, "Server", "model timeout_s"),
    (FlipPlan, "Questions", _SIZES),
    (Asked, "Conditions", "company"),
    (FlipPlan, "Conditions", "rounds load"),
)
def flips(
    url: Annotated[str, typer.Argument(help="Base URL of the server, with or without /v1.", show_default=False)],
    tokenizer: Tokenizer = None,
    json_file: JsonFile = None,
    **options: Any,
) -> None:
    """Ask a server the same questions cold, again, in company, in other orders and under load, and count the answers that flip.

    The first answers, each alone and of texts that the server has not seen, are compared with all later ones. An answer is the
    score of one item, or one greedy text. It differs if any of its numbers does. A score flips if its item has another place in
    the order of the query's items, or, with score and generative_scoring, if the probability of "yes" is on the other side of
    0.5. A text flips if any token is another one.

    The exit code is 0 if no answer differs, 1 if any differs, and 2 after an error.
    """
    check_files(json_file)
    check_positive({name: value for name, value in options.items() if name != "seed"})
    options |= _chosen(**options) | ({"seed": random_seed()} if options["seed"] is None else {})
    others = dict.fromkeys(numbers_in("--company", options.pop("company"), int, "1,7,50"))
    client = Client(url, options.pop("api_key"), name="URL")
    plan = FlipPlan(company=tuple(others), **options)
    report = FlipReport({"server": url, "client": f"chunkattn {chunkattn.__version__}"}, plan)
    with reporting(report, report.results, lambda: _show(report, json_file)):
        asyncio.run(_measure(client, tokenizer, report))
    if any(tally.differ for tally in report.results):
        raise typer.Exit(_DIFFERENT)


@dataclass
class FlipReport:
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
    plan: FlipPlan
    results: list[Tally] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""
    error: str | None = None


def _chosen(scoring: str, generation: str, **_: Any) -> dict[str, str | None]:
    """Return the forms of the requests, None for those that are not asked."""
    for name, value, known in (("--scoring", scoring, SCORINGS), ("--generation", generation, GENERATIONS)):
        check_choice(name, value, (*known, _NONE))
    if scoring == generation == _NONE:
        raise ConfigError("--scoring none and --generation none leave nothing to ask")
    return {name: None if value == _NONE else value for name, value in (("scoring", scoring), ("generation", generation))}


async def _measure(client: Client, tokenizer: str | None, report: FlipReport) -> None:
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
    try:
        return await Texts.measured(tokens)
    except ChunkAttnError as error:
        notes.append(f"sizes count words instead of tokens: {error}")
        return Texts(dict.fromkeys(WORDS.split(), 1))


def _show(report: FlipReport, json_file: str | None) -> None:
    report.verdict = verdict(report.results) if report.error is None else ""
    if not write_json(asdict(report), json_file):
        return
    console.print(_table(report.results))

    facts = report.facts | {"scoring": report.plan.scoring or _NONE, "generation": report.plan.generation or _NONE}
    print_lines(f"{name}: {value}" for name, value in (facts | {"seed": report.plan.seed}).items())
    print_lines(" ".join(note.split()) for note in report.notes)
    if report.error is None:
        print_lines([report.verdict])


def _table(results: list[Tally]) -> Table:
    table = figures("", "condition", "answers", "differ", "flip", "drift", texts=("", "condition"))
    kind = ""
    for tally in sorted(results, key=lambda tally: tally.kind):  # what was measured under load comes last in time
        counts = (str(count) for count in (tally.answers, tally.differ, tally.flips))
        drift = f"{tally.drift:.2g}" if tally.drift else "0.0"
        table.add_row("" if tally.kind == kind else tally.kind, tally.condition, *counts, drift)
        kind = tally.kind
    return table
