"""Prompts drawn from a small alphabet of token blocks, and from each other.

A defect of the cache shows when one prompt equals a concatenation of parts of earlier ones. So every prompt is a flat
sequence of letters, or an earlier sequence changed a little, and is then cut into parts anew: at the ends of earlier parts,
at page boundaries or anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from chunkattn import Choice, Level, Option, Predicate, Rating
from chunkattn.decisions import Question
from tests.fuzz.rig import SEPARATOR_ID, WORDS, read, words

Ids = tuple[int, ...]
MOST_PAGES = 9
"""Longest prompt, and query with all its items, in pages: a fifth of the pool."""
MOST_BEFORE = 6
"""Longest system message with all documents of a decision, in pages."""


class Prompt(NamedTuple):
    """Token ids of the parts; a plain prompt is all question."""

    prefix: Ids
    chunks: tuple[Ids, ...]
    question: Ids

    @property
    def parts(self) -> list[Ids]:
        """All parts, in order."""
        return [self.prefix, *self.chunks, self.question]

    @property
    def plain(self) -> bool:
        """True if there is neither a prefix nor a chunk."""
        return not self.prefix and not self.chunks

    @property
    def forms(self) -> list[str]:
        """Ways to send it that the parser reads as this prompt and no other."""
        ids = [token for part in self.parts for token in part]
        forms = ["ids" if self.plain else "chunked"]
        if max(ids) < WORDS:
            forms += ["chat"] if self.plain or self.chunks else []
            forms += ["text"] if self.plain or (self.chunks and self.prefix) else []
        if self.chunks and SEPARATOR_ID not in ids:
            forms.append("separated ids")
        return forms


def digest(document: Ids) -> bytes:
    """Return the hash by which documents are sorted."""
    return blake2b(np.asarray(document, "<i4").tobytes(), digest_size=16).digest()


def joined(documents: Sequence[Ids]) -> tuple[Ids, ...]:
    """Return the only chunk of joined documents; no chunk if all are empty."""
    chunk = sum(sorted(documents, key=digest), ())
    return (chunk,) if chunk else ()


class Decision(NamedTuple):
    """Token ids of a system message, documents and a state, and the questions."""

    system: Ids
    documents: tuple[Ids, ...]
    state: Ids
    questions: tuple[Question, ...]


class Alphabet:
    """Draws prompts, queries with items, prefixes with documents, and states with questions.

    Args:
        rng: decides everything.
        block: tokens of a page.
    """

    def __init__(self, rng: np.random.Generator, block: int) -> None:
        self.rng, self._block, self._most = rng, block, MOST_PAGES * block
        blocks = [tuple(rng.integers(0, WORDS, block).tolist()) for _ in range(4)]
        first, second = blocks[:2]
        shorter = [first[:1], first[: block // 2], first[block // 2 :], first[: block - 1], second[:1], second[:-1]]
        self.letters: list[Ids] = [*blocks, *shorter, first + second[:1], first + second]
        weights = np.array([3.0] * len(blocks) + [1.0] * (len(self.letters) - len(blocks)))
        self._weights = weights / weights.sum()
        self._flats: deque[list[Ids]] = deque(maxlen=40)  # parts of earlier sequences, the latest last
        self._prompts: deque[Prompt] = deque(maxlen=20)
        self._decisions: deque[Decision] = deque(maxlen=10)
        self._texts = [words(rng.integers(0, WORDS, size).tolist()) for size in (1, 1, 1, 2, 2, 2, 3, 3)]

    def remember(self, parts: Sequence[Ids]) -> None:
        """Let later prompts be made of these parts of one sequence."""
        self._flats.append([part for part in parts if part])

    def _letter(self) -> Ids:
        return self.letters[int(self.rng.choice(len(self.letters), p=self._weights))]

    def _letters(self, least: int, most: int) -> list[Ids]:
        return [self._letter() for _ in range(self.rng.integers(least, most + 1))]

    def _sequence(self) -> list[Ids]:
        """A flat sequence as parts: letters, or an earlier sequence that is kept, cut short, mixed or continued."""
        rng = self.rng
        if not self._flats or rng.random() < 0.25:
            return self._letters(1, 6)
        parts = list(self._recent(self._flats))
        change = rng.random()
        if change < 0.1 and len(parts) > 1:
            first, second = rng.choice(len(parts), 2, replace=False)
            parts[first], parts[second] = parts[second], parts[first]
        elif change < 0.25:
            parts = parts[: int(rng.integers(1, len(parts) + 1))]
        elif change < 0.3:
            flat = sum(parts, ())
            parts = [flat[: int(rng.integers(1, len(flat) + 1))]]
        elif change < 0.35 and len(parts) > 1:
            parts = parts[1:]
        return parts + self._letters(0, 2)

    def _recent(self, values: deque) -> Any:
        """One of the values, the latest most likely: what was evicted long ago tells nothing."""
        return values[-min(int(self.rng.geometric(0.2)), len(values))]

    def _cut(self, pieces: int) -> list[Ids]:
        """A sequence cut into that many parts, some of them perhaps empty; the last is not."""
        rng, parts = self.rng, self._sequence()
        flat = sum(parts, ())[: self._most]
        ends = np.cumsum([len(part) for part in parts])
        near = [*ends, *ends, *range(0, len(flat), self._block), *rng.integers(0, len(flat), 2)]
        near = [int(cut) for cut in near if cut < len(flat)]
        cuts = sorted(int(cut) for cut in rng.choice(near, pieces - 1)) if near else [0] * (pieces - 1)
        return [flat[start:end] for start, end in zip([0, *cuts], [*cuts, len(flat)], strict=True)]

    def prompt(self) -> Prompt:
        """A plain prompt or one in parts."""
        rng, choice = self.rng, self.rng.random()
        if choice < 0.12 and self._flats:
            prompt = self._echo(self._recent(self._flats))
        elif choice < 0.35:
            prompt = Prompt((), (), self._cut(1)[0])
        elif choice < 0.65 and self._prompts:
            prompt = self._changed(self._recent(self._prompts))
        else:
            prefix, *chunks, question = self._cut(int(rng.integers(2, 6)))
            prompt = Prompt(prefix, tuple(chunks), question)
        if prompt.chunks:
            self._prompts.append(prompt)
        self.remember(prompt.parts)
        return prompt

    def _echo(self, parts: list[Ids]) -> Prompt:
        """An earlier sequence to its end, plain, or all behind its first part as one chunk."""
        first, rest, more = parts[0], sum(parts[1:], ()), self._letter()
        if not rest or self.rng.random() < 0.5:
            return Prompt((), (), ((*first, *rest)[: self._most - len(more)]) + more)
        return Prompt(first, (rest[: self._most - len(first)],), more)

    def _changed(self, prompt: Prompt) -> Prompt:
        """The same prefix with other chunks of the same contents, or another question."""
        rng, chunks = self.rng, list(prompt.chunks)
        change = rng.random()
        if change < 0.4:
            chunks = [chunks[i] for i in rng.permutation(len(chunks))]
        elif change < 0.6:
            chunks.insert(int(rng.integers(len(chunks) + 1)), self._letter())
        elif change < 0.8:
            del chunks[int(rng.integers(len(chunks)))]
        question = prompt.question if rng.random() < 0.5 else sum(self._letters(1, 2), ())
        question = question[: max(self._most - len(prompt.prefix), 1)]
        while len(prompt.prefix) + sum(map(len, chunks)) + len(question) > self._most and chunks:
            chunks.pop()
        return Prompt(prompt.prefix, tuple(chunks), question)

    def query(self) -> tuple[Ids, tuple[Ids, ...]]:
        """A query and one to four items, some of them perhaps empty or equal."""
        rng = self.rng
        query, *items = self._cut(int(rng.integers(2, 6)))
        if not query:
            query = self._letter()
        if rng.random() < 0.2:
            items.append(items[0])
        self.remember([query, *items])
        return query, tuple(items)

    def documents(self) -> tuple[Ids, tuple[Ids, ...]]:
        """A prefix and documents of an earlier prompt, or new ones; not both empty."""
        rng = self.rng
        if self._prompts and rng.random() < 0.6:
            prompt = self._recent(self._prompts)
            prefix, chunks = prompt.prefix, prompt.chunks
        else:
            prefix, *chunks = self._cut(int(rng.integers(1, 4)))
        if not prefix and not any(chunks):
            prefix = self._letter()
        self.remember([prefix, *chunks])
        return prefix, tuple(chunks)

    def decision(self) -> Decision:
        """Questions about a state, behind documents of an earlier prompt or none; or an earlier decision changed a little."""
        rng = self.rng
        if self._decisions and rng.random() < 0.6:
            made = self._changed_decision(self._recent(self._decisions))
        else:
            system, documents = self.documents()
            documents = documents if rng.random() < 0.8 else ()
            made = Decision(system, documents, self._letter(), tuple(self._question() for _ in range(rng.integers(1, 4))))
        system, documents = made.system[: MOST_BEFORE * self._block], list(made.documents)
        while len(system) + sum(map(len, documents)) > MOST_BEFORE * self._block:
            documents.pop()
        made = made._replace(system=system, documents=tuple(documents))
        self._decisions.append(made)
        state = (*made.state, *read("Question:"))
        if documents:
            # Later prompts have the same documents, and a question that goes on from the state.
            self._prompts.append(Prompt(system, made.documents, state + self._letter()))
        self.remember([system, *made.documents, state])
        return made

    def _changed_decision(self, made: Decision) -> Decision:
        """The same decision with documents or questions in another order, with others, or with another state."""
        rng, documents, questions = self.rng, list(made.documents), list(made.questions)
        change = rng.random()
        if change < 0.3:
            documents = [documents[i] for i in rng.permutation(len(documents))]
        elif change < 0.4:
            documents.insert(int(rng.integers(len(documents) + 1)), self._letter())
        elif change < 0.75 and documents:
            number = int(rng.integers(len(documents)))
            # A document of the same length leaves the state's positions as they are.
            documents[number : number + 1] = [documents[number][::-1]] if change < 0.7 else []
        if rng.random() < 0.5:
            questions = [questions[i] for i in rng.permutation(len(questions))]
        if rng.random() < 0.4:
            questions[int(rng.integers(len(questions)))] = self._question()
        state = made.state if rng.random() < 0.7 else self._letter()
        return Decision(made.system, tuple(documents), state, tuple(questions))

    def _text(self) -> str:
        return self._texts[int(self.rng.integers(len(self._texts)))]

    def _question(self) -> Question:
        rng, text = self.rng, self._text()
        described = [self._text() if rng.random() < 0.2 else None for _ in range(6)]
        if (kind := rng.random()) < 0.3:
            return Predicate(text, *described[:2])
        chosen = rng.permutation(len(self._texts))[: int(rng.choice([2, 2, 3, 4, 6]))]
        entries = [(self._texts[number], own) for number, own in zip(chosen, described, strict=False)]
        if kind < 0.8:
            return Choice(text, tuple(value if own is None else Option(value, own) for value, own in entries))
        return Rating(text, tuple(value if own is None else Level(value, own) for value, own in entries))
