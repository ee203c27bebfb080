"""Recipes that make questions over documents from questions with a gold passage each.

A recipe chooses questions and the documents of each. The same source, seed and number of questions to skip give the same
questions for any number of documents, and other numbers to skip give other questions.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from chunkattn.errors import ConfigError, RequestError
from chunkattn.tools.eval.data import read_objects
from chunkattn.tools.eval.measures import containment

PREFIX = "Answer the question with a few words from the documents."
TOP = 20
"""A question qualifies for `bm25` and `two-hop` if its gold passage is among so many best passages."""

Line = dict[str, Any]
"""Line of a data file, see `chunkattn.tools.eval.data`."""
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """Question and the gold passage that holds its answer.

    Attributes:
        line: number of the line in the source, from 1.
        question: text of the question.
        answers: right answers.
        title: title of the passage; may be empty.
        text: text of the passage.
    """

    line: int
    question: str
    answers: tuple[str, ...]
    title: str
    text: str

    @property
    def titled(self) -> str:
        """Return title and text."""
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True)
class Recipe:
    """Choice of questions and documents.

    Attributes:
        name: one of `RECIPES`.
        documents: number of documents of a question, the gold passages among them.
        count: number of questions.
        skip: number of questions to skip before.
        seed: seed of the questions' order, and of the documents' order.
        prefix: text before the documents.
        titles: whether documents have their title.
        first_line: number of the first source line whose question may be taken, from 1. Passages come from all lines.

    Raises:
        ConfigError: the name is unknown, or a number is out of range.
    """

    name: str
    documents: int = 5
    count: int = 200
    skip: int = 0
    seed: int = 0
    prefix: str = PREFIX
    titles: bool = False
    first_line: int = 1

    def __post_init__(self) -> None:
        if self.name not in RECIPES:
            raise ConfigError(f"recipe must be one of {', '.join(RECIPES)}; got {self.name}")
        fewest = 2 if self.name == "two-hop" else 1
        for name, least in (("documents", fewest), ("count", 1), ("skip", 0), ("first_line", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} of recipe {self.name} must be at least {least}; got {value}")


def read_source(path: Path, limit: int | None = None) -> list[Passage]:
    """Read a file of questions with a gold passage each. Empty lines are skipped.

    Args:
        path: file with a JSON object a line: `question`, `answers`, `text` and perhaps `title`. A name that ends in `.gz` is
            read as gzip.
        limit: number of lines to read; None reads all.

    Raises:
        RequestError: the file cannot be read or is empty, or a line is malformed. The message names the line, the field and
            the expected value.
    """
    return [
        Passage(f.line, f.text("question"), f.texts("answers"), f.text("title", ""), f.text("text"))
        for f in read_objects(path, limit)
    ]


def make_lines(source: Sequence[Passage], recipe: Recipe) -> list[Line]:
    """Return the lines of a data file.

    Args:
        source: questions and passages.
        recipe: choice of questions and documents.

    Raises:
        RequestError: the source has too few passages, or too few questions that qualify.
        ConfigError: the library of the recipe is not installed.
    """
    if recipe.documents > len(source):
        raise RequestError(f"{recipe.documents} documents need as many passages; the source has {len(source)}")
    return RECIPES[recipe.name](source, recipe)


def _random(source: Sequence[Passage], recipe: Recipe) -> list[Line]:
    """Take any passages that hold no answer, and put the gold passage at a random place."""
    lines = []
    for place in _chosen(_order(source, recipe), source, recipe):
        passage, rng = source[place], random.Random(f"{recipe.seed} {place}")
        shuffled = rng.sample(range(len(source)), len(source))
        passages = (source[other] for other in shuffled if other != place)
        fitting = (p for p in passages if not containment(p.titled if recipe.titles else p.text, passage.answers))
        others = _others(fitting, recipe.documents - 1, passage)
        gold = rng.randrange(len(others) + 1)
        lines.append(_line(recipe, [*others[:gold], passage, *others[gold:]], passage.question, passage.answers, [passage]))
    return lines


def _bm25(source: Sequence[Passage], recipe: Recipe) -> list[Line]:
    """Take the best passages of a question that hold no answer, and put the gold passage among them in random order."""
    search, lines = _Search(source), []
    for place in _chosen(search.qualifying(_order(source, recipe)), source, recipe):
        passage = source[place]
        lines.append(_line(recipe, search.passages(recipe, place), passage.question, passage.answers, [passage]))
    return lines


def _two_hop(source: Sequence[Passage], recipe: Recipe) -> list[Line]:
    """Join two questions, and put both gold passages among the best other passages of both in random order."""
    search, lines = _Search(source), []
    pairs = _pairs(source, search.qualifying(_order(source, recipe)))
    for first, second in _chosen(pairs, source, recipe, "pairs of questions"):
        both = [source[first], source[second]]
        question = "{}? And {}".format(*(passage.question.strip().removesuffix("?") for passage in both))
        answers = [f"{one} and {other}" for one in both[0].answers for other in both[1].answers]
        line = _line(recipe, search.passages(recipe, first, second), question, answers, both)
        lines.append({**line, "answer_parts": [list(passage.answers) for passage in both]})
    return lines


RECIPES: dict[str, Callable[[Sequence[Passage], Recipe], list[Line]]] = {
    "random": _random,
    "bm25": _bm25,
    "two-hop": _two_hop,
}
"""Functions from a source and a recipe to the lines of a data file, by name."""


def _order(source: Sequence[Passage], recipe: Recipe) -> list[int]:
    asked = range(recipe.first_line - 1, len(source))
    return random.Random(recipe.seed).sample(asked, len(asked))


def _chosen(qualifying: Iterable[T], source: Sequence[Passage], recipe: Recipe, noun: str = "questions") -> list[T]:
    """Return the items of a recipe, in their order."""
    items = list(islice(qualifying, recipe.skip + recipe.count))
    if len(items) < recipe.skip + recipe.count:
        needed = f"{recipe.skip + recipe.count} {noun} (skip {recipe.skip}, count {recipe.count})"
        raise RequestError(f"recipe {recipe.name} needs {needed}; the source makes {len(items)} of its {len(source)} lines")
    return items[recipe.skip :]


def _others(fitting: Iterable[Passage], count: int, gold: Passage) -> list[Passage]:
    others = list(islice(fitting, count))
    if len(others) < count:
        shortage = f"{len(others)} other passages hold none of its answers"
        raise RequestError(f"source line {gold.line}: {shortage}, too few for {count} documents beside the gold passage")
    return others


def _line(recipe: Recipe, passages: Sequence[Passage], question: str, answers: Iterable[str], gold: Sequence[Passage]) -> Line:
    asked = question.strip()
    return {
        "prefix": recipe.prefix,
        "documents": [{"title": p.title, "text": p.text} if recipe.titles else p.text for p in passages],
        "question": f"Question: {asked}{'' if asked.endswith('?') else '?'}",
        "answers": list(answers),
        "gold": sorted(passages.index(passage) for passage in gold),
    }


class _Search:
    """BM25 over the titles and texts of all passages, without English stop words.

    Raises:
        ConfigError: the library is not installed.
        RequestError: the passages have no words.
    """

    def __init__(self, source: Sequence[Passage]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigError("recipes bm25 and two-hop need bm25s: pip install bm25s") from error
        logging.getLogger(bm25s.__name__).setLevel(logging.WARNING)  # the library sets DEBUG
        self.source, self.index = source, bm25s.BM25()
        self.tokenize = partial(bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False)
        words = self.tokenize([passage.titled for passage in source])
        if not any(words):
            raise RequestError("the passages of the source have no word to search for")
        self.index.index(words, show_progress=False)

    def ranked(self, place: int) -> list[int]:
        """Return the places of all passages, the best for a question first. Of equal passages, the earlier comes first."""
        return np.argsort(-self._scores(place), kind="stable").tolist()

    def qualifying(self, order: Iterable[int]) -> Iterator[int]:
        """Yield the questions whose gold passage holds an answer and is among the `TOP` best."""
        for place in order:
            passage, scores = self.source[place], self._scores(place)
            best = np.argsort(-scores, kind="stable")[:TOP]
            if place in best and scores[place] > 0 and containment(passage.text, passage.answers):
                yield place

    def passages(self, recipe: Recipe, *places: int) -> list[Passage]:
        """Return the gold passages of questions and the best others, in random order."""
        gold = [self.source[place] for place in places]
        ranked = chain.from_iterable(zip(*map(self.ranked, places), strict=True))
        passages = [*gold, *_others(self.distractors(ranked, gold), recipe.documents - len(gold), gold[0])]
        random.Random(" ".join(map(str, (recipe.seed, *places)))).shuffle(passages)
        return passages

    def distractors(self, ranked: Iterable[int], gold: Sequence[Passage]) -> Iterator[Passage]:
        """Yield the passages of a ranking that hold no answer of the gold passages, every text once."""
        answers = [answer for passage in gold for answer in passage.answers]
        seen = {passage.text for passage in gold}
        for place in ranked:
            passage = self.source[place]
            if passage.text not in seen and not containment(passage.titled, answers):
                seen.add(passage.text)
                yield passage

    def _scores(self, place: int) -> np.ndarray:
        (words,) = self.tokenize([self.source[place].question])
        return self.index.get_scores_from_ids(self.index.get_tokens_ids(words))


def _pairs(source: Sequence[Passage], order: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of questions, every question at most once: a question with the first one before it that it goes with."""
    waiting: list[int] = []
    for place in order:
        if containment(source[place].question, source[place].answers):
            continue
        partner = next((first for first in waiting if _go_together(source[first], source[place])), None)
        if partner is None:
            waiting.append(place)
        else:
            waiting.remove(partner)
            yield partner, place


def _go_together(one: Passage, other: Passage) -> bool:
    """Return whether neither passage, question or answers tell an answer of the other question."""
    return not any(
        containment(text, about.answers)
        for passage, about in ((one, other), (other, one))
        for text in (passage.titled, passage.question, *passage.answers)
    )
