"""Conditions of an evaluation: which tokens the question sees, at which positions, with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from chunkattn.calibration import Calibration
from chunkattn.focus import MODES, Focus
from chunkattn.layout import ChunkLayout
from chunkattn.parsers import DocumentPrompt, PromptParser
from chunkattn.parsers.choice import compose
from chunkattn.rope.positions import make_layout
from chunkattn.tools.eval.data import Question, at_line

NONE = Calibration()
"""Calibration that changes nothing."""
MANY = 1 << 30
"""`top_n` of a focus that chooses all gold documents."""
Kind = Literal["full", "shared", "offset", "gold only", "no document", "focus"]
GOLD = "gold"
"""Score of a focus that chooses the gold documents, for comparison."""


@dataclass(frozen=True)
class Condition:
    """One way to show the documents to the question.

    Attributes:
        kind: `full` attention over all documents, isolated documents under `shared` or `offset` positions, full attention
            over the gold documents only, no document, or isolated documents with a choice among them.
        calibration: gap, temperature and scale of the documents. Only `shared` and `focus` have a gap.
        focus: the choice of `focus`; its score may be `GOLD`.
    """

    kind: Kind
    calibration: Calibration = NONE
    focus: Focus | None = None

    @property
    def name(self) -> str:
        """Return the name in tables, such as `shared, gap 64, T 0.8, S 0.8` or `reread 1 by likelihood, gap 8`."""
        calibration, kind = self.calibration, _focus_name(self.focus) if self.focus else self.kind
        parts = [f"gap {calibration.chunk_position_gap}"] if calibration.chunk_position_gap else []
        parts += [f"T {calibration.chunk_temperature:g}", f"S {calibration.chunk_scale:g}"] if calibration.weighs else []
        return ", ".join([kind, *parts])

    @property
    def weighing(self) -> tuple[float, float]:
        """Return temperature and scale."""
        return self.calibration.chunk_temperature, self.calibration.chunk_scale

    def layout(self, prompt: TokenizedQuestion, chosen: Sequence[int] = ()) -> ChunkLayout:
        """Return the prompt of a question under this condition.

        Every condition shows the same tokens in the same order, `gold only`, `no document` and `focus` some of them, and
        `focus` some of them twice. Full attention is an ordinary prompt. With a temperature or scale, its documents form one
        chunk, which is full attention as well.

        Args:
            prompt: token ids of the question.
            chosen: numbers of the documents that `focus` has chosen; without any, all documents are isolated.
        """
        prefix, documents, question = prompt.prefix, list(prompt.documents), prompt.question
        gap = self.calibration.chunk_position_gap
        if self.kind == "offset":
            return make_layout(prefix, documents, question, "offset")
        if self.kind in ("shared", "focus"):
            layout = make_layout(prefix, documents, question, "shared", gap)
            return compose(layout, chosen, self.focus.mode, gap) if self.focus else layout
        if self.kind == "gold only":
            documents = [documents[place] for place in prompt.gold]
        elif self.kind == "no document":
            documents = []
        joined = [token for document in documents for token in document]
        if self.calibration.weighs:
            return make_layout(prefix, [joined], question)
        return make_layout([], [], [*prefix, *joined, *question])


def _focus_name(focus: Focus) -> str:
    return f"{focus.mode} the gold documents" if focus.score == GOLD else focus.name


def conditions_for(calibration: Calibration, *, gold: bool) -> list[Condition]:
    """Return the conditions of an evaluation. Neighbours share their cached K/V.

    Args:
        calibration: gap, temperature and scale that the engine is configured with.
        gold: whether all questions name their gold documents.
    """
    weights = replace(calibration, chunk_position_gap=0)
    gap = Calibration(calibration.chunk_position_gap)
    listed = [
        Condition("full"),
        Condition("full", weights),
        *(Condition("shared", each) for each in (NONE, weights, gap, calibration)),
        Condition("offset"),
        Condition("offset", weights),
        *([Condition("gold only")] if gold else []),
        Condition("no document"),
    ]
    return list(dict.fromkeys(listed))


def focus_conditions(calibration: Calibration, top_n: int, scores: Sequence[str], *, gold: bool) -> list[Condition]:
    """Return the conditions that choose among isolated documents.

    Args:
        calibration: gap, temperature and scale of all of them.
        top_n: largest number of documents to choose; every number from 1 is a condition.
        scores: names of the scores.
        gold: whether all questions name their gold documents, which one condition of each mode then chooses.
    """
    listed = [Focus(n, mode, score) for score in scores for n in range(1, top_n + 1) for mode in MODES]
    listed += [Focus(MANY, mode, GOLD) for mode in MODES] if gold else []
    return [Condition("focus", calibration, focus) for focus in listed]


@dataclass(frozen=True)
class TokenizedQuestion:
    """Token ids of a question's parts, the same under every condition.

    Attributes:
        prefix: token ids of the prefix, BOS or chat template included.
        documents: token ids of every document in its template.
        question: token ids of the question, up to where the answer begins.
        answer: token ids of the gold answer.
        gold: places of the gold documents.
    """

    prefix: Sequence[int]
    documents: Sequence[Sequence[int]]
    question: Sequence[int]
    answer: Sequence[int]
    gold: tuple[int, ...] = ()


def tokenize(parser: PromptParser, questions: Sequence[Question]) -> list[TokenizedQuestion]:
    """Return the token ids of questions, with the documents in the engine's document template.

    A tokenizer with a chat template gets a system message (the prefix, if there is one) and a user message (the question),
    with the documents before it. Other tokenizers get plain text.

    Args:
        parser: parser of the engine.
        questions: questions to tokenize.

    Raises:
        RequestError: a text cannot be tokenized, or the chat template is unusable. The message names the line.
    """
    tokenized = []
    for question in questions:
        with at_line(question.line):
            tokenized.append(_tokenized(parser, question))
    return tokenized


def _tokenized(parser: PromptParser, question: Question) -> TokenizedQuestion:
    if getattr(parser.encode.tokenizer, "chat_template", None):
        system = [{"role": "system", "content": question.prefix}] if question.prefix else []
        parsed = parser.parse_chat([*system, {"role": "user", "content": question.question}], question.documents)
    else:
        parsed = parser.parse(DocumentPrompt(question.prefix, question.documents, question.question))
    layout = parsed.layout
    prefix, *documents, asked = (layout.part(segment).tolist() for segment in layout.segments)
    answer = _continuation(parser, parsed.text or "", question.answers[0])
    return TokenizedQuestion(prefix, documents, asked, answer, question.gold or ())


def _continuation(parser: PromptParser, before: str, answer: str) -> list[int]:
    """Return the token ids of an answer after a text, as the model would write them."""
    tail = before[-1:]
    joined = answer if not tail or tail.isspace() else f" {answer}"
    # A letter stands for the text before the answer, so that a tokenizer that marks the beginning of a text marks the letter.
    stand_in = f"a{tail}" if tail.isspace() else "a"
    start, whole = parser.prompts(stand_in), parser.prompts(stand_in + joined)
    return whole[len(start) :] if whole[: len(start)] == start else parser.prompts(joined)
