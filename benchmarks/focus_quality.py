"""Compare answers over documents under full attention, isolation, calibration and `focus`, on questions that recipes make.

    python -m benchmarks.focus_quality SOURCE --model MODEL [--recipe bm25] [--documents 10] [--count 200] [--json FILE|-]

SOURCE has a question, its answers and its gold passage a line (`chunkattn.tools.eval.recipes`). For every recipe and number of
documents, one table has a row per condition: the share of greedy answers that contain the right one, their F1, the
log-probability per token of the gold answer, each with its paired difference from full attention and the 95% interval of the
difference, and the recall of the choice. Gap, temperature and scale are those of `--calibration`. Single results are kept in
`--results`, so that an interrupted run continues there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chunkattn.calibration import Calibration
from chunkattn.calls.focus_scores import SCORES
from chunkattn.llm import LLM
from chunkattn.terminal.commands import make_llm
from chunkattn.terminal.progress import Steps, say
from chunkattn.tools.eval.conditions import NONE, Condition, focus_conditions, tokenize
from chunkattn.tools.eval.data import questions_from
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.measures import Mean
from chunkattn.tools.eval.recipes import RECIPES, Passage, Recipe, make_lines, read_source
from chunkattn.tools.eval.report import LOGPROB, RECALL, Row, as_json, compare
from chunkattn.tools.eval.results import Results

MEASURES = {"contained": 3, "F1": 3, LOGPROB: 2}
"""Measures of the table, with their digits."""
ROWS = ("all", "calibrated", "controls")
NO_CHUNK_LIMIT = (1 << 31) - 1


def conditions_of(calibration: Calibration, scores: Sequence[str], top_n: int, rows: str = "all") -> list[Condition]:
    """Return the rows of a table. Neighbours share what they can of the cache.

    Args:
        calibration: gap, temperature and scale of the engine.
        scores: names of the scores of `focus`.
        top_n: largest number of documents that `focus` chooses.
        rows: one of `ROWS`, beside full attention. `"controls"` are full attention with the same temperature and scale, and
            isolation and `focus` without gap, temperature and scale; `"calibrated"` are the others.
    """
    listed = [Condition("full")]
    if rows != "calibrated":
        plain = focus_conditions(NONE, top_n, scores[:1], gold=False)
        listed += [Condition("full", replace(calibration, chunk_position_gap=0)), Condition("shared"), *plain]
    if rows != "controls":
        chosen = focus_conditions(calibration, top_n, scores, gold=True)
        listed += [Condition("shared", calibration), *chosen, Condition("gold only")]
    return list(dict.fromkeys(listed))


def examine(
    llm: LLM, source: Sequence[Passage], recipes: Sequence[Recipe], conditions: Sequence[Condition], known: Results
) -> list[list[Row]]:
    """Return the table of each recipe. They ask the same questions, so that their documents are computed once.

    Args:
        llm: engine, whose calibration is that of the table.
        source: questions and passages.
        recipes: choices of the same questions and of other numbers of documents.
        conditions: rows of each table.
        known: earlier results; new results are added.
    """
    sets = [questions_from(make_lines(source, recipe), recipe.name) for recipe in recipes]
    questions = [question for alike in zip(*sets, strict=True) for question in alike]
    recipe = recipes[0]
    say(f"{recipe.name}: {len(questions)} prompts under {len(conditions)} conditions")
    with Steps(recipe.name, 2 * len(conditions) * len(questions)) as steps:
        examiner = Examiner(llm, questions, tokenize(llm.parser, questions), known, advance=steps.advance)
        examiner.check(conditions)
        values = examiner.examine(conditions, range(len(questions)), texts=True)
    step = len(recipes)
    return [compare({c: {n: v[k::step] for n, v in listed.items()} for c, listed in values.items()}) for k in range(step)]


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the rows of a Markdown table.

    Args:
        rows: rows of a comparison.
    """
    head = ["condition", *(text for name in MEASURES for text in (name, "against full")), RECALL]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [row.name]
        for name, digits in MEASURES.items():
            cells += [f"{row.means[name].mean:.{digits}f}", _difference((row.against_full or {}).get(name), digits)]
        cells.append(f"{row.means[RECALL].mean:.3f}" if RECALL in row.means else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _difference(change: Mean | None, digits: int) -> str:
    if change is None:
        return ""
    interval = f" ({change.low:+.{digits}f} to {change.high:+.{digits}f})" if change.has_interval else ""
    return f"{change.mean:+.{digits}f}{interval}"


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of questions and passages")
    parser.add_argument("--model", help="folder, GGUF file or hub id; by default the demo model")
    parser.add_argument("--calibration", default="off", help="calibration file; by default none")
    parser.add_argument("--dtype", default="auto", help="dtype of the weights and of K/V")
    parser.add_argument("--recipe", action="append", choices=list(RECIPES), help="repeatable; by default bm25 and two-hop")
    parser.add_argument("--documents", action="append", type=int, help="repeatable; by default 5, 10 and 20")
    parser.add_argument("--score", action="append", choices=list(SCORES), help="repeatable; by default all")
    parser.add_argument("--top-n", type=int, default=3, help="largest number of documents that focus chooses")
    parser.add_argument("--rows", choices=ROWS, default="all", help="rows with the calibration, or those that compare with it")
    parser.add_argument("--count", type=int, default=200, help="questions of every table")
    parser.add_argument("--skip", type=int, default=0, help="questions to skip")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions and of the documents' order")
    parser.add_argument("--first-line", type=int, default=1, help="first source line whose question may be taken")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=2 << 30, help="size of the KV pool")
    parser.add_argument("--results", type=Path, default=Path("focus.results.jsonl"), help="file of single results")
    parser.add_argument("--json", help="file of the report, or - for the terminal")
    args = parser.parse_args()
    source, known = read_source(args.source), Results(args.results)
    llm = make_llm(
        args.model,
        chunk_calibration=args.calibration,
        dtype=args.dtype,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        max_chunk_len=NO_CHUNK_LIMIT,
    )
    sizes = args.documents or [5, 10, 20]
    conditions = conditions_of(llm.config.calibration, args.score or list(SCORES), min(args.top_n, *sizes), args.rows)
    report: list[dict[str, Any]] = []
    for name in args.recipe or ["bm25", "two-hop"]:
        recipes = [Recipe(name, n, args.count, args.skip, args.seed, first_line=args.first_line) for n in sizes]
        for recipe, rows in zip(recipes, examine(llm, source, recipes, conditions, known), strict=True):
            head = f"{name}, {recipe.documents} documents, {args.count} questions"
            print(f"\n{head}\n", *lines_of(rows), sep="\n", flush=True)
            report.append({"recipe": name, "documents": recipe.documents, "questions": args.count, "rows": as_json(rows)})
    text = json.dumps(report, indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
