"""Reranking: documents are items after an instruction and a query; the probability of "yes" is their relevance.

A template holds the text of the request to the model. Instruction and query come first, so all documents share them. The
template's text and the users' texts are tokenized separately, so that only the template produces control tokens.
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
from chunkattn.parsers.document_encoder import document_of
from chunkattn.parsers.encode import PartEncoder
from chunkattn.parsers.plain import PlainEncoder
from chunkattn.parsers.special_tokens import ControlTokens

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True)
class RerankTemplate:
    """Text that asks a model whether a document is relevant.

    Spaces before `{document}` are tokenized with the document, because tokenizers join a space with the next word.

    Attributes:
        name: name of the template.
        text: text for the model: `{query}` once, `{instruction}` at most once, and `{document}` once after both.
        labels: answers for relevant and not relevant, in the form that follows the text; each must be one more token.
        instruction: default for `{instruction}`; None if the text has no such place.
        control_tokens: parts of the text that must be single tokens in the model's tokenizer.

    Raises:
        RequestError: a place is missing, repeated or out of order.
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
        """Split the text, filled with the query and the instruction, around the document.

        Args:
            query: the query.
            instruction: the instruction; None uses the template's own.

        Returns:
            The shared text in pieces, the template's text at even indices and the users' texts at odd indices; the spaces
            before a document; the text after the document.

        Raises:
            RequestError: an instruction is given, and the template has no place for it.
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
"""Template for models that are not trained to rank."""

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
"""Template that Qwen3-Reranker was trained on, word for word."""

PLAIN = RerankTemplate(name="plain", text="{query}{document}")
"""Template of query and document only, which the bundled demo model was trained on."""

TEMPLATES = {template.name: template for template in (GENERIC, QWEN3_RERANKER, PLAIN)}


def pick_template(wanted: RerankTemplate | str | None, model: str | None, encode: PartEncoder) -> RerankTemplate:
    """Return the requested template; None picks the model's own template by the model's name.

    Args:
        wanted: a template, the name of a template, or None.
        model: folder, GGUF file or hub id; None is the bundled demo model.
        encode: encoder with the model's tokenizer.

    Raises:
        RequestError: the template is unknown, or the tokenizer lacks its control tokens.
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
    """Sequences to score for a reranking, and the data to build its result.

    Attributes:
        template: name of the template.
        documents: texts of the documents, or their token ids.
        prefix: token ids that all documents share: instruction and query in their template.
        items: token ids of every document with the template's end.
        labels: token ids of the positive and the negative answer.
        tail: number of tokens of the template's end.
        truncated: whether each document was cut.
        top_n: number of best documents to return; None returns all.
    """

    template: str
    documents: list[str | list[int]]
    prefix: list[int]
    items: list[list[int]]
    labels: tuple[int, int]
    tail: int
    truncated: list[bool]
    top_n: int | None

    def check_room(self, limits: EngineLimits, max_chunk_len: int) -> None:
        """Check that every document fits after the query.

        Args:
            limits: the engine's limits.
            max_chunk_len: maximum number of tokens of a document with the template's end.

        Raises:
            CapacityError: a document does not fit, or no document could.
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
                    f" has {len(item) - self.tail} tokens; after this query, {limit} leaves room for {room}; "
                    f"pass max_tokens_per_doc={room} or less to cut documents",
                    param="documents",
                    part=f"document {index}",
                )

    def ranked(self, result: ScoreOutput) -> RerankOutput:
        """Return the documents sorted by score, best first; equal scores keep their order.

        Args:
            result: scores of `items`, relevance in the first column.
        """
        # Equal documents share a score, because rounding may depend on the place in a batch.
        known: dict[tuple[int, ...], float] = {}
        relevance = [known.setdefault(tuple(item), row[0]) for item, row in zip(self.items, result.scores, strict=True)]
        order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], i))[: self.top_n]
        results = [RerankResult(i, relevance[i], self.documents[i], self.truncated[i]) for i in order]
        return RerankOutput(results, self.template, result.algorithm, result.usage)


def plan_rerank(
    encode: PartEncoder,
    template: RerankTemplate,
    query: str,
    documents: Sequence[str | Sequence[int]],
    *,
    top_n: int | None = None,
    instruction: str | None = None,
    max_tokens_per_doc: int | None = None,
    special_tokens: bool = False,
) -> RerankPlan:
    """Plan the sequences to score for a reranking, and the labels to read.

    Args:
        encode: encoder with the model's tokenizer.
        template: see `pick_template`.
        query: the query to judge documents by.
        documents: texts or token ids; `[]` is allowed. Token ids are taken as they are.
        top_n: number of best documents to return; None returns all.
        instruction: replaces the template's own.
        max_tokens_per_doc: maximum number of tokens kept of a document itself, without the template's tokens; None cuts
            nothing.
        special_tokens: whether control tokens in the users' texts are read as such.

    Raises:
        RequestError: an argument has a wrong type or value, or a label is not one token.
    """
    if not isinstance(query, str) or not query:
        raise RequestError(f"query must be a string that is not empty, got {query!r}", param="query")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        text = f"documents must be a list of strings or token ids, got {type(documents).__name__}"
        raise RequestError(text, param="documents")
    given = [document_of(document, index) for index, document in enumerate(documents)]
    if instruction is not None and not isinstance(instruction, str):
        raise RequestError(f"instruction must be a string, got {type(instruction).__name__}", param="instruction")
    _check_count("top_n", top_n)
    _check_count("max_tokens_per_doc", max_tokens_per_doc)
    plain = PlainEncoder(encode, ControlTokens(encode.tokenizer, {}) if special_tokens else encode.added)
    shared, before, tail = template.split(query, instruction)
    gap = plain(before) if before else []
    ids = [
        plain(before + document, f"document {index}", "documents") if isinstance(document, str) else [*gap, *document]
        for index, document in enumerate(given)
    ]
    end = plain.fill([tail])
    leading, prefix = encode.leading_ids, plain.fill(shared)
    return RerankPlan(
        template=template.name,
        documents=given,
        prefix=prefix if prefix[: len(leading)] == leading else leading + prefix,
        items=[own[:max_tokens_per_doc] + end for own in ids],
        labels=_label_ids(plain, template, tail, end),
        tail=len(end),
        truncated=[max_tokens_per_doc is not None and len(own) > max_tokens_per_doc for own in ids],
        top_n=top_n,
    )


def _label_ids(plain: PlainEncoder, template: RerankTemplate, tail: str, end: list[int]) -> tuple[int, int]:
    """Return the tokens with which the labels continue the template."""
    found = []
    for label in template.labels:
        ids = plain.fill([tail + label])
        if len(ids) != len(end) + 1 or ids[:-1] != end:
            raise RequestError(
                f"label {label!r} of template {template.name!r} is not one token after its end; take another label",
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
