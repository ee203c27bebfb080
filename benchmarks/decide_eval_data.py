"""Make decisions for `chunkattn eval` and `chunkattn calibrate` from questions with a gold passage each.

    python -m benchmarks.decide_eval_data SOURCE OUTPUT [--set passage] [--count 160] [--seed 7]

SOURCE is a file as for `chunkattn eval --recipe`. The set `passage` has a passage as state, and its question as a choice of
four answers: the right one, and three answers to other questions with the same question word that the passage does not hold.
In the set `hard` the wrong answers stand in the passage, too: as many words of the same kind, names or numbers. The
set `kind` has a question as state, and asks which of four kinds of things it asks for; a predicate states one of them, right
in every second line. The kinds occur equally often.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chunkattn.tools.eval.recipes import Passage, read_source

WORDS = re.compile(r"\b(who|when|where|how many|which|what|how|why)\b")
KINDS = {"who": "a person", "when": "a date or time", "where": "a place", "how many": "a number"}
_FIRST_WORDS = {
    "The",
    "A",
    "An",
    "In",
    "On",
    "At",
    "It",
    "He",
    "She",
    "They",
    "This",
    "That",
    "These",
    "As",
    "By",
    "For",
    "After",
}
"""Words that begin a sentence, and no name."""
_WRONG = 3
_TRIES = 500


Distractors = Callable[[Passage, random.Random], Iterator[str]]
"""Function that yields wrong answers to a passage's question, and empty texts for those that do not fit."""


def passages(source: Sequence[Passage], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return lines whose state is a passage and whose choice is its question."""
    by_word = defaultdict(list)
    for passage in source:
        by_word[_word(passage)].append(passage)

    def distractors(passage: Passage, rng: random.Random) -> Iterator[str]:
        for _ in range(_TRIES):
            other = rng.choice(by_word[_word(passage)]).answers[0]
            yield other if len(other.split()) <= 5 and not _holds(passage.text, other) else ""

    return _lines(source, count, rng, distractors)


def hard(source: Sequence[Passage], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return lines as `passages` does, with wrong answers from the same passage."""

    def distractors(passage: Passage, rng: random.Random) -> Iterator[str]:
        right, words = passage.answers[0], passage.text.split()
        size = len(right.split())
        spans = [" ".join(words[at : at + size]).strip(".,;:()\"'") for at in range(len(words) - size + 1)]
        for other in rng.sample(spans, len(spans)):
            far = not any(_near(other, known) for known in passage.answers)
            yield other if far and "words" != _form(other) == _form(right) else ""

    return _lines(source, count, rng, distractors)


def _lines(source: Sequence[Passage], count: int, rng: random.Random, distractors: Distractors) -> list[dict[str, Any]]:
    """Return lines of short passages with their questions, a short right answer and `_WRONG` wrong ones, none near another."""
    lines: list[dict[str, Any]] = []
    for passage in rng.sample(source, len(source)):
        text, right = passage.text, passage.answers[0]
        if len(lines) == count or not 20 <= len(text.split()) <= 75 or len(right.split()) > 5 or not _holds(text, right):
            continue
        options = [right]
        for other in distractors(passage, rng):
            if len(options) > _WRONG:
                break
            if other and not any(_near(other, known) for known in options):
                options.append(other)
        if len(options) > _WRONG:
            rng.shuffle(options)
            question = passage.question.strip().removesuffix("?") + "?"
            lines.append({"state": text, "questions": [{"choice": question, "options": options}], "answers": [right]})
    return lines


def _form(text: str) -> str:
    """Return the kind of an answer: numbers, names or other words."""
    words = text.split()
    if any(map(str.isdigit, text)):
        return "number"
    return "name" if all(word[0].isupper() for word in words) and text not in _FIRST_WORDS else "words"


def kinds(source: Sequence[Passage], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return lines whose state is a question, asked for the kind of its answer."""
    lines: list[dict[str, Any]] = []
    left, options = dict.fromkeys(KINDS, count // len(KINDS)), [*KINDS.values()]
    for passage in rng.sample(source, len(source)):
        match = re.match("|".join(KINDS), passage.question.lower())
        if not match or not left[match[0]]:
            continue
        left[match[0]] -= 1
        right = KINDS[match[0]]
        stated = right if len(lines) % 2 == 0 else rng.choice([option for option in options if option != right])
        choice = {"choice": "What kind of thing does this text ask for?", "options": rng.sample(options, len(options))}
        predicate = {"predicate": f"The text asks for {stated}."}
        lines.append({"state": passage.question, "questions": [choice, predicate], "answers": [right, stated == right]})
    return lines


def _word(passage: Passage) -> str:
    match = WORDS.search(passage.question.lower())
    return match[0] if match else ""


def _holds(text: str, answer: str) -> bool:
    return answer.lower() in text.lower()


def _near(one: str, other: str) -> bool:
    return _holds(one, other) or _holds(other, one)


SETS = {"passage": passages, "hard": hard, "kind": kinds}


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of questions and passages")
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--set", choices=SETS, default="passage", help="kind of decisions")
    parser.add_argument("--lines", type=int, help="lines of the source to use; by default all")
    parser.add_argument("--count", type=int, default=160, help="states to write")
    parser.add_argument("--seed", type=int, default=7, help="seed of the choice of lines and wrong answers")
    args = parser.parse_args()
    lines = SETS[args.set](read_source(args.source, args.lines), args.count, random.Random(args.seed))
    args.output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} states in {args.output}")


if __name__ == "__main__":
    main()
