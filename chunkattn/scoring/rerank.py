"""Reranking: documents as items behind an instruction and a query, the chance of "yes" as their relevance.

A template says how a model is asked. Instruction and query come first, so that all documents share them. Template and
users' texts are kept apart: control tokens come from the template alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from chunkattn.engine.messages import EngineLimits
from chunkattn.errors import CapacityError, RequestError
from chunkattn.models.loader import DEMO_FOLDER
from chunkattn.outputs import RerankOutput, RerankResult, ScoreOutput
from chunkattn.parsers.encode import PartEncoder
from chunkattn.parsers.plain import PlainEncoder
from chunkattn.parsers.special_tokens import ControlTokens

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True)
class RerankTemplate:
    """How a model is asked whether a document is relevant.

    Spaces before `{document}` are tokenized with the document, as tokenizers take a space with the word behind it.

    Attributes:
        text: what the model reads: `{query}` once, `{instruction}` at most once, behind both `{document}` once.
        labels: the answers that mean relevant and not, as they would follow the text; each must be one more token.
        instruction: what stands for `{instruction}` when a request has none; None where the text has no such place.
        control_tokens: what of the text must be tokens of their own in the model's tokenizer.

    Raises:
        RequestError: a place is missing, or comes twice, or in another order.
    """

    name: str
    text: str
    labels: tuple[str, str] = ("yes", "no")
    instruction: str | None = None
    control_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        slots = _SLOT.split(self.text)[1::2]
        if sorted(slots) not in (["document", "query"], ["document", "instruction", "query"]) or slots[-1] != "document":
            raise RequestError(
                f"the text of template {self.name!r} must hold {{query}} once, {{instruction}} at most once and then "
                f"{{document}} once; it holds {slots}",
                param="template",
            )
        if ("instruction" in slots) != (self.instruction is not None):
            raise RequestError(
                f"template {self.name!r} must have a default instruction if its text has a place for one, and only then",
                param="template",
            )
        if len(self.labels) != 2 or not all(isinstance(label, str) for label in self.labels):
            raise RequestError(f"the labels of template {self.name!r} must be two strings", param="template")

    def split(self, query: str, instruction: str | None = None) -> tuple[list[str], str, str]:
        """What all documents share, and what each begins and ends with.

        Returns:
            The shared text, the template's at even places and the users' at odd; the spaces before a document; the text
            behind it.

        Raises:
            RequestError: an instruction, and no place for it.
        """
        if instruction is not None and self.instruction is None:
            raise RequestError(f"template {self.name!r} takes no instruction", param="instruction")
        filled = {"query": query, "instruction": self.instruction if instruction is None else instruction}
        *shared, before, _, tail = _SLOT.split(self.text)
        pieces = [filled[piece] or "" if place % 2 else piece for place, piece in enumerate(shared)]
        kept = before.rstrip(" ")
        return [*pieces, kept], before[len(kept) :], tail


GENERIC = RerankTemplate(
    name="generic",
    text=(
        "Judge whether the document meets the instruction and the query. Answer yes or no.\n\nInstruction:\n{instruction}\n\n"
        "Query:\n{query}\n\nDocument:\n{document}\n\nAnswer:"
    ),
    labels=(" yes", " no"),
    instruction="Given a search query, find passages that answer it",
)
"""For a model nobody has trained to rank."""

QWEN3_RERANKER = RerankTemplate(
    name="qwen3-reranker",
    text=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    control_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
)
"""As Qwen3-Reranker was trained, word for word."""

PLAIN = RerankTemplate(name="plain", text="{query}{document}")
"""Nothing but query and document; what the bundled demo model was trained on."""

TEMPLATES = {template.name: template for template in (GENERIC, QWEN3_RERANKER, PLAIN)}


def pick_template(wanted: RerankTemplate | str | None, model: str | None, encode: PartEncoder) -> RerankTemplate:
    """The template asked for, or for None the model's own, by its name.

    Args:
        wanted: a template, one's name, or None.
        model: folder or hub id; None is the bundled demo model.
        encode: of the model's tokenizer.

    Raises:
        RequestError: no such template, or the tokenizer lacks its control tokens.
    """
    if wanted is None:
        demo = model is None or Path(model).expanduser().resolve() == DEMO_FOLDER.resolve()
        qwen = "qwen3-reranker" in (model or "").lower() and not _missing(QWEN3_RERANKER, encode)
        picked = PLAIN if demo else QWEN3_RERANKER if qwen else GENERIC
        logger.info("rerank template %r, for the model %r", picked.name, model)
        return picked
    found = TEMPLATES.get(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(found, RerankTemplate):
        known = ", ".join(TEMPLATES)
        raise RequestError(f"template must be a RerankTemplate or one of {known}, got {wanted!r}", param="template")
    if missing := _missing(found, encode):
        raise RequestError(f"this tokenizer lacks the tokens {missing} of template {found.name!r}", param="template")
    return found


def _missing(template: RerankTemplate, encode: PartEncoder) -> list[str]:
    return [token for token in template.control_tokens if token not in encode.added.ids]


@dataclass(frozen=True)
class RerankPlan:
    """What to score for a reranking, and how to tell the result.

    Attributes:
        prefix: token ids all documents share: instruction and query in their template.
        items: of every document with the template's end.
        labels: ids of the positive and the negative answer.
        tail: tokens of the template's end.
        truncated: of every document, whether it was cut.
        top_n: how many of the best to return; None is all.
    """

    template: str
    documents: list[str]
    prefix: list[int]
    items: list[list[int]]
    labels: tuple[int, int]
    tail: int
    truncated: list[bool]
    top_n: int | None

    def check_room(self, limits: EngineLimits, max_chunk_len: int) -> None:
        """Check that every document fits behind the query.

        Raises:
            CapacityError: one does not, or none could.
        """
        bounds = {
            "max_chunk_len": max_chunk_len,
            "max_model_len": limits.max_model_len - len(self.prefix),
            "the KV pool": limits.kv_tokens - len(self.prefix),
        }
        limit = min(bounds, key=lambda name: bounds[name])
        room = bounds[limit] - self.tail
        for index, item in enumerate(self.items):
            if room < 1:
                raise CapacityError(
                    f"query, instruction and template take {len(self.prefix) + self.tail} tokens, and {limit} leaves no room "
                    "for a document",
                    param="query",
                )
            if len(item) > room + self.tail:
                raise CapacityError(
                    f" has {len(item) - self.tail} tokens; behind this query, {limit} leaves room for {room}; "
                    f"pass max_tokens_per_doc={room} or less to cut documents",
                    param="documents",
                    part=f"document {index}",
                )

    def ranked(self, result: ScoreOutput) -> RerankOutput:
        """The documents by their scores, the best first, equal ones as they came.

        Args:
            result: scores of `items`, relevance in the first column.
        """
        # Equal documents tie, though rounding may depend on where in a batch they were.
        known: dict[tuple[int, ...], float] = {}
        relevance = [known.setdefault(tuple(item), row[0]) for item, row in zip(self.items, result.scores, strict=True)]
        order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], i))[: self.top_n]
        results = [RerankResult(i, relevance[i], self.documents[i], self.truncated[i]) for i in order]
        return RerankOutput(results, self.template, result.algorithm, result.usage)


def plan_rerank(
    encode: PartEncoder,
    template: RerankTemplate,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    instruction: str | None = None,
    max_tokens_per_doc: int | None = None,
    special_tokens: bool = False,
) -> RerankPlan:
    """Which sequences to score for a reranking, and at which labels.

    Args:
        encode: of the model's tokenizer.
        template: see `pick_template`.
        query: what documents are judged by.
        documents: texts; `[]` is fine.
        top_n: how many of the best to return; None is all.
        instruction: instead of the template's own.
        max_tokens_per_doc: a document's own tokens beyond these are cut, never the template's; None cuts nothing.
        special_tokens: read users' texts as the tokenizer reads them, control tokens included.

    Raises:
        RequestError: an argument is of a wrong type or value, or a label is not one token.
    """
    if not isinstance(query, str) or not query:
        raise RequestError(f"query must be a string that is not empty, got {query!r}", param="query")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise RequestError(f"documents must be a list of strings, got {type(documents).__name__}", param="documents")
    for index, document in enumerate(documents):
        if not isinstance(document, str):
            text = f" must be a string, got {type(document).__name__}"
            raise RequestError(text, param="documents", part=f"document {index}")
    if instruction is not None and not isinstance(instruction, str):
        raise RequestError(f"instruction must be a string, got {type(instruction).__name__}", param="instruction")
    _check_count("top_n", top_n)
    _check_count("max_tokens_per_doc", max_tokens_per_doc)
    plain = PlainEncoder(encode, ControlTokens(encode.tokenizer, {}) if special_tokens else encode.added)
    shared, before, tail = template.split(query, instruction)
    ids = [plain(before + document, f"document {index}", "documents") for index, document in enumerate(documents)]
    end = plain.fill([tail])
    leading, prefix = encode.leading_ids, plain.fill(shared)
    return RerankPlan(
        template=template.name,
        documents=list(documents),
        prefix=prefix if prefix[: len(leading)] == leading else leading + prefix,
        items=[own[:max_tokens_per_doc] + end for own in ids],
        labels=_label_ids(plain, template, tail, end),
        tail=len(end),
        truncated=[max_tokens_per_doc is not None and len(own) > max_tokens_per_doc for own in ids],
        top_n=top_n,
    )


def _label_ids(plain: PlainEncoder, template: RerankTemplate, tail: str, end: list[int]) -> tuple[int, int]:
    """The tokens with which the labels continue the template."""
    found = []
    for label in template.labels:
        ids = plain.fill([tail + label])
        if len(ids) != len(end) + 1 or ids[:-1] != end:
            raise RequestError(
                f"label {label!r} of template {template.name!r} is not one token behind its end; take another label",
                param="template",
            )
        found.append(ids[-1])
    positive, negative = found
    if positive == negative:
        raise RequestError(f"the labels of template {template.name!r} are the same token", param="template")
    return positive, negative


def _check_count(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
        raise RequestError(f"{name} must be an integer of at least 1, got {value!r}", param=name)
