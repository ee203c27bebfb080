"""Command `chunkattn bench score`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkattn.cli.bench import BlockSize, Geometry, JsonFile, check_options, group
from chunkattn.cli.common import command, console, figures, print_lines, write_json
from chunkattn.cli.progress import Rounds
from chunkattn.errors import ConfigError
from chunkattn.picture import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from chunkattn.tools.bench.peers import PeerCase
    from chunkattn.tools.bench.score import Case, Workload

_COLORS = {
    "serial": "#8a8a8a",
    "packed_dense": "#d9a441",
    "packed_segment": "#c25b3a",
    "prefill_extend": "#2d6fa3",
    "prefill_extend, cached": "#7fb2dc",
    "transformers": "#8e5bb5",
    "vllm": "#2e9e6b",
}


@command(group)
def score(
    query: Annotated[list[int] | None, typer.Option(help="Tokens of the query; repeatable. Default: 2000.")] = None,
    items: Annotated[list[int] | None, typer.Option(help="Number of items; repeatable. Default: 500.")] = None,
    item_len: Annotated[list[int] | None, typer.Option(help="Tokens per item; repeatable. Default: 20.")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="Scoring algorithm; repeatable. Default: all.")] = None,
    geometry: Geometry = "small",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Number of timed rounds, after one round that compiles.")] = 3,
    serial_items: Annotated[int, typer.Option(help="Number of items that serial and transformers are timed on.")] = 4,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens of the KV pool. Default: enough for packs of full length.")
    ] = None,
    block_size: BlockSize = None,
    peers: Annotated[bool, typer.Option("--peers", help="Time transformers and vLLM as well.")] = False,
    peer_python: Annotated[
        list[Path] | None, typer.Option(help="Python interpreter with a peer installed; repeatable.")
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option("--png", "--plot", help="File for a plot (.png, .svg, .pdf).")] = None,
) -> None:
    """Measure scoring by every algorithm: one query and many items, with a cold and with a cached query."""
    from chunkattn.tools.bench.geometry import GEOMETRIES, default_block_size
    from chunkattn.tools.bench.peers import PEERS, time_peer
    from chunkattn.tools.bench.score import IN_ORDER, Workload, run

    check_options(geometry, dtype, json_file, plot)
    if unknown := set(algorithm or ()) - set(IN_ORDER):
        raise ConfigError(f"unknown algorithm {min(unknown)!r}; choose of {', '.join(IN_ORDER)}")
    sizes = (query or [2000], items or [500], item_len or [20])
    if min(*(n for listed in sizes for n in listed), repeats, serial_items, kv_tokens or 1) < 1:
        raise ConfigError("counts of tokens, items and repeats must be at least 1")
    if (longest := max(sizes[0]) + max(sizes[2])) > (limit := GEOMETRIES[geometry].max_position_embeddings):
        raise ConfigError(f"query and item of {longest} tokens are longer than the {limit} of {geometry}")
    workloads = list(dict.fromkeys(Workload(q, n, size) for q, size, n in product(sizes[0], sizes[2], sizes[1])))
    names = [name for name in IN_ORDER if name in (algorithm or IN_ORDER)]
    cases: list[Case] = []
    others: list[PeerCase] = []
    with Rounds() as rounds:
        pages = block_size or default_block_size(geometry)
        measure = partial(run, dtype=dtype, repeats=repeats, serial_items=serial_items, kv_tokens=kv_tokens, block_size=pages)
        for found in measure(geometry, workloads, names, progress=rounds):
            cases += found
        for workload, peer in product(workloads, PEERS) if peers else ():
            measured = min(workload.items, serial_items) if peer == "transformers" else workload.items
            repeated = min(repeats, 3)
            with rounds(f"{workload.name}, {peer}, all rounds"):
                others.append(time_peer(peer_python or [], peer, geometry, workload, measured_items=measured, repeats=repeated))
    report = {"geometry": geometry, "dtype": dtype, "cases": [*map(asdict, cases)], "peers": [*map(asdict, others)]}
    if write_json(report, json_file):
        for w in workloads:
            title = f"{geometry}, {dtype}: query {w.query}, {w.items} items of {w.item_len}"
            served = [c for c in cases if _workload(c) == w]
            left_out = [name for name in names if name not in {c.algorithm for c in served}]
            _print(served, [o for o in others if _workload(o) == w], left_out, title)
    if plot is not None:
        _plot(cases, others, plot, geometry)


def _workload(case: Case | PeerCase) -> Workload:
    from chunkattn.tools.bench.score import Workload

    return Workload(case.query, case.items, case.item_len)


def _print(cases: list[Case], others: list[PeerCase], left_out: list[str], title: str) -> None:
    columns = ("", "seconds", "items/s", "ratio", "of peak", "rows", "predicted", "host MiB")
    table = figures(*columns, title=title)
    for case in cases:
        table.add_row(
            ("  query cached" if case.cached else case.algorithm) + (" *" if case.auto else ""),
            f"{case.seconds:.3g}",
            f"{case.items_per_s:.3g}",
            "" if case.speedup is None else f"{case.speedup:.1f}",
            f"{case.peak_share:.0%}",
            str(case.rows),
            "" if case.predicted_s is None else f"{case.predicted_s:.3g}",
            f"{case.peak_mib:.0f}",
        )
    serial = next((case.seconds for case in cases if case.algorithm == "serial"), None)
    for other in others:
        cells = () if other.seconds is None else (f"{other.seconds:.3g}", f"{other.items / other.seconds:.3g}")
        ratio = f"{serial / other.seconds:.2f}" if serial and other.seconds else ""
        table.add_row(other.peer, *cells, ratio)
    console.print(table)
    notes = [
        "ratio: speed over serial; *: the algorithm that auto picks",
        f"matrix products: {cases[0].matmul_flops / 1e9:.0f} GFLOP/s at best, in the same process",
        f"programs compiled in timed rounds: {max(case.compiles for case in cases)}",
        *(f"{case.name}: {case.measured_items} items timed, and scaled" for case in cases if case.measured_items < case.items),
        *(f"{name}: cannot serve this workload" for name in left_out),
    ]
    for other in others:
        timed = f"{other.measured_items} of {other.items} items timed" if other.seconds else ""
        notes.append(f"{other.name}: {', '.join(text for text in (timed, other.note) if text)}")
    print_lines([*notes, ""])


def _plot(cases: list[Case], others: list[PeerCase], path: Path, geometry: str) -> None:
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((c.query, c.item_len) for c in cases))
    figure = Figure(figsize=(max(8.0, 5 * len(panels)), 4.5), layout="constrained")
    for axes, (query, item_len) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rates: dict[str, dict[int, float]] = {}
        for case in cases:
            if (case.query, case.item_len) == (query, item_len):
                rates.setdefault(case.name, {})[case.items] = case.items_per_s
        for other in others:
            if (other.query, other.item_len) == (query, item_len) and other.items_per_s is not None:
                rates.setdefault(other.peer, {})[other.items] = other.items_per_s
        _panel(axes, rates)
        axes.set_title(f"query {query}, items of {item_len}", fontsize=10)
    figure.suptitle(f"Scoring, {geometry}", fontsize=11)
    save_picture(figure, path)


def _panel(axes: Axes, rates: dict[str, dict[int, float]]) -> None:
    """Draw lines over the number of items, or bars if every method has one number of items."""
    if max(map(len, rates.values())) > 1:
        for name, found in rates.items():
            axes.plot(*zip(*sorted(found.items()), strict=True), "o-", label=name, color=_COLORS[name])
        axes.set(xlabel="items", ylabel="items/s", xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        return
    names, values = list(rates), [next(iter(found.values())) for found in rates.values()]
    bars = axes.barh(names, values, color=[_COLORS[name] for name in names])
    axes.bar_label(bars, [f" {value:.3g}" for value in values], fontsize=9)
    axes.set(xlabel="items/s")
    axes.margins(x=0.15)
    axes.invert_yaxis()
