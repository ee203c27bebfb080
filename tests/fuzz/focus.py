"""Prompts that choose among their documents: the ask, and its choice written out from docs/concepts/semantics.md."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chunkattn import ChunkLayout, DocumentPrompt, Focus, make_layout
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import generate_job
from tests.fuzz.calls import Generate
from tests.fuzz.prompts import Ids, digest
from tests.fuzz.rig import POSITIONS, WORDS, words


@dataclass(frozen=True)
class Choose(Generate):
    """Continue a prompt that shows a choice of its chunks, sent as a `DocumentPrompt` of `form` "ids" or "text"."""

    focus: Focus = field(default_factory=lambda: Focus(1))

    def job(self, frontend: Frontend) -> Any:
        """Make the call."""
        prefix, chunks, question = self.prompt
        as_form = words if self.form == "text" else list
        prompt = DocumentPrompt(as_form(prefix), [as_form(chunk) for chunk in chunks], as_form(question), self.focus)
        parsed = frontend.parse(prompt, None)
        return generate_job(frontend, parsed, self.sampling, self.priority, cache_salt=self.salt)

    def turned(self) -> Choose:
        """Return the ask with its documents in another order, unless log-probabilities of the prompt come in that order."""
        if self.sampling.prompt_logprobs is not None:
            return self
        return replace(self, prompt=self.prompt._replace(chunks=self.prompt.chunks[::-1]))

    @property
    def candidates(self) -> list[Ids]:
        """Documents to choose from, each content once, sorted by the hash of their tokens."""
        return sorted({own for own in self.prompt.chunks if own}, key=digest)


def can_be_text(parts: list[Ids]) -> bool:
    """Return whether all tokens of the parts are words."""
    return max(map(max, filter(None, parts))) < WORDS


def scored_layout(ask: Choose, document: Ids, positions: str) -> ChunkLayout:
    """Return the prompt from which the score of a document is read."""
    prefix, _, question = ask.prompt
    if ask.focus.score == "relevance":
        return make_layout([], [], document + question)
    return make_layout(prefix, [document], question, *POSITIONS[positions])


def score_of(ask: Choose, rows: np.ndarray, labels: Ids) -> float:
    """Return a score from the log-probabilities of `scored_layout`.

    Args:
        ask: the ask.
        rows: float32 `[T, vocab]`.
        labels: token ids of "yes" and "no".
    """
    if ask.focus.score == "relevance":
        return float(rows[-1, labels[0]] - rows[-1, labels[1]])
    question = ask.prompt.question
    known = rows[-len(question) : -1]
    return float(known[np.arange(len(known)), question[1:]].mean(dtype=np.float64))


def best(ask: Choose, scores: dict[Ids, float]) -> list[Ids]:
    """Return the documents that scores choose, the best first."""
    return sorted(ask.candidates, key=lambda document: -scores[document])[: ask.focus.top_n]


def composed(ask: Choose, chosen: list[Ids], positions: str) -> ChunkLayout:
    """Return the prompt that shows a choice."""
    prefix, chunks, question = ask.prompt
    if not chosen:
        return make_layout(prefix, chunks, question, *POSITIONS[positions])
    if ask.focus.mode == "only":
        return make_layout(prefix, [own for own in dict.fromkeys(chunks) if own in chosen], question, *POSITIONS[positions])
    again = [token for document in sorted(chosen, key=digest) for token in document]
    return make_layout(prefix, chunks, [*again, *question], *POSITIONS[positions])
