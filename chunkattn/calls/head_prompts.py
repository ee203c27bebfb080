"""`HeadPrompts`: the prompts of a decision model, cut into what all questions share and each question's own tokens."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from chunkattn.calls.decide_questions import level_of, option_of
from chunkattn.decisions import Choice, Predicate, Question, Rating
from chunkattn.errors import ModelError, RequestError
from chunkattn.models.decision_files import DecisionModel
from chunkattn.models.decision_heads import LinearHead, PointerHead
from chunkattn.models.decision_prompts import KINDS, MARK, SPLIT, AskedOptions, flattened, kev_options
from chunkattn.parsers.decision_text import Encode, MarkedEncoder
from chunkattn.parsers.encode import PlainEncoder, num_shared

_SEGMENTS = "<|fim_prefix|>", "<|fim_middle|>", "<|box_start|>", "<|box_end|>", "<|fim_suffix|>"
"""Tokens before a state, a question and an option, and behind an option and a question, in kev's prompts."""
_CONTROL = re.compile(r"<\|([A-Za-z0-9_]+)\|>")
_PROBES = "a", "0 .", "\u4e2d"
"""Texts of questions that begin unlike each other: what their prompts share is the state and what stands before it."""


@dataclass(frozen=True)
class HeadItem:
    """Prompt of one question.

    Attributes:
        prefix: token ids that other questions about the state share.
        item: the question's own token ids, up to the last one that is read.
        reader: reader of the hidden states; None reads `labels` at the last token.
        labels: token ids of the labels.
        temperature: divisor of the scores.
    """

    prefix: tuple[int, ...]
    item: list[int]
    reader: ItemReader | None
    labels: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class ItemReader:
    """Reader of one question's hidden states; see `chunkattn.calls.score.StateReader`.

    Attributes:
        head: head of the model.
        backs: tokens that are read, counted from the item's end.
        kind: kind of the question.
        count: number of options.
    """

    head: LinearHead | PointerHead
    backs: tuple[int, ...]
    kind: str
    count: int

    @property
    def key(self) -> tuple[int, ...]:
        """Return numbers that tell the readers of one model apart."""
        return (-1, KINDS.index(self.kind), self.count)

    def scores(self, hidden: Float32[np.ndarray, "R H"]) -> Float64[np.ndarray, " N"]:
        """Return the score of each option."""
        return self.head.scores(hidden, self.kind, self.count)


