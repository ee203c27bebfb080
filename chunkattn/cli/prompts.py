"""Commands `chunkattn generate | score | inspect | demo`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkattn.config import EngineConfig, make_config
from chunkattn.errors import RequestError
from chunkattn.focus import Focus, read_focus
from chunkattn.outputs import FocusOutput
from chunkattn.parsers import ParsedPrompt, PromptParser
from chunkattn.parsers.chat_template import own_template
from chunkattn.parsers.document_encoder import pick_template
from chunkattn.parsers.joined import ISOLATED, in_mode
from chunkattn.picture import layout_summary, layout_table, plot_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.commands import (
    Documents,
    Model,
    PrefixPart,
    PromptText,
    QuestionPart,
    Verbose,
    app,
    command,
    console,
    log_to_stderr,
    make_llm,
    prompt_of,
)
from chunkattn.terminal.flags import with_options

_CHUNKS = "document_template chunk_separator position_strategy chunk_position_gap chunk_calibration"
_DEVICE = "dtype weights activations quantization adapter kv_cache_dtype attention_backend tensor_parallel_size"
_EXCERPT = 80
"""Characters of a chosen document that `generate` prints."""


@command(app)
@with_options((EngineConfig, None, f"tokenizer {_CHUNKS} chunk_temperature chunk_scale {_DEVICE} kv_store"))
def generate(
    prompt: PromptText = None,
    prefix: PrefixPart = None,
    document: Documents = None,
    question: QuestionPart = None,
    model: Model = None,
    chunk_aware: bool = True,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    n: Annotated[int, typer.Option("-n")] = 1,
    stop: list[str] | None = None,
    chunk_mode: str = ISOLATED,
    focus: int | None = None,
    focus_mode: str | None = None,
    focus_score: str | None = None,
    cache_salt: str | None = None,
    verbose: Verbose = False,
    **engine: Any,
) -> None:
    """Continue a prompt: "prefix # # document # # document # # question".

    Args:
        prompt: see `PromptText`.
        prefix: see `PrefixPart`.
        document: see `Documents`.
        question: see `QuestionPart`.
        model: see `Model`.
        chunk_aware: split the prompt at separators.
        max_tokens: number of tokens to generate at most.
        temperature: sampling temperature; 0 is greedy.
        top_p: probability mass of nucleus sampling.
        seed: seed of the random numbers.
        n: number of samples.
        stop: string that ends the text; repeatable.
        chunk_mode: documents as `isolated` chunks, or one `joined` chunk.
        focus: number of documents to choose by the question.
        focus_mode: `only` (default): leave the other documents out; `reread`: repeat the chosen ones.
        focus_score: score of a document: `likelihood` (default) or `relevance`.
        cache_salt: salt of the cache; prompts of one salt share cached K/V.
        verbose: see `Verbose`.
        **engine: other fields of `EngineConfig`.
    """
    log_to_stderr(verbose)
    choice = _focus(focus, mode=focus_mode, score=focus_score)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, n=n, stop=stop or ())
    request = prompt_of(prompt, prefix, document, question)
    llm = make_llm(model, enable_chunk_aware=chunk_aware, **engine)
    output = llm.generate(request, params, focus=choice, chunk_mode=chunk_mode, cache_salt=cache_salt)[0]
    for sample in output.outputs:
        text = sample.text.removeprefix(" ")  # the first word's leading space
        print(text if n == 1 else f"[{sample.index}] {text}")
    if output.focus is not None:
        _print_choice(output.focus, llm.parser.parse(request, chunk_aware))
    llm.close()


def _focus(top_n: int | None, **options: str | None) -> Focus | None:
    """Return the focus of the flags, or None without one."""
    fields = {name: value for name, value in options.items() if value is not None}
    if top_n is None and fields:
        raise RequestError(f"--focus-{next(iter(fields))} needs --focus, the number of documents to choose")
    return read_focus(None if top_n is None else {"top_n": top_n, **fields})


def _print_choice(focus: FocusOutput, prompt: ParsedPrompt) -> None:
    """Print the chosen documents to stderr, so that standard output holds the answer alone."""
    texts = prompt.sources or (prompt.texts or ())[1:-1]
    for number in focus.documents:
        text = " ".join(str(texts[number]).split())
        shown = text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"
        print(f"document {number}, {focus.score} {focus.scores[number]:.4f}: {shown}", file=sys.stderr)
    chosen = f"{focus.mode}: {len(focus.documents)} of {len(focus.scores)} documents"
    print(f"{chosen}, {focus.computed_tokens} tokens computed for the scores", file=sys.stderr)


@command(app)
@with_options((EngineConfig, None, f"tokenizer {_DEVICE}"))
def score(
    query: str,
    items: list[str],
    labels: Annotated[list[str] | None, typer.Option("--labels", "--label")] = None,
    softmax: bool = True,
    item_first: bool = False,
    algorithm: str = "auto",
    sort: bool = True,
    model: Model = None,
    verbose: Verbose = False,
    **engine: Any,
) -> None:
    """Score items against a query: P(label | query + item), or a classifier's classes; each item as if sent alone.

    Args:
        query: query that every item is scored against.
        items: items; a single '-' reads one item per line from standard input.
        labels: labels of one token each, as 'yes,no'; repeatable.
        softmax: normalise the probabilities over the labels.
        item_first: score item + query instead of query + item.
        algorithm: `auto`, `serial`, `packed_segment` or `prefill_extend`.
        sort: sort by the first label's score, best first.
        model: see `Model`.
        verbose: see `Verbose`.
        **engine: other fields of `EngineConfig`.
    """
    log_to_stderr(verbose)
    if items == ["-"]:
        items = sys.stdin.read().splitlines()
    llm = make_llm(model, **engine)
    num_labels = llm.limits.num_labels
    parts = labels or (["yes,no"] if num_labels is None else [])
    texts = [text for part in parts for text in part.split(",")]
    result = llm.score(query, items, labels=texts or None, apply_softmax=softmax, item_first=item_first, algorithm=algorithm)
    order = sorted(range(len(items)), key=lambda i: -result.scores[i][0]) if sort else range(len(items))
    columns = [f"P({escape(text)})" for text in texts] or [f"class {i}" for i in range(num_labels or 0)]
    table = Table("#", *columns, "", "item")
    table.columns[-1].overflow = "fold"
    for i in order:
        values = (f"{value:.4f}" for value in result.scores[i])
        table.add_row(str(i), *values, _bar(result.scores[i][0]), escape(items[i]))
    console.print(table)
    console.print(f"{result.algorithm}: {result.usage.prompt_tokens} tokens, {result.usage.computed_tokens} computed")


def _bar(value: float, width: int = 20) -> str:
    filled = round(value * width)
    return "[green]" + "█" * filled + "[/][dim]" + "░" * (width - filled) + "[/]"


@command(app)
@with_options((EngineConfig, None, f"tokenizer chat_template {_CHUNKS} block_size"))
def inspect(
    prompt: PromptText = None,
    prefix: PrefixPart = None,
    document: Documents = None,
    question: QuestionPart = None,
    model: Model = None,
    chunk_mode: str = ISOLATED,
    plot: Path | None = None,
    compare: Annotated[tuple[str, str] | None, typer.Option(metavar="A B")] = None,
    **engine: Any,
) -> None:
    """Show how a prompt is parsed: parts, tokens, positions. The command loads the tokenizer only.

    Args:
        prompt: see `PromptText`.
        prefix: see `PrefixPart`.
        document: see `Documents`.
        question: see `QuestionPart`.
        model: see `Model`.
        chunk_mode: documents as `isolated` chunks, or one `joined` chunk.
        plot: file for a picture of mask and positions (.png, .svg, .pdf).
        compare: two prompts: texts, files, or files with JSON bodies. Shows where they part and what B reuses.
        **engine: other fields of `EngineConfig`.
    """
    from chunkattn.cli.compare import DEFAULT_BLOCK_SIZE, compared, read_side
    from chunkattn.models.loader import load_model_tokenizer

    loaded, config = load_model_tokenizer(model, engine["tokenizer"]), make_config(model, engine)
    if config.chat_template is not None:
        loaded.chat_template = own_template(loaded, config.chat_template)
    parser = PromptParser(
        loaded,
        separator=config.chunk_separator,
        strategy=config.position_strategy,
        gap=config.calibration.chunk_position_gap,
        chunk_aware=True,
        document_template=pick_template(config.document_template, loaded),
    )
    if compare is not None:
        if prompt is not None or prefix is not None or document or question is not None or plot is not None:
            raise RequestError("--compare takes both prompts itself; leave the other prompt and --plot out")
        first, second = (read_side(text, parser, loaded) for text in compare)
        for line in compared(first, second, loaded, config.block_size or DEFAULT_BLOCK_SIZE):
            print(line)
        return
    parsed = parser.parse(prompt_of(prompt, prefix, document, question))
    layout = in_mode(parsed, chunk_mode, parser.strategy, parser.gap).layout
    console.print(layout_table(layout, loaded))
    console.print(layout_summary(layout))
    if plot is not None:
        plot_layout(layout, plot)
        console.print(f"picture: {escape(str(plot))}")


DEMO_PREFIX = "Read the documents and answer the question."
DEMO_DOCUMENTS = [
    "Zenuso works as a baker. Zenuso lives in Kirora.",
    "Mukaba has a friend called Bimupu. Mukaba was born in Sinoba.",
    "Lezudo likes honey. Lezudo has a house in Pegelu.",
    "Taraku is a sailor. The best friend of Taraku is Vikalu.",
]
DEMO_QUESTIONS = ["Where does Lezudo live?", "Who is the friend of Mukaba?", "What is the job of Taraku?"]
DEMO_QUERY = "Find a person who lives in Kirora."


@command(app)
def demo() -> None:
    """Answer questions from several documents and score the documents, with the bundled model."""
    log_to_stderr(False)
    out = partial(console.print, soft_wrap=True)  # leave line breaks to the terminal
    out("[bold]chunkattn demo[/]: a tiny model, trained chunk-aware, reads about invented people absent from its training\n")
    llm = make_llm(None, enable_chunk_aware=True)
    console.print("[bold]Documents[/] (each sees the prefix and itself)")
    for i, text in enumerate(DEMO_DOCUMENTS):
        out(f"  {i}  {text}")
    orders = [DEMO_DOCUMENTS, DEMO_DOCUMENTS[::-1]]
    prompts = [
        " # # ".join([DEMO_PREFIX, *documents, f"{question} Answer:"]) for documents in orders for question in DEMO_QUESTIONS
    ]
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    answers = [out.outputs[0].text.strip() for out in outs]
    console.print("\n[bold]Questions[/] over all documents")
    for i, question in enumerate(DEMO_QUESTIONS):
        again = answers[i + len(DEMO_QUESTIONS)]
        same = "same" if again == answers[i] else f"[red]{escape(again)}[/]"
        out(f"  {question:32} [green]{escape(answers[i]):10}[/] documents reversed: {same}")
    layout = llm.parser.parse(prompts[0]).layout
    console.print(f"  [dim]{layout_summary(layout)}[/]")
    console.print(f"\n[bold]Scores[/] of the documents as items, query: {DEMO_QUERY}")
    result = llm.score(DEMO_QUERY, DEMO_DOCUMENTS, labels=["yes", "no"], apply_softmax=True)
    for text, (yes, _) in zip(DEMO_DOCUMENTS, result.scores, strict=True):
        out(f"  {yes:6.1%} {_bar(yes)}  {text}")
    console.print("\nTry it: chunkattn generate | score | inspect --help")
