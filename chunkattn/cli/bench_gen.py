"""Command `chunkattn bench gen`."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

import chunkattn
from chunkattn.cli.bench import BlockSize, Geometry, JsonFile, check_options, group
from chunkattn.cli.common import command, console, figures, print_lines, write_json
from chunkattn.cli.environment import processor
from chunkattn.cli.progress import Rounds
from chunkattn.errors import ConfigError

if TYPE_CHECKING:
    from chunkattn.tools.bench.generate import Case, Report


@command(group)
def gen(
    case: Annotated[
        list[str] | None, typer.Option(help="Case: prefill, rag, decode or score; repeatable. Default: all.")
    ] = None,
    prefill: Annotated[
        list[int] | None, typer.Option(help="Tokens of a plain prompt; repeatable. Default: 2000, 6000.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Number of documents.")] = 12,
    document_tokens: Annotated[int, typer.Option(help="Tokens per document.")] = 500,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of the prefix before the documents.")] = 32,
    question_tokens: Annotated[int, typer.Option(help="Tokens of the question after the documents.")] = 50,
    sequences: Annotated[
        list[int] | None, typer.Option(help="Number of sequences that decode together; repeatable. Default: 1, 16.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt of a sequence that decodes.")] = 128,
    decode_tokens: Annotated[int, typer.Option(help="Number of timed tokens of a sequence that decodes.")] = 32,
    query: Annotated[int, typer.Option(help="Tokens of the scoring query.")] = 2000,
    items: Annotated[int, typer.Option(help="Number of items to score.")] = 100,
    item_len: Annotated[int, typer.Option(help="Tokens per item.")] = 20,
    geometry: Geometry = "small",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    block_size: BlockSize = None,
    repeats: Annotated[int, typer.Option(help="Number of timed rounds, after one round that compiles.")] = 3,
    peers: Annotated[bool, typer.Option("--peers", help="Run vLLM as well, in turns.")] = False,
    peer_python: Annotated[list[Path] | None, typer.Option(help="Python interpreter with vLLM installed; repeatable.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure prefill, answers from documents, decode and scoring, and vLLM beside them."""
    from chunkattn.tools.bench.cases import CASES, Sizes
    from chunkattn.tools.bench.generate import run
    from chunkattn.tools.bench.geometry import GEOMETRIES, default_block_size
    from chunkattn.tools.bench.score import Workload

    check_options(geometry, dtype, json_file, None)
    if unknown := set(case or ()) - set(CASES):
        raise ConfigError(f"unknown case {min(unknown)!r}; choose of {', '.join(CASES)}")
    cases = [name for name in CASES if name in (case or CASES)]
    sizes = Sizes(
        tuple(prefill or (2000, 6000)),
        documents,
        document_tokens,
        prefix_tokens,
        question_tokens,
        tuple(sequences or (1, 16)),
        prompt_tokens,
        decode_tokens,
        Workload(query, items, item_len),
        block_size or default_block_size(geometry),
    )
    counts = (documents, document_tokens, prefix_tokens, question_tokens, prompt_tokens, query, items, item_len, repeats)
    if min(*counts, *sizes.prefill, *sizes.sequences) < 1:
        raise ConfigError("counts of tokens, documents, sequences, items and repeats must be at least 1")
    if documents < 2 or decode_tokens < 2:
        raise ConfigError("a new order needs at least 2 documents, and a decode rate at least 2 tokens")
    if (longest := sizes.longest(cases)) > (limit := GEOMETRIES[geometry].max_position_embeddings):
        raise ConfigError(f"a sequence of {longest} tokens is longer than the {limit} of {geometry}")
    with Rounds() as rounds:
        report = run(
            geometry,
            sizes,
            cases,
            dtype=dtype,
            repeats=repeats,
            pythons=(peer_python or []) if peers else None,
            progress=rounds,
        )
    facts = _facts(report)
    if write_json({"geometry": geometry, "dtype": dtype, "facts": facts, **asdict(report)}, json_file):
        _print(report, facts, f"{geometry}, {dtype}: median (minimum to maximum) of {repeats} rounds")


def _facts(report: Report) -> dict[str, str]:
    """Return the machine, the versions and the settings that the figures depend on."""
    from chunkattn.backends.cpu import library

    kernel = f", kernel {library.kernel_name()}" if report.backend == "cpu" else ""
    facts = {
        "processor": processor(),
        "attention backend": f"{report.backend}{kernel}",
        "matrix products": f"{report.matmul_flops / 1e9:.0f} GFLOP/s at best, in the same process",
        "memory": f"{report.read_bytes_per_s / 1e9:.1f} GB/s at best, in the same process, to read {report.read_mib:,} MiB",
        "weights": f"{report.weight_bytes / 2**20:.0f} MiB",
        "peak host memory": f"{max(case.peak_mib for case in report.cases):.0f} MiB, this process in timed rounds",
        "versions": f"chunkattn {chunkattn.__version__}, jax {version('jax')}, jaxlib {version('jaxlib')}",
        "programs compiled in timed rounds": str(sum(case.compiles for case in report.cases)),
    }
    if report.peer:
        facts["peer"] = ", ".join(text for text in (report.peer, report.peer_note) if text)
    return facts


def _print(report: Report, facts: dict[str, str], title: str) -> None:
    """Print the table and what is needed to read it."""
    columns = ["", "chunkattn", *(["vllm", "ratio"] if report.peer else []), "of peak"]
    table = figures(*columns, title=title)
    for case in report.cases:
        table.add_row(*_cells(case, bool(report.peer)))
    console.print(table)
    notes = [f"{name}: {value}" for name, value in facts.items()]
    if report.peer:
        notes.append("ratio: speed over vLLM's, from the medians; more than 1 means that chunkattn is faster")
        if any(case.name.startswith("rag") for case in report.cases):
            notes.append("rag: vLLM gets one causal prompt of the same tokens, and its prefix cache can find the prefix alone")
    notes += [
        "of peak, decode: the weights, read once a step, against the memory's rate",
        "of peak, other cases: needed operations against the rate of matrix products",
    ]
    print_lines(notes)


def _cells(case: Case, peer: bool) -> list[str]:
    """Return the cells of a row."""
    ours, others, unit = case.values, case.peer_values, case.unit
    if unit == "s" and min(*ours, *others, 1.0) < 0.1:
        ours, others, unit = tuple(1000 * v for v in ours), tuple(1000 * v for v in others), "ms"
    theirs = [_spread(others, unit), "" if case.ratio is None else f"{case.ratio:.2f}"] if peer else []
    return [case.name, _spread(ours, unit), *theirs, f"{case.peak_share:.0%}"]


def _spread(values: tuple[float, ...], unit: str) -> str:
    """Return the median, and below it the minimum and the maximum."""
    if not values:
        return ""
    return f"{_number(median(values))} {unit}\n({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    """Return a number of three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