class HeadPrompts:
    """Writer of a decision model's prompts.

    Args:
        model: the decision model.
        plain: tokenizer of trusted and untrusted text.

    Raises:
        ModelError: the tokenizer lacks a token of the prompts.
    """

    def __init__(self, model: DecisionModel, plain: PlainEncoder) -> None:
        self._model, self._plain = model, plain
        self._encode = MarkedEncoder(plain, MARK, SPLIT, sanitizes=model.sanitizes)
        self._segments, self._label_ids = list[int](), dict[str, int | None]()
        if model.form == "kev":
            vocabulary = {} if plain.encode.tokenizer is None else plain.encode.tokenizer.get_vocab()
            if missing := [token for token in _SEGMENTS if token not in vocabulary]:
                raise ModelError(f"the pointer head reads the token {missing[0]}, which the tokenizer lacks")
            self._segments = [vocabulary[token] for token in _SEGMENTS]

    def asked(self, question: Question, part: str) -> AskedOptions:
        """Return a question, which `chunkattn.calls.decide_questions.ask` has checked, as a template gets it.

        Args:
            question: the question.
            part: name of the question, for error messages.

        Raises:
            RequestError: the question has more options than the model has labels or rows.
        """
        model, described = self._model, dict[str, str | None]()
        if isinstance(question, Predicate):
            kind, described = "noul", {"true": question.yes, "false": question.no}
            described = {option: described[option] for option in model.noul_options}
        elif isinstance(question, Choice):
            kind = "choice"
            for option in map(option_of, question.options):
                text = str(option.value).lower() if isinstance(option.value, bool) else option.value
                if text in described:
                    raise RequestError(f" has the option {text!r} twice: as a text and as a bool", param="questions", part=part)
                described[text] = option.description
        else:
            kind = "score"
            levels = [level_of(level) for level in question.levels]
            texts = [f"{own.label}: {own.description}" if own.description else own.label for own in levels]
            described = {str(number): text for number, text in enumerate(texts)}
        labels = list(model.labels.get(kind) or (["Yes", "No"] if kind == "noul" else string.ascii_uppercase))
        if (count := len(described)) > len(labels) and not isinstance(model.head, PointerHead):
            text = f" has {count} options, and this model's head has {len(labels)} for a {kind}"
            raise RequestError(text, param="questions", part=part)
        labels += [""] * (count - len(labels))
        return AskedOptions(question.name or "", kind, question.text, [*described], labels[:count], [*described.values()])

    def items(self, state: Any, asked: Sequence[AskedOptions], parts: Sequence[str]) -> list[HeadItem]:
        """Return the prompt of each question about a state.

        Args:
            state: text or JSON value.
            asked: the questions.
            parts: name of each question, for error messages.

        Raises:
            RequestError: a text cannot be tokenized, or the template fails or writes other marks than the head reads.
        """
        if self._model.form == "kev":
            return self._segmented(state, asked, parts)
        wrapped, made = self._encode.wrapped(state), []
        prefixes: dict[str, tuple[list[int], Encode]] = {}
        encoders: dict[str, Encode] = {}
        for question, part in zip(asked, parts, strict=True):
            if question.type not in prefixes:
                texts = [self._text(wrapped, self.asked(probe, "state"), part) for probe in _probes(question.type)]
                if (shared := texts[0][: num_shared(texts)]) not in encoders:
                    encoders[shared] = self._encode.behind(shared, texts[0], "state", "state")
                encode = encoders[shared]
                probes = [encode(text, "state", "state")[0] for text in texts]
                prefixes[question.type] = probes[0][: num_shared(probes)], encode
            prefix, encode = prefixes[question.type]
            ids, marks = encode(self._text(wrapped, question, part), part, "questions")
            made.append(self._cut(ids, marks or [len(ids)], prefix, question, part))
        return made

    def tokens(self, state: Any, questions: Sequence[Question]) -> list[Sequence[int]]:
        """Return numbers that the answers follow from: the bytes of the model's digest, and the token ids of each prompt.

        Args:
            state: text or JSON value.
            questions: the questions.
        """
        parts = [f"question {number}" for number in range(len(questions))]
        asked = [self.asked(question, part) for question, part in zip(questions, parts, strict=True)]
        items = self.items(state, asked, parts)
        return [list(self._model.digest), *([*item.prefix, *item.item, *item.labels] for item in items)]

    def _text(self, state: Any, question: AskedOptions, part: str) -> str:
        """Return the text of a question's prompt behind a state whose control tokens are wrapped."""
        model, wrapped = self._model, self._encode.wrapped
        fields = AskedOptions(**wrapped(asdict(question)))
        tokenizer = self._plain.encode.tokenizer
        if tokenizer is None:
            raise RequestError("a decision model's prompts need a tokenizer, and this engine has none", param="questions")
        if model.form == "text":
            assert model.write is not None
            return model.write(state, fields)
        content, variables = "", {"chat_template": model.template, "state": state, "question": asdict(fields)}
        if model.write is not None:
            content, variables = model.write(state, fields), {}
        options = {"add_generation_prompt": True, "enable_thinking": False, **variables}
        try:
            return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, **options))
        except Exception as error:  # templates are programs and may raise anything
            raise RequestError(f": the model's template failed: {error}", param="questions", part=part) from error

    def _cut(self, ids: list[int], marks: list[int], shared: list[int], question: AskedOptions, part: str) -> HeadItem:
        """Return the prompt of a question, cut behind what it shares with others and behind the last token that is read."""
        head, count = self._model.head, len(question.options)
        wanted = count + 1 if isinstance(head, PointerHead) else 1
        fault = ""
        if len(marks) != wanted:
            fault = f"writes {len(marks)} marks for {count} options, and its head reads {wanted}"
        elif marks[0] < min(wanted, 2):  # a row of several is read behind the prefix, which has a token
            fault = f"writes its first mark behind {marks[0]} tokens; put text before it"
        if fault:
            raise RequestError(f": the model's template {fault}", param="questions", part=part)
        end = marks[-1]
        cut = max(1, min(num_shared([ids, shared]), marks[0] - 1))
        return self._made(ids[:cut], ids[cut:end], [end - mark + 1 for mark in marks], question)

    def _made(self, prefix: list[int], item: list[int], backs: list[int], question: AskedOptions) -> HeadItem:
        model, count = self._model, len(question.options)
        reader = None if model.head is None else ItemReader(model.head, tuple(backs), question.type, count)
        labels = () if reader is not None else self._labels(question)
        return HeadItem(tuple(prefix), item, reader, labels, model.temperature.get(question.type, 1.0))

    def _labels(self, question: AskedOptions) -> tuple[int, ...]:
        for label in question.labels:
            if label not in self._label_ids:
                ids = self._plain.encode(label)
                unknown = getattr(self._plain.encode.tokenizer, "unk_token_id", None)
                self._label_ids[label] = None if len(ids) != 1 or ids[0] == unknown else ids[0]
        found = [token for label in question.labels if (token := self._label_ids[label]) is not None]
        if len({*found}) != len(question.labels):
            shown = ", ".join(question.labels)
            raise RequestError(f"the labels {shown} of this decision model are not different single tokens", param="questions")
        return tuple(found)

    def _segmented(self, state: Any, asked: Sequence[AskedOptions], parts: Sequence[str]) -> list[HeadItem]:
        """Return kev's prompts: `[state] state`, then `[question] text ([option] text [end]) ... [decide]`."""
        before, begin, option, end, decide = self._segments
        prefix = [before, *self._safe(flattened(state), "state", "state")]
        made = []
        for question, part in zip(asked, parts, strict=True):
            ids, ends = [begin, *self._safe(question.instructions, part, "questions")], []
            for text in kev_options(question):
                ids += [option, *self._safe(text, part, "questions"), end]
                ends.append(len(ids))
            ids.append(decide)
            made.append(self._made(prefix, ids, [len(ids) - own + 1 for own in [*ends, len(ids)]], question))
        return made

    def _safe(self, text: str, name: str, param: str) -> list[int]:
        """Return the tokens of a user's text, without control tokens, as kev writes such texts."""
        return self._plain.encode(_CONTROL.sub("<\u00a6\\1\u00a6>", text), name, param)


def _probes(kind: str) -> Sequence[Question]:
    """Return a question of a kind with each text of `_PROBES`, everywhere. They depend on no question of a caller."""
    match kind:
        case "noul":
            return [Predicate(text, text, text, text) for text in _PROBES]
        case "choice":
            return [Choice(text, [text, text + "b"], text) for text in _PROBES]
    return [Rating(text, [text, text + "b"], text) for text in _PROBES]
