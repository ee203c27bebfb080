"""Make data for `chunkattn eval` and `chunkattn calibrate` from questions with a gold passage each.

    python -m benchmarks.nq_eval_data SOURCE OUTPUT [--documents 5] [--skip 0] [--count 200]

SOURCE has one JSON object a line with `question`, `answers`, `title` and `text`, the passage that holds the answer; a name that
ends in `.gz` is read as gzip. The script shuffles the first `--lines` lines with `--seed`, skips `--skip` of them and makes a
line of OUTPUT from each of the next `--count`. So the same seed and other `--skip` give other questions. The other documents of
a question are passages of the same lines, drawn with the same seed, that hold none of its answers; the gold passage stands at a
random place.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chunkattn.evaluation.measures import containment

PREFIX = "Answer the question with a few words from the documents."


def read_source(path: Path, lines: int) -> list[dict[str, Any]]:
    """Return the first lines of the source."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    # Not `splitlines`: JSON may hold U+2028 and other line separators within a text.
    return [json.loads(line) for line in text.split("\n")[:lines] if line.strip()]


def make_lines(
    source: Sequence[dict[str, Any]], *, documents: int, skip: int, count: int, seed: int, prefix: str, titles: bool
) -> list[dict[str, Any]]:
    """Return the lines of the data."""
    order = random.Random(seed).sample(range(len(source)), len(source))[skip : skip + count]
    return [
        _line(source, place, random.Random(f"{seed} {place}"), documents=documents, prefix=prefix, titles=titles)
        for place in order
    ]


def _line(
    source: Sequence[dict[str, Any]], place: int, rng: random.Random, *, documents: int, prefix: str, titles: bool
) -> dict[str, Any]:
    own, others = source[place], list[int]()
    if documents > len(source):
        raise SystemExit(f"{documents} documents need as many source lines, there are {len(source)}")
    for other in rng.sample(range(len(source)), len(source)):
        if len(others) == documents - 1:
            break
        shown = "{title}\n{text}".format_map(source[other]) if titles else source[other]["text"]
        if other != place and not containment(shown, own["answers"]):
            others.append(other)
    gold = rng.randrange(len(others) + 1)
    listed = [*others[:gold], place, *others[gold:]]
    passages = [{name: source[i][name] for name in ("title", "text")} if titles else source[i]["text"] for i in listed]
    question = own["question"].strip()
    return {
        "prefix": prefix,
        "documents": passages,
        "question": f"Question: {question}{'' if question.endswith('?') else '?'}",
        "answers": own["answers"],
        "gold": [gold],
    }


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of questions and passages")
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--documents", type=int, default=5, help="documents of a question")
    parser.add_argument("--lines", type=int, default=1800, help="lines of the source to use")
    parser.add_argument("--skip", type=int, default=0, help="shuffled lines to skip")
    parser.add_argument("--count", type=int, default=200, help="questions to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle and of the documents")
    parser.add_argument("--prefix", default=PREFIX, help="text before the documents")
    parser.add_argument("--titles", action="store_true", help="put the title before every passage")
    args = parser.parse_args()
    lines = make_lines(
        read_source(args.source, args.lines),
        documents=args.documents,
        skip=args.skip,
        count=args.count,
        seed=args.seed,
        prefix=args.prefix,
        titles=args.titles,
    )
    args.output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} questions of {args.documents} documents in {args.output}")


if __name__ == "__main__":
    main()
