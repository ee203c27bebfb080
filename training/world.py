"""Generated worlds of facts: documents about invented people, questions and yes/no queries.

Every name consists of random syllables. Training never uses names whose checksum falls in one residue class; held-out
worlds use only those names, so a model can answer about them only by reading.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

PREFIX = "Read the documents and answer the question."
EOS = "</s>"
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
JOBS = "baker doctor farmer fisher hunter judge miller painter pilot poet sailor smith tailor teacher weaver writer"
FOODS = "apples beans bread cheese figs fish grapes honey nuts olives onions pears plums rice soup tea"


@dataclass(frozen=True)
class Relation:
    """The wording of one kind of fact in documents, questions and queries.

    Attributes:
        statements: sentences with the person `{p}` and the value `{v}`.
        question: question about the person.
        query: yes/no query about the value.
        values: possible values; empty for invented names.
    """

    statements: tuple[str, ...]
    question: str
    query: str
    values: tuple[str, ...] = ()

    @property
    def hard_rival(self) -> bool:
        """Return whether another relation takes values of the same kind."""
        return not self.values


RELATIONS = (
    Relation(("{p} lives in {v}.", "{p} has a house in {v}."), "Where does {p} live?", "Find a person who lives in {v}."),
    Relation(("{p} was born in {v}.", "{p} comes from {v}."), "Where was {p} born?", "Find a person who was born in {v}."),
    Relation(
        ("{p} has a friend called {v}.", "the best friend of {p} is {v}."),
        "Who is the friend of {p}?",
        "Find a person who has a friend called {v}.",
    ),
    Relation(
        ("{p} works as a {v}.", "{p} is a {v}."),
        "What is the job of {p}?",
        "Find a person who works as a {v}.",
        tuple(JOBS.split()),
    ),
    Relation(
        ("{p} likes {v}.", "{p} often eats {v}."),
        "What does {p} like?",
        "Find a person who likes {v}.",
        tuple(FOODS.split()),
    ),
)


@dataclass(frozen=True)
class Question:
    """A question over all documents and its exact answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Reading:
    """Documents, and questions that one document each answers."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Judging:
    """A query, items, and whether each item satisfies the query."""

    query: str
    items: tuple[str, ...]
    labels: tuple[bool, ...]


def is_held_out(name: str) -> bool:
    """Return whether training never uses this name: one name in eight, by checksum."""
    return zlib.crc32(name.encode()) % 8 == 0


class World:
    """A source of random documents. `held_out` picks its share of the name space."""

    def __init__(self, seed: int, *, held_out: bool) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def name(self) -> str:
        """Return a name of two or three syllables from this world's share of the name space."""
        while True:
            name = "".join(self.rng.choices(SYLLABLES, k=self.rng.choice((2, 3)))).capitalize()
            if is_held_out(name) == self.held_out:
                return name

    def _value(self, relation: Relation) -> str:
        return self.rng.choice(relation.values) if relation.values else self.name()

    def _sentence(self, person: str, relation: Relation, value: str) -> str:
        text = self.rng.choice(relation.statements).format(p=person, v=value)
        return text[0].upper() + text[1:]

    def _facts(self, most: int) -> dict[Relation, str]:
        chosen = self.rng.sample(RELATIONS, self.rng.randint(1, most))
        return {relation: self._value(relation) for relation in chosen}

    def _document(self, person: str, facts: dict[Relation, str]) -> str:
        return " ".join(self._sentence(person, r, v) for r, v in facts.items())

    def reading(self, documents: int, questions: int = 1, most_facts: int = 3) -> Reading:
        """Return one document for each of `documents` people, and `questions` questions about any of them."""
        people: dict[str, dict[Relation, str]] = {}
        while len(people) < documents:
            people.setdefault(self.name(), self._facts(most_facts))
        asked = []
        for _ in range(questions):
            person = self.rng.choice(list(people))
            relation = self.rng.choice(list(people[person]))
            asked.append(Question(relation.question.format(p=person) + " Answer:", people[person][relation]))
        return Reading(tuple(self._document(p, f) for p, f in people.items()), tuple(asked))

    def judging(self, items: int, most_facts: int = 3) -> Judging:
        """Return a query and `items` documents, about half of which satisfy the query."""
        relation = self.rng.choice(RELATIONS)
        wanted = self._value(relation)
        texts, labels = [], []
        for _ in range(items):
            facts = self._facts(most_facts)
            if label := self.rng.random() < 0.5:
                if relation not in facts:
                    facts.pop(self.rng.choice(list(facts)))
                facts[relation] = wanted
                order = list(facts.items())
                self.rng.shuffle(order)
                facts = dict(order)
            else:
                # Hard negatives: another relation with the right value, or the right relation with another value.
                rivals = [r for r in facts if r is not relation and r.hard_rival and relation.hard_rival]
                if rivals and self.rng.random() < 0.5:
                    facts[self.rng.choice(rivals)] = wanted
                while facts.get(relation) == wanted:
                    facts[relation] = self._value(relation)
                if relation not in facts and self.rng.random() < 0.3:
                    facts.pop(self.rng.choice(list(facts)))
                    while (value := self._value(relation)) == wanted:
                        pass
                    facts[relation] = value
            texts.append(self._document(self.name(), facts))
            labels.append(label)
        return Judging(relation.query.format(v=wanted), tuple(texts), tuple(labels))
