"""Command `chunkattn bench score`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from chunkattn.picture import save_picture
from chunkattn.terminal.commands import command, console, figures, print_lines
from chunkattn.terminal.files import JsonFile, check_files, write_json
from chunkattn.terminal.flags import check_choice, check_positive, options_for, with_options
from chunkattn.terminal.progress import Rounds
from chunkattn.tools.bench.command import group
from chunkattn.tools.bench.sizes import PeerOptions, ScoreWorkload, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from chunkattn.tools.bench.peers import PeerCase
    from chunkattn.tools.bench.score import ScoreCase

C = TypeVar("C", "ScoreCase", "PeerCase")


@dataclass(frozen=True)
class Grid:
    """Workloads and algorithms to measure.

    Attributes:
        query: tokens of the query; repeatable.
        items: number of items; repeatable.
        item_len: tokens per item; repeatable.
        algorithm: scoring algorithm; repeatable. By default all.
        serial_items: number of items that serial and transformers are timed on.
        kv_tokens: tokens of the KV pool; by default enough for packs of full length.
    """

    query: tuple[int, ...] = (2000,)
    items: tuple[int, ...] = (500,)
    item_len: tuple[int, ...] = (20,)
    algorithm: tuple[str, ...] = ()
    serial_items: int = 4
    kv_tokens: int | None = None

    @property
    def workloads(self) -> list[ScoreWorkload]:
        """Return all combinations of the sizes."""
        return [*dict.fromkeys(ScoreWorkload(q, n, size) for q, size, n in product(self.query, self.item_len, self.items))]


@command(group)
@with_options((Grid, None), (Setup, None), (PeerOptions, None))
def score(
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option("--png", "--plot", help="File for a plot (.png, .svg, .pdf).")] = None,
    **options: Any,
) -> None:
    """Measure scoring by every algorithm: one query and many items, with a cold and with a cached query."""
    from chunkattn.tools.bench.peers import PEERS, time_peer
    from chunkattn.tools.bench.score import IN_ORDER, run

    check_files(json_file, plot)
    check_positive(options)
    grid, setup, libraries = options_for(Grid, options), options_for(Setup, options), options_for(PeerOptions, options)
    for name in grid.algorithm:
        check_choice("algorithm", name, IN_ORDER)
    setup.check(max(grid.query) + max(grid.item_len))
    workloads, names = grid.workloads, [name for name in IN_ORDER if name in (grid.algorithm or IN_ORDER)]
    cases: list[ScoreCase] = []
    others: list[PeerCase] = []
    with Rounds() as rounds:
        for measured in run(setup, workloads, names, serial_items=grid.serial_items, kv_tokens=grid.kv_tokens, progress=rounds):
            cases += measured
        for workload, peer in product(workloads, PEERS) if libraries.peers else ():
            most = grid.serial_items if peer == "transformers" else workload.items
            sizes = {"measured_items": min(workload.items, most), "repeats": min(setup.repeats, 3)}
            with rounds(f"{workload.name}, {peer}, all rounds"):
                others.append(time_peer(libraries.peer_python, peer, setup.geometry, workload, **sizes))
    model = {"geometry": setup.geometry, "dtype": setup.dtype}
    if write_json({**model, "cases": [*map(asdict, cases)], "peers": [*map(asdict, others)]}, json_file):
        for workload in workloads:
            title = f"{setup.geometry}, {setup.dtype}: query {workload.query}, {workload.items} items of {workload.item_len}"
            _print(_of(workload, cases), _of(workload, others), names, title)
    if plot is not None:
        _plot(cases, others, plot, setup.geometry)


def _of(workload: ScoreWorkload, cases: Iterable[C]) -> list[C]:
    return [case for case in cases if (case.query, case.items, case.item_len) == astuple(workload)]


def _print(cases: list[ScoreCase], others: list[PeerCase], names: list[str], title: str) -> None:
    table = figures("", "seconds", "items/s", "ratio", "of peak", "rows", "predicted", "host MiB", title=title)
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
        table.add_row(other.peer, *cells, f"{serial / other.seconds:.2f}" if serial and other.seconds else "")
    console.print(table)
    served = {case.algorithm for case in cases}
    notes = [
        "ratio: speed over serial; *: the algorithm that auto picks",
        f"matrix products: {cases[0].matmul_flops / 1e9:.0f} GFLOP/s at best, in the same process",
        f"programs compiled in timed rounds: {max(case.compiles for case in cases)}",
        *(f"{case.name}: {case.measured_items} items timed, and scaled" for case in cases if case.measured_items < case.items),
        *(f"{name}: cannot serve this workload" for name in names if name not in served),
    ]
    for other in others:
        timed = f"{other.measured_items} of {other.items} items timed" if other.seconds else ""
        notes.append(f"{other.name}: {', '.join(text for text in (timed, other.note) if text)}")
    print_lines([*notes, ""])


def _plot(cases: list[ScoreCase], others: list[PeerCase], path: Path, geometry: str) -> None:
    from matplotlib.figure import Figure

    panels: dict[tuple[int, int], dict[str, dict[int, float]]] = {}
    named: list[tuple[str, ScoreCase | PeerCase]] = [*((c.name, c) for c in cases), *((o.peer, o) for o in others)]
    for name, case in named:
        if case.items_per_s is not None:
            panels.setdefault((case.query, case.item_len), {}).setdefault(name, {})[case.items] = case.items_per_s
    figure = Figure(figsize=(max(8.0, 5 * len(panels)), 4.5), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, ((query, item_len), rates) in zip(places, panels.items(), strict=True):
        _panel(axes, rates)
        axes.set_title(f"query {query}, items of {item_len}", fontsize=10)
    figure.suptitle(f"Scoring, {geometry}", fontsize=11)
    save_picture(figure, path)


def _panel(axes: Axes, rates: dict[str, dict[int, float]]) -> None:
    """Draw lines over the number of items, or bars if every method has one number of items."""
    if max(map(len, rates.values())) > 1:
        for name, by_items in rates.items():
            axes.plot(*zip(*sorted(by_items.items()), strict=True), "o-", label=name)
        axes.set(xlabel="items", ylabel="items/s", xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        return
    values = [next(iter(by_items.values())) for by_items in rates.values()]
    bars = axes.barh([*rates], values, color=[f"C{number}" for number in range(len(rates))])
    axes.bar_label(bars, [f" {value:.3g}" for value in values], fontsize=9)
    axes.set(xlabel="items/s")
    axes.margins(x=0.15)
    axes.invert_yaxis()
