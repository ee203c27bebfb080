"""Measure the time to the first token of an answer over documents: full attention, isolation and `focus`, cached and cold.

    python -m benchmarks.focus [--documents 12] [--tokens 500] [--question 50] [--json FILE|-]

All ways take turns on one engine with random weights, every round with a new question and, for cached documents, another order
of them. Full attention reuses no document in another order, so it is cold in both cases. Seconds are medians of the rounds,
ratios are medians of the rounds' ratios. The command fails unless a focus on one cached document, in the default mode, is
`--at-least` times as fast as full attention and computes at most documents x question + one document + question tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chunkattn.calls.generate import generate_job
from chunkattn.calls.job import answer, drive
from chunkattn.focus import MODES, Focus
from chunkattn.parsers import ParsedPrompt
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.measure import round_name
from chunkattn.tools.bench.score import ScoreBench
from chunkattn.tools.bench.sizes import BLOCK

PREFIX = 32
"""Tokens of the prefix."""
Way = tuple[str, Focus | None, bool]
"""Name, focus, and whether the documents are isolated."""


def ways_of(top_n: int) -> list[Way]:
    """Return full attention, isolation, and every focus on 1 to `top_n` documents."""
    focused = [Focus(n, mode) for n in range(1, top_n + 1) for mode in MODES]
    return [("full attention", None, False), ("isolated", None, True), *((f.name, f, True) for f in focused)]


def first_token(bench: ScoreBench, prompt: ParsedPrompt) -> tuple[float, int]:
    """Return the seconds to the first token of an answer, and the tokens that the engine computed for it."""
    began = time.perf_counter()
    job = generate_job(bench.frontend, [prompt], SamplingParams(temperature=0, max_tokens=1))
    (output,) = drive(job.flow(), partial(answer, bench.core))
    seconds = time.perf_counter() - began
    computed = len(output.prompt_token_ids) - output.num_cached_tokens
    return seconds, computed + (output.focus.computed_tokens if output.focus else 0)


class Case:
    """One prefix and its documents.

    Args:
        bench: engine.
        documents: number of documents.
        tokens: tokens of each.
        question: tokens of a question.
    """

    def __init__(self, bench: ScoreBench, documents: int, tokens: int, question: int) -> None:
        self.bench, self.question = bench, question
        self.prefix, self.documents = bench.ids(PREFIX), [bench.ids(tokens) for _ in range(documents)]
        self.rng = np.random.default_rng(0)

    def prompt(self, way: Way) -> ParsedPrompt:
        """Return a prompt with a new question and the documents in another order."""
        _, focus, isolated = way
        listed = [self.documents[place] for place in self.rng.permutation(len(self.documents))]
        question = self.bench.ids(self.question)
        if isolated:
            return ParsedPrompt(make_layout(self.prefix, listed, question), None, focus=focus)
        joined = [token for document in listed for token in document]
        return ParsedPrompt(make_layout([], [], [*self.prefix, *joined, *question]), None)

    def measure(self, ways: Sequence[Way], *, cached: bool) -> dict[str, tuple[float, int]]:
        """Return seconds and computed tokens of every way, by its name."""
        times = {}
        for way in ways:
            rereads = way[1] is not None and way[1].mode == "reread"
            if not cached or rereads:  # what another way has read again may be cached, too
                self.bench.core.reset_prefix_cache()
            if cached and way[2]:
                first_token(self.bench, self.prompt(("isolated", None, True)))
            with timed(f"{way[0]}, {'cached' if cached else 'cold'}"):
                times[way[0]] = first_token(self.bench, self.prompt(way))
        return times


def medians(rounds: Sequence[dict[str, tuple[float, int]]]) -> dict[str, dict[str, float]]:
    """Return the median seconds, the most tokens and the median ratio to full attention, by way."""
    base = "full attention"
    return {
        name: {
            "seconds": statistics.median(times[name][0] for times in rounds),
            "computed": max(times[name][1] for times in rounds),
            "ratio": statistics.median(times[base][0] / times[name][0] for times in rounds),
            "lowest": min(times[base][0] / times[name][0] for times in rounds),
            "highest": max(times[base][0] / times[name][0] for times in rounds),
        }
        for name in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of a document")
    parser.add_argument("--question", type=int, default=50, help="tokens of a question")
    parser.add_argument("--top-n", type=int, default=3, help="largest number of documents that focus chooses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=8.0, help="ratio of seconds below which the command fails")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    slots = 2 * (args.documents + args.top_n + 1) * (args.tokens + BLOCK) + args.documents * (args.question + BLOCK)
    bench = ScoreBench(args.geometry, slots + 4096, dtype=args.dtype)
    case = Case(bench, args.documents, args.tokens, args.question)
    ways = ways_of(args.top_n)
    with timed(round_name(0, args.rounds)):  # compiles
        case.measure(ways, cached=True)
    rounds: dict[str, list[dict[str, tuple[float, int]]]] = {"cached": [], "cold": []}
    for number in range(1, 1 + args.rounds):
        with timed(round_name(number, args.rounds)):
            rounds["cached"].append(case.measure(ways, cached=True))
            rounds["cold"].append(case.measure(ways[:4], cached=False))
    report: dict[str, Any] = {name: medians(listed) for name, listed in rounds.items()}
    cached = report["cached"][Focus(1).name]
    most = args.documents * args.question + args.tokens + args.question
    report |= {"documents": args.documents, "document_tokens": args.tokens, "question_tokens": args.question, "most": most}
    text = json.dumps(report, indent=2)
    if args.json == "-":
        print(text)
    else:
        for state in rounds:
            print(f"{state:28}{'seconds':>9}{'computed':>10}{'x as fast':>11}  range")
            for name, row in report[state].items():
                spread = f"{row['lowest']:.1f} to {row['highest']:.1f}"
                print(f"{name:28}{row['seconds']:9.2f}{row['computed']:10.0f}{row['ratio']:11.1f}  {spread}")
        if args.json:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    sys.exit(cached["ratio"] < args.at_least or cached["computed"] > most)


if __name__ == "__main__":
    main()
