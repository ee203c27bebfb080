"""Rerank templates: the text that asks a model whether a document is relevant, and the choice of a model's template."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

from chunkattn.errors import RequestError
from chunkattn.models.reranker import RerankerTraits
from chunkattn.parsers.encode import PartEncoder

logger = logging.getLogger(__name__)

_SLOT = re.compile(r"\{(instruction|query|document)\}")
_APART = "{|}"
"""Mark between parts of a template that are tokenized apart."""
ORDERS = ("query_first", "document_first")
"""Orders of query and document in a prompt."""


@dataclass(frozen=True)
class RerankTemplate:
    """Text that asks a model whether a document is relevant.

    Spaces before `{document}` are tokenized with the document, because tokenizers join a space with the next word.

    Attributes:
        name: name of the template.
        text: text for the model: `{query}` once, `{instruction}` at most once, and `{document}` once after both. `{|}` stands
            between parts that the model's authors tokenize apart: no token crosses it.
        labels: answers for relevant and not relevant, in the form that follows the text; each must be one more token. A
            document's relevance is the probability of the first against the second; with the first alone, the sigmoid of its
            logit. An integer is the token id itself.
        instruction: default for `{instruction}`, `""` for none; None if the text has no such place.
        control_tokens: parts of the text that must be single tokens in the model's tokenizer.
        instruction_line: text that takes the place of `{instruction}` in `text`, with `{instruction}` once; left out if the
            instruction is empty.
        document_first: text of the other order, with the places of `text` and `{document}` before the others; None if the
            template has no such form. The document is tokenized apart from the text behind it.
        add_special_tokens: begin the prompt with the tokenizer's leading special tokens, unless the text does.

    Raises:
        RequestError: a place is missing, repeated or out of order.
    """

    name: str
    text: str
    labels: tuple[str | int, str | int] | tuple[str | int] = ("yes", "no")
    instruction: str | None = None
    control_tokens: tuple[str, ...] = ()
    instruction_line: str = "{instruction}"
    document_first: str | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        slots = _SLOT.split(self.text)[1::2]
        if sorted(slots) not in (["document", "query"], ["document", "instruction", "query"]) or slots[-1] != "document":
            raise RequestError(
                f"the text of template {self.name!r} must hold {{query}} once, {{instruction}} at most once and then "
                f"{{document}} once; it holds {slots}",
                param="template",
            )
        turned = None if self.document_first is None else _SLOT.split(self.document_first)[1::2]
        if turned is not None and (sorted(turned) != sorted(slots) or turned[0] != "document"):
            raise RequestError(
                f"document_first of template {self.name!r} must hold {{document}} and then the other places of the text, each "
                f"once; it holds {turned}",
                param="template",
            )
        if ("instruction" in slots) != (self.instruction is not None):
            raise RequestError(
                f"template {self.name!r} must have a default instruction if its text has a place for one, and only then",
                param="template",
            )
        listed = isinstance(self.labels, (tuple, list)) and len(self.labels) in (1, 2)
        if not (listed and all(isinstance(label, str) or (type(label) is int and label >= 0) for label in self.labels)):
            text = f"the labels of template {self.name!r} must be one or two strings or token ids"
            raise RequestError(text, param="template")
        if _SLOT.findall(self.instruction_line) != ["instruction"]:
            raise RequestError(f"instruction_line of template {self.name!r} must hold {{instruction}} once", param="template")

    def ordered(self, order: str) -> str:
        """Return the text in one of `ORDERS`.

        Raises:
            RequestError: the order is unknown, or the template has no form with the document first.
        """
        if order not in ORDERS:
            raise RequestError(f"order must be {' or '.join(ORDERS)}, got {order!r}", param="order")
        if order == "query_first":
            return self.text
        if self.document_first is None:
            text = (
                f"template {self.name!r} has no form with the document first; give it one as RerankTemplate(document_first=...)"
            )
            raise RequestError(text, param="order")
        return self.document_first

    def split(
        self, query: str, instruction: str | None = None, order: str = "query_first"
    ) -> tuple[list[list[str]], str, list[list[str]]]:
        """Return the text before the document, the spaces before the document, and the text after the document.

        Query and instruction are filled in. The texts come in the parts that are tokenized apart, each in pieces: the
        template's text at even places, users' texts at odd places.

        Args:
            query: the query.
            instruction: the instruction; None uses the template's own.
            order: one of `ORDERS`.

        Raises:
            RequestError: as `ordered`, or an instruction is given, and the template has no place for it.
        """
        if instruction is not None and self.instruction is None:
            raise RequestError(f"template {self.name!r} takes no instruction", param="instruction")
        filled = {"query": query, "instruction": self.instruction if instruction is None else instruction}
        line = self.instruction_line if filled["instruction"] else ""
        head, _, rest = self.ordered(order).replace("{instruction}", line).partition("{document}")
        kept = head.rstrip(" ")
        before, after = (
            [
                [filled[piece] or "" if place % 2 else piece for place, piece in enumerate(_SLOT.split(part))]
                for part in side.split(_APART)
            ]
            for side in (kept, rest)
        )
        return before, head[len(kept) :], after

    def tail(self, order: str = "query_first") -> str:
        """Return the template's own text at the end, back to a user's text or to a part that is tokenized apart."""
        return _SLOT.split(self.ordered(order))[-1].split(_APART)[-1]


GENERIC = RerankTemplate(
    name="generic",
    text=(
        "Judge whether the document meets the instruction and the query. Answer yes or no.\n\nInstruction:\n{instruction}\n\n"
        "Query:\n{query}\n\nDocument:\n{document}\n\nAnswer:"
    ),
    labels=(" yes", " no"),
    instruction="Given a search query, find passages that answer it",
    document_first=(
        "Judge whether the document meets the instruction and the query. Answer yes or no.\n\nDocument:\n{document}\n\n"
        "Instruction:\n{instruction}\n\nQuery:\n{query}\n\nAnswer:"
    ),
)
"""Template for models that are not trained to rank."""

_QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

QWEN3_RERANKER = RerankTemplate(
    name="qwen3-reranker",
    text=f"{_QWEN3_BEGIN}<Instruct>: {{instruction}}\n<Query>: {{query}}\n<Document>: {{document}}{_QWEN3_END}",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    control_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    document_first=f"{_QWEN3_BEGIN}<Document>: {{document}}\n<Instruct>: {{instruction}}\n<Query>: {{query}}{_QWEN3_END}",
)
"""Template that Qwen3-Reranker was trained on, word for word. It was not trained on the form with the document first."""

_MXBAI_BEGIN = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n{|}"
)
_MXBAI_END = (
    "{|}\n{|}You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment "
    "(0 for not relevant, 1 for relevant).\nRelevance:{|}<|im_end|>\n<|im_start|>assistant\n"
)

MXBAI_RERANK_V2 = RerankTemplate(
    name="mxbai-rerank-v2",
    text=f"{_MXBAI_BEGIN}{{instruction}}query: {{query}}{{|}}\n{{|}}document: {{document}}{_MXBAI_END}",
    labels=("1", "0"),
    instruction="",
    control_tokens=("<|im_start|>", "<|im_end|>"),
    instruction_line="instruction: {instruction}\n",
    document_first=f"{_MXBAI_BEGIN}document: {{document}}{{|}}\n{{|}}{{instruction}}query: {{query}}{_MXBAI_END}",
)
"""Template that mxbai-rerank-v2 was trained on, in the parts that its authors tokenize. It was not trained on the form with the
document first.

