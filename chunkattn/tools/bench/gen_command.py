"""Command `chunkattn bench gen`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

import chunkattn
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError
from chunkattn.options import options_of
from chunkattn.terminal.commands import command, console, figures, print_lines
from chunkattn.terminal.files import JsonFile, check_files, write_json
from chunkattn.terminal.flags import check_positive, options_for, with_options
from chunkattn.terminal.progress import Rounds
from chunkattn.tools.bench.command import group
from chunkattn.tools.bench.measure import processor
from chunkattn.tools.bench.sizes import FileOptions, PeerOptions, Setup, Sizes

if TYPE_CHECKING:
    from chunkattn.tools.bench.generate import GenCase, GenReport


WEIGHT_OPTIONS = "weights activations quantization"
"""Options of the engine that say in which form the weights of a file are computed."""


@command(group)
@with_options((Sizes, None), (Setup, None), (FileOptions, None), (EngineConfig, None, WEIGHT_OPTIONS), (PeerOptions, None))
def gen(json_file: JsonFile = None, **options: Any) -> None:
    """Measure prefill, answers from documents, decode and scoring, and vLLM and llama.cpp beside them."""
    from chunkattn.tools.bench.generate import run

    check_files(json_file)
    check_positive(options)
    setup, sizes, others = options_for(Setup, options), options_for(Sizes, options), options_for(PeerOptions, options)
    files, known = options_for(FileOptions, options), options_of(EngineConfig)
    engine = {n: options[n] for n in WEIGHT_OPTIONS.split() if n in options and options[n] != known[n].default}
    files.check()
    setup.check(0 if files.model else sizes.longest)
    if engine and not (files.model or files.gguf):
        raise ConfigError(f"--{min(engine)} is about the weights of a file; add --gguf or --model")
    with Rounds() as rounds:
        report = run(setup, sizes, files, engine=engine, pythons=others.peer_python if others.peers else None, progress=rounds)
    facts = _facts(report)
    model = {"geometry": None if files.model else setup.geometry, "dtype": setup.dtype, **engine}
    if write_json({**model, "facts": facts, **asdict(report)}, json_file):
        name = files.model.name if files.model else " ".join(text for text in (setup.geometry, files.gguf) if text)
        settings = ", ".join([name, setup.dtype, *(f"{key} {value}" for key, value in engine.items())])
        _print(report, facts, f"{settings}: median (minimum to maximum) of {setup.repeats} rounds")


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
    if report.file:
        facts["file"] = report.file
    for peer in report.peers:
        facts[peer.name] = "; ".join(text for text in (peer.version, *peer.notes) if text)
    return facts


def _print(report: GenReport, facts: dict[str, str], title: str) -> None:
    """Print the table and what is needed to read it."""
    peers = [peer.name for peer in report.peers if peer.is_installed]
    table = figures("", "chunkattn", *chain.from_iterable((name, "ratio") for name in peers), "of peak", title=title)
    for case in report.cases:
        table.add_row(*_cells(case, peers))
    console.print(table)
    notes = [f"{name}: {value}" for name, value in facts.items()]
    if peers:
        notes.append("ratio: speed over the peer's, from the medians; more than 1 means that chunkattn is faster")
        if any(case.name.startswith("rag") for case in report.cases):
            notes.append("rag: a peer gets one causal prompt of the same tokens, and its cache can find the prefix alone")
    notes += [
        "of peak, decode: the weights, read once a step, against the memory's rate",
        "of peak, other cases: needed operations against the rate of matrix products",
    ]
    print_lines(notes)


def _cells(case: GenCase, peers: Sequence[str]) -> list[str]:
    """Return the cells of a row."""
    found, unit, factor = [case.peers[name] for name in peers], case.unit, 1
    if unit == "s" and min(*case.values, *chain.from_iterable(peer.values for peer in found), 1.0) < 0.1:
        unit, factor = "ms", 1000
    cells = [case.name, _spread(case.values, unit, factor)]
    for peer in found:
        cells += [_spread(peer.values, unit, factor), "" if peer.ratio is None else f"{peer.ratio:.2f}"]
    return [*cells, f"{case.peak_share:.0%}"]


def _spread(values: Sequence[float], unit: str, factor: float) -> str:
    """Return the median of values times a factor, and below it the minimum and the maximum."""
    if not values:
        return ""
    middle, least, most = (_number(factor * value) for value in (median(values), min(values), max(values)))
    return f"{middle} {unit}\n({least} to {most})"


def _number(value: float) -> str:
    """Return a number of three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
