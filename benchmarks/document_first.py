"""Measure a new query over cached documents: documents first, which reads them, against the query first, which computes them.

    python -m benchmarks.document_first [--json FILE|-]

The documents are cached as prefixes in a first round, which also compiles. Then both orders take turns, each round with one new
query for both, on one engine with random weights. Seconds and CPU seconds are medians, ratios are medians of the rounds'
ratios. The command fails unless the documents first are `--at-least` times as fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from chunkattn.calls.job import answer, drive
from chunkattn.calls.score_inputs import score_call
from chunkattn.outputs import ScoreOutput
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.measure import round_name
from chunkattn.tools.bench.score import ScoreBench
from chunkattn.tools.bench.sizes import BLOCK

ORDERS = {"documents first": True, "query first": False}
"""By name: whether the items come first."""


def score(bench: ScoreBench, query: list[int], documents: list[list[int]], *, item_first: bool) -> ScoreOutput:
    """Score documents and a query in one order, keeping what comes first in the cache."""
    bench.frontend.scores.results.clear()
    job: Any = score_call(
        bench.frontend,
        query,
        documents,
        label_token_ids=list(bench.labels),
        item_first=item_first,
        algorithm="prefill_extend",
    )
    output: ScoreOutput = drive(job.flow(), partial(answer, bench.core))
    return output


def measure(bench: ScoreBench, documents: list[list[int]], query_len: int, rounds: int) -> dict[str, Any]:
    """Return the medians of both orders, and their ratios.

    Args:
        bench: engine.
        documents: token ids of each document.
        query_len: tokens of a query.
        rounds: number of timed rounds.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ORDERS}
    tokens: dict[str, dict[str, int]] = {}
    with timed("caching the documents"):
        score(bench, bench.ids(query_len), documents, item_first=True)
    with timed(round_name(0, rounds)):  # the programs of both orders
        score(bench, bench.ids(query_len), documents, item_first=True)
        score(bench, bench.ids(query_len), documents[:8], item_first=False)
    for number in range(1, 1 + rounds):
        query = bench.ids(query_len)
        for name, item_first in ORDERS.items():
            with timed(f"{name}, {round_name(number, rounds)}"):
                began, cpu = time.perf_counter(), time.process_time()
                output = score(bench, query, documents, item_first=item_first)
                taken[name].append((time.perf_counter() - began, time.process_time() - cpu))
            tokens[name] = {"computed": output.usage.computed_tokens, "cached": output.usage.cached_tokens}
    first, last = (taken[name] for name in ORDERS)
    ratios = [[q / d for d, q in zip(one, other, strict=True)] for one, other in zip(first, last, strict=True)]
    return {
        "documents": len(documents),
        "document_tokens": len(documents[0]),
        "query_tokens": query_len,
        "tokens": tokens,
        "seconds": {name: statistics.median(s for s, _ in spent) for name, spent in taken.items()},
        "cpu_seconds": {name: statistics.median(c for _, c in spent) for name, spent in taken.items()},
        "ratio": statistics.median(ratio for ratio, _ in ratios),
        "cpu_ratio": statistics.median(ratio for _, ratio in ratios),
        "ratios": [ratio for ratio, _ in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of a document")
    parser.add_argument("--query", type=int, default=20, help="tokens of a query")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=15.0, help="ratio of seconds below which the command fails")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    slots = args.documents * -(-args.tokens // BLOCK) * BLOCK
    bench = ScoreBench(args.geometry, slots + 8192, dtype=args.dtype)  # the rest is for queries, and for documents behind them
    documents = [bench.ids(args.tokens) for _ in range(args.documents)]
    report = measure(bench, documents, args.query, args.rounds)
    text = json.dumps(report, indent=2)
    if args.json == "-":
        print(text)
    else:
        print(f"{'order':16}{'seconds':>10}{'CPU s':>10}{'computed':>10}{'cached':>10}")
        for name in ORDERS:
            counts = report["tokens"][name]
            times = f"{report['seconds'][name]:10.2f}{report['cpu_seconds'][name]:10.2f}"
            print(f"{name:16}{times}{counts['computed']:10}{counts['cached']:10}")
        print(f"{report['ratio']:.1f} times as fast, {report['cpu_ratio']:.1f} times fewer CPU seconds")
        if args.json:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    sys.exit(report["ratio"] < args.at_least)


if __name__ == "__main__":
    main()
