"""Command `chunkattn bench gen`."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

import chunkattn
from chunkattn.terminal.commands import command, console, figures, print_lines
from chunkattn.terminal.files import JsonFile, check_files, write_json
from chunkattn.terminal.flags import check_positive, options_for, with_options
from chunkattn.terminal.progress import Rounds
from chunkattn.tools.bench.command import group
from chunkattn.tools.bench.measure import processor
from chunkattn.tools.bench.sizes import PeerOptions, Setup, Sizes

if TYPE_CHECKING:
    from chunkattn.tools.bench.generate import GenCase, GenReport


@command(group)
@with_options((Sizes, None), (Setup, None), (PeerOptions, None))
def gen(json_file: JsonFile = None, **options: Any) -> None:
    """Measure prefill, answers from documents, decode and scoring, and vLLM beside them."""
    from chunkattn.tools.bench.generate import run

    check_files(json_file)
    check_positive(options)
    setup, sizes, others = options_for(Setup, options), options_for(Sizes, options), options_for(PeerOptions, options)
    setup.check(sizes.longest)
    with Rounds() as rounds:
        report = run(setup, sizes, pythons=others.peer_python if others.peers else None, progress=rounds)
    facts, model = _facts(report), {"geometry": setup.geometry, "dtype": setup.dtype}
    if write_json({**model, "facts": facts, **asdict(report)}, json_file):
        _print(report, facts, f"{setup.geometry}, {setup.dtype}: median (minimum to maximum) of {setup.repeats} rounds")


def _facts(report: GenReport) -> dict[str, str]:
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


def _print(report: GenReport, facts: dict[str, str], title: str) -> None:
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


def _cells(case: GenCase, peer: bool) -> list[str]:
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