Source: https://github.com/mixedbread-ai/mxbai-rerank
"""

PLAIN = RerankTemplate(name="plain", text="{query}{document}", document_first="{document}{query}")
"""Template of query and document only. The bundled demo model was trained on it, with the query first."""

TEMPLATES = {template.name: template for template in (GENERIC, QWEN3_RERANKER, MXBAI_RERANK_V2, PLAIN)}


def pick_template(template: RerankTemplate | str, encode: PartEncoder) -> RerankTemplate:
    """Return a requested template.

    Args:
        template: a template or the name of a template.
        encode: encoder with the model's tokenizer.

    Raises:
        RequestError: the template is unknown, or the tokenizer lacks its control tokens.
    """
    picked = TEMPLATES.get(template) if isinstance(template, str) else template
    if not isinstance(picked, RerankTemplate):
        known = ", ".join(TEMPLATES)
        raise RequestError(f"template must be a RerankTemplate or one of {known}, got {template!r}", param="template")
    if missing := _missing(picked, encode):
        raise RequestError(f"this tokenizer lacks the tokens {missing} of template {picked.name!r}", param="template")
    return picked


def default_template(option: str | None, traits: RerankerTraits, model: str | None, encode: PartEncoder) -> RerankTemplate:
    """Return the template of calls that name none. A warning tells where only the generic template is left.

    Args:
        option: the engine's `rerank_template`: the name or the text of a template; None takes the checkpoint's.
        traits: traits of the checkpoint, which may call for a template.
        model: name of the model for the warning.
        encode: encoder with the model's tokenizer.

    Raises:
        RequestError: `option` is no template, or the tokenizer lacks the template's control tokens.
    """
    if option is not None:
        return pick_template(_named(option), encode)
    if traits.template is not None:
        template = _of_traits(traits)
        if not (missing := _missing(template, encode)):
            logger.info("rerank template %r, for the model %r", template.name, model)
            return template
        reason = f"its tokenizer lacks the tokens {missing} of template {template.name!r}"
    else:
        reason = "neither its files nor its name tell of a reranker"
    logger.warning(
        "reranking with the template 'generic': the model %r is not known as a reranker (%s). A renamed Qwen3-Reranker scores "
        "0.2 to 0.4 off with this template. Set the template that the model was trained on: "
        "rerank(template=...) or LLM(rerank_template=...) in Python, --rerank-template of `chunkattn serve`, or the field "
        "`template` of a request; names are %s",
        model,
        reason,
        ", ".join(TEMPLATES),
    )
    return GENERIC


def _of_traits(traits: RerankerTraits) -> RerankTemplate:
    """Return the template that a checkpoint calls for, with its own labels and instruction."""
    template = _named(traits.template or "", traits.instruction)
    changes: dict[str, Any] = {"add_special_tokens": False} if traits.is_whole else {}
    if traits.labels:
        changes["labels"] = traits.labels
    return replace(template, **changes) if changes else template


def _named(value: str, instruction: str | None = None) -> RerankTemplate:
    """Return a template by its name, or of a text with `{query}` and `{document}`.

    Args:
        value: name or text.
        instruction: default of `{instruction}` in a text; None for none.

    Raises:
        RequestError: `value` is neither.
    """
    if value in TEMPLATES:
        return TEMPLATES[value]
    for template in TEMPLATES.values():
        text = template.text.replace(_APART, "")  # texts of files do not say what is tokenized apart
        if value in (template.text, text) and "{instruction}" in text:
            return template if instruction is None else replace(template, instruction=instruction)
        if value in (whole.replace("{instruction}", template.instruction or "") for whole in (template.text, text)):
            return template
    if not _SLOT.search(value):
        known = ", ".join(TEMPLATES)
        raise RequestError(
            f"rerank_template must be one of {known}, or a text with {{query}} and {{document}}, got {value!r}",
            param="rerank_template",
        )
    return RerankTemplate("own", value, instruction=(instruction or "") if "{instruction}" in value else None)


def _missing(template: RerankTemplate, encode: PartEncoder) -> list[str]:
    return [token for token in template.control_tokens if token not in encode.added.ids]
