"""Check that `auto` takes the best scoring algorithm, on a grid of 40 workloads.

    python -m benchmarks.score_auto [--json FILE|-] [--png FILE]

The grid crosses queries of 1 to 2000 tokens (the longest also with the query in the cache) with 8 numbers and lengths of
items, on one engine with random weights. In every workload, `auto` chooses after a round that compiles; then its candidate
algorithms alternate, `--repeats` times each. The command fails unless the median of the chosen algorithm is within 15% of
the best in 90% of the workloads. If `serial` needs more than `--serial-rows` rows, it is timed on some of the items and
scaled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from chunkattn.calls.algorithms import AUTO
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.measure import round_name
from chunkattn.tools.bench.score import EXTEND, ScoreBench
from chunkattn.tools.bench.sizes import ScoreWorkload, pool_tokens

TOLERANCE, WANTED = 1.15, 0.9
SHORT = {"packed_segment": "packed", "prefill_extend": "extend", "serial": "serial"}


class Query(NamedTuple):
    """One row of the grid."""

    tokens: int
    cached: bool

    @property
    def name(self) -> str:
        """Return the row's label."""
        return f"{self.tokens}, cached" if self.cached else str(self.tokens)


QUERIES = [Query(1, False), Query(100, False), Query(500, False), Query(2000, False), Query(2000, True)]
ITEMS = [(1, 20), (1, 200), (3, 5), (10, 20), (10, 100), (50, 200), (100, 20), (500, 20)]
"""Columns of the grid: numbers and lengths of items."""


def measure(bench: ScoreBench, query: Query, workload: ScoreWorkload, repeats: int, serial_rows: int) -> dict[str, Any]:
    """Measure one cell of the grid."""
    sample = max(1, serial_rows // (workload.query + workload.item_len))
    seconds: dict[str, list[float]] = {name: [] for name in AUTO}
    known = bench.ids(query.tokens)
    chosen, predicted = "", {}
    for number in range(1 + repeats):
        if number == 1:
            call = bench.call(known if query.cached else bench.ids(query.tokens), bench.items(workload))
            chosen, predicted = call.choice
        for name in AUTO:
            asked, items = known if query.cached else bench.ids(query.tokens), bench.items(workload)
            if query.cached:
                bench.run(known, [bench.ids(1)], EXTEND)  # earlier runs may have evicted the query
            used = items[:sample] if name == "serial" else items
            with timed(f"{workload.name}, {name}, {round_name(number, repeats)}"):
                taken = bench.run(asked, used, name).seconds * len(items) / len(used)
            if number:  # skip the round that compiles
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min(medians, key=lambda name: medians[name])
    return {
        "query": query.tokens,
        "cached": query.cached,
        "items": workload.items,
        "item_len": workload.item_len,
        "seconds": medians,
        "predicted_seconds": dict(predicted),
        "best": best,
        "auto": chosen,
        "ratio": medians[chosen] / medians[best],
    }


def draw(rows: list[dict[str, Any]], share: float, title: str, path: Path) -> None:
    """Draw a cell for every workload: `auto`'s choice, and its time relative to the best's."""
    import numpy as np
    from matplotlib.figure import Figure

    queries = list(dict.fromkeys(Query(r["query"], r["cached"]) for r in rows))
    columns = list(dict.fromkeys((r["items"], r["item_len"]) for r in rows))
    values = np.full((len(queries), len(columns)), np.nan)
    figure = Figure(figsize=(1.6 + 1.15 * len(columns), 1.8 + 0.75 * len(queries)), layout="constrained")
    axes = figure.subplots()
    for r in rows:
        y, x = queries.index(Query(r["query"], r["cached"])), columns.index((r["items"], r["item_len"]))
        values[y, x] = r["ratio"]
        missed = "" if r["auto"] == r["best"] else f"\n({SHORT[r['best']]})"
        axes.text(x, y, f"{SHORT[r['auto']]}\n{r['ratio']:.2f}{missed}", ha="center", va="center", fontsize=8)
    image = axes.imshow(values, cmap="RdYlGn_r", vmin=1.0, vmax=1.5, aspect="auto", alpha=0.8)
    axes.set_xticks(range(len(columns)), [f"{count} x {size}" for count, size in columns])
    axes.set_yticks(range(len(queries)), [query.name for query in queries])
    axes.set(xlabel="items x tokens", ylabel="tokens of the query")
    axes.set_title(f"auto's choice, its time over the best's (the best)\n{share:.0%} within 15%; {title}", fontsize=10)
    figure.colorbar(image, ax=axes, extend="max")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serial-rows", type=int, default=20_000)
    parser.add_argument("--queries", type=int, nargs="+", help="rows of the grid, by number; default: all")
    parser.add_argument("--columns", type=int, nargs="+", help="columns of the grid, by number; default: all")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw a heat map to FILE; needs matplotlib")
    args = parser.parse_args()
    queries = [QUERIES[i] for i in args.queries or range(len(QUERIES))]
    columns = [ITEMS[i] for i in args.columns or range(len(ITEMS))]
    bench = ScoreBench(args.geometry, pool_tokens(max(query.tokens for query in queries)), dtype=args.dtype)
    for tokens, items in ((1000, 100), (100, 10), (1, 300)):  # the engine learns its rates from these
        for name in AUTO:
            warm = ScoreWorkload(tokens, items, 20)
            for number in range(2):
                with timed(f"{warm.name}, {name}, warm-up {number + 1} of 2"):
                    bench.run(bench.ids(tokens), bench.items(warm)[: 10 if name == "serial" else None], name)
    rows = []
    if args.json != "-":
        print(f"{'query':>12} {'items':>9}  " + "".join(f"{SHORT[name]:>10}" for name in AUTO) + "   best    auto    ratio")
    for query in queries:
        for count, size in columns:
            rows.append(row := measure(bench, query, ScoreWorkload(query.tokens, count, size), args.repeats, args.serial_rows))
            if args.json != "-":
                times = "".join(f"{1000 * row['seconds'][name]:8.1f}ms" for name in AUTO)
                names = f"{SHORT[row['best']]:7} {SHORT[row['auto']]:7}"
                print(f"{query.name:>12} {count:4} x {size:3} {times}   {names} {row['ratio']:.2f}", flush=True)
    share = sum(r["ratio"] <= TOLERANCE for r in rows) / len(rows)
    title = f"{args.geometry}, {args.dtype}, medians of {args.repeats}"
    text = json.dumps({"settings": title, "within_15_percent": share, "rows": rows}, indent=2)
    if args.json == "-":
        print(text)
    else:
        print(f"auto is within 15% of the best in {share:.0%} of {len(rows)} workloads ({title})")
        if args.json:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.png is not None:
        draw(rows, share, title, args.png)
    sys.exit(share < WANTED)


if __name__ == "__main__":
    main()
