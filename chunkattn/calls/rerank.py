"""Reranking: documents are items after an instruction and a query; the probability of "yes" is their relevance.

Instruction and query come first, so all documents share them. The template's text and the users' texts are tokenized
separately, so that only the template produces control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from operator import or_
from typing import Any

from chunkattn.calls.algorithms import DOCUMENTS
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.rerank_template import RerankTemplate, pick_template
from chunkattn.calls.score import ScoreJob, plan_job
from chunkattn.calls.score_inputs import tokenize_query
from chunkattn.engine.limits import EngineLimits
from chunkattn.errors import CapacityError, RequestError
from chunkattn.outputs import RerankOutput, RerankResult, ScoreOutput
from chunkattn.parsers.document_encoder import document_of
from chunkattn.parsers.encode import PartEncoder, PlainEncoder
from chunkattn.parsers.special_tokens import ControlTokens

_OPPOSITES = {
    "yes": {"no"},
    "true": {"false"},
    "1": {"0"},
    "positive": {"negative"},
    "relevant": {"irrelevant", "not_relevant", "not relevant", "not-relevant", "non-relevant"},
}
"""Names of the relevant class of a classifier, with the names that the other class may have."""


def relevance_class(names: Sequence[str]) -> int:
    """Return the class of a sequence classifier whose score is the relevance of a document.

    Args:
        names: names of the classes, from `id2label` of the configuration.

    Raises:
        RequestError: there are more than two classes, or the names of two classes do not tell which means relevant.
    """
    if len(names) == 1:
        return 0
    if len(names) == 2:
        lower = [name.strip().lower() for name in names]
        for place, name in enumerate(lower):
            if lower[1 - place] in _OPPOSITES.get(name, ()):
                return place
        raise RequestError(
            f"the classes of this checkpoint are {names[0]!r} and {names[1]!r}, which does not tell which one means relevant; "
            'name them in config.json, such as "id2label": {"0": "no", "1": "yes"}, or use score, which returns both',
            param="documents",
        )
    raise RequestError(
        f"only a classifier of one class, or of two named yes and no, can rerank, this has {len(names)}; score it",
        param="documents",
    )


@dataclass(frozen=True)
class RerankPlan:
    """Sequences to score for a reranking, and the data to build its result.

    Attributes:
        template: name of the template.
        documents: texts of the documents, or their token ids.
        prefix: token ids that all documents share: instruction and query in their template.
        items: token ids of every document with the template's end.
        labels: token ids of the positive and, if the template has one, the negative answer; empty for a sequence classifier.
        tail: number of tokens of the template's end.
        cuts: whether the caller asked for documents to be cut.
        truncated: whether each document was cut.
        top_n: number of best documents to return; None returns all.
    """

    template: str
    documents: list[str | list[int]]
    prefix: list[int]
    items: list[list[int]]
    labels: tuple[int, ...]
    tail: int
    cuts: bool
    truncated: list[bool]
    top_n: int | None

    def fit(self, limits: EngineLimits) -> RerankPlan:
        """Return a plan whose documents fit after the query. They are cut if the caller asked for a cut.

        Args:
            limits: the engine's limits.

        Raises:
            CapacityError: a document does not fit and may not be cut, or no document could fit.
        """
        limit, most = limits.room_behind(len(self.prefix))
        room = most - self.tail
        if room < 1 and self.items:
            raise CapacityError(
                f"query, instruction and template take {len(self.prefix) + self.tail} tokens, and {limit} leaves no room "
                "for a document",
                param="query",
            )
        long = [len(item) > room + self.tail for item in self.items]
        if not self.cuts and any(long):
            index = long.index(True)
            raise CapacityError(
                f" has {len(self.items[index]) - self.tail} tokens; after this query, {limit} leaves room for {room}; "
                f"pass max_tokens_per_doc={room} or less to cut documents",
                param="documents",
                part=f"document {index}",
            )
        items = [item[:room] + item[len(item) - self.tail :] if cut else item for item, cut in zip(self.items, long)]
        return replace(self, items=items, truncated=[*map(or_, self.truncated, long)])

    def ranked(self, result: ScoreOutput, column: int = 0) -> RerankOutput:
        """Return the documents sorted by score, best first; equal scores keep their order.

        Args:
            result: scores of `items`.
            column: place of the relevance in a row of scores.
        """
        relevance = [row[column] for row in result.scores]
        order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], i))[: self.top_n]
        # A single logit is the log-odds already; of two classes or labels, the odds are the ratio of their probabilities.
        raw = result.logprobs if result.logits is None else result.logits
        logits = [row[0] if len(row) == 1 else row[column] - row[1 - column] for row in raw or []]
        results = [RerankResult(i, relevance[i], self.documents[i], logits[i], self.truncated[i]) for i in order]
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
    truncate_prompt_tokens: int | None = None,
    special_tokens: bool = False,
    classifier: bool = False,
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
        truncate_prompt_tokens: maximum number of tokens of query, template and document together. The document alone is cut;
            -1 cuts it to what the engine can take.
        special_tokens: whether control tokens in the users' texts are read as such.
        classifier: whether the checkpoint scores with its own head, so the template's labels are not read.

    Raises:
        RequestError: an argument has a wrong type or value, or a label is not one token.
        CapacityError: `truncate_prompt_tokens` leaves no room for a document.
    """
    if not isinstance(query, str) or not query:
        raise RequestError(f"query must be a string that is not empty, got {query!r}", param="query")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        text = f"documents must be a list of strings or token ids, got {type(documents).__name__}"
        raise RequestError(text, param="documents")
    given = [document_of(document, f"document {index}") for index, document in enumerate(documents)]
    if instruction is not None and not isinstance(instruction, str):
        raise RequestError(f"instruction must be a string, got {type(instruction).__name__}", param="instruction")
    if top_n != 0 or given:  # clients send the number of documents
        _check_count("top_n", top_n)
    _check_count("max_tokens_per_doc", max_tokens_per_doc)
    if truncate_prompt_tokens != -1:
        _check_count("truncate_prompt_tokens", truncate_prompt_tokens, " or -1")
    plain = PlainEncoder(encode, ControlTokens(encode.tokenizer, {}) if special_tokens else encode.added)
    parts = template.split(query, instruction)
    gap = plain(parts.gap) if parts.gap else []
    cuts = max_tokens_per_doc is not None or truncate_prompt_tokens is not None
    ids = [
        plain(parts.gap + (encode.head(document) if cuts else document), f"document {index}", "documents")
        if isinstance(document, str)
        else [*gap, *document]
        for index, document in enumerate(given)
    ]
    try:
        leading, prefix = encode.leading_ids, [token for part in parts.shared for token in plain.fill(part)]
    except RequestError:
        for name, own in (("query", query), ("instruction", instruction or "")):
            plain(own, name, name)  # raises for the text at fault
        raise
    prefix = prefix if prefix[: len(leading)] == leading else leading + prefix
    end = [token for part in parts.tail for token in plain.fill([part])]
    most = max_tokens_per_doc
    if truncate_prompt_tokens is not None and truncate_prompt_tokens > 0:
        room = truncate_prompt_tokens - len(prefix) - len(end)
        if room < 1:
            raise CapacityError(
                f"query, instruction and template take {len(prefix) + len(end)} tokens, and truncate_prompt_tokens "
                f"{truncate_prompt_tokens} leaves no room for a document",
                param="truncate_prompt_tokens",
            )
        most = room if most is None else min(most, room)
    return RerankPlan(
        template=template.name,
        documents=given,
        prefix=prefix,
        items=[own[:most] + end for own in ids],
        labels=() if classifier else _label_ids(plain, template, parts.tail[-1]),
        tail=len(end),
        cuts=cuts,
        truncated=[most is not None and len(own) > most for own in ids],
        top_n=top_n,
    )


def _label_ids(plain: PlainEncoder, template: RerankTemplate, tail: str) -> tuple[int, ...]:
    """Return the token id of each label. A label must be one token where it follows the last part of the template."""
    found, end = [], plain.fill([tail])
    for label in template.labels:
        ids = plain.fill([tail + label])
        if len(ids) != len(end) + 1 or ids[:-1] != end:
            raise RequestError(
                f"label {label!r} of template {template.name!r} is not one token after its end; take another label",
                param="template",
            )
        found.append(ids[-1])
    if len({*found}) < len(found):
        raise RequestError(f"the labels of template {template.name!r} are the same token", param="template")
    return tuple(found)


def _check_count(name: str, value: Any, other: str = "") -> None:
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
        raise RequestError(f"{name} must be an integer of at least 1{other}, got {value!r}", param=name)


def rerank_job(
    frontend: Frontend,
    query: str,
    documents: Sequence[str | Sequence[int]],
    top_n: int | None = None,
    *,
    instruction: str | None = None,
    template: RerankTemplate | str | None = None,
    max_tokens_per_doc: int | None = None,
    truncate_prompt_tokens: int | None = None,
    algorithm: str | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
) -> ScoreJob[RerankOutput]:
    """Check the arguments of `LLM.rerank`, choose the algorithm and return the job, which scores documents as items.

    Args:
        frontend: frontend of the engine.
        query: see `LLM.rerank`.
        documents: see `LLM.rerank`.
        top_n: see `LLM.rerank`.
        instruction: see `LLM.rerank`.
        template: see `LLM.rerank`.
        max_tokens_per_doc: see `LLM.rerank`.
        truncate_prompt_tokens: see `LLM.rerank`.
        algorithm: see `LLM.score`.
        cache_salt: see `LLM.generate`.
        priority: rank in the queue; lower goes first.

    Raises:
        RequestError: an argument is malformed, a document is too long, or the checkpoint is a classifier whose classes do not
            tell which one means relevant.
        CapacityError: the call would compute more than `max_tokens_per_call`.
    """
    classes = frontend.reranker.class_names
    column = relevance_class(classes) if classes else 0
    if isinstance(documents, Sequence):
        frontend.limits.check_count(len(documents), "documents")
    config, encode = frontend.config, frontend.parser.encode
    plan = plan_rerank(
        encode,
        frontend.rerank_template if template is None else pick_template(template, encode),
        query,
        documents,
        top_n=top_n,
        instruction=instruction,
        max_tokens_per_doc=max_tokens_per_doc,
        truncate_prompt_tokens=truncate_prompt_tokens,
        special_tokens=config.special_tokens_in_documents,
        classifier=bool(classes),
    ).fit(frontend.limits)

    def ranked(outputs: list[ScoreOutput]) -> RerankOutput:
        return plan.ranked(outputs[0], column)

    scored = tokenize_query(frontend, plan.prefix, plan.items, labels=plan.labels, delimited=False, nouns=DOCUMENTS)
    raw = len(plan.labels) == 1
    return plan_job(frontend, [scored], ranked, plan.labels, True, algorithm, cache_salt, priority, raw=raw)
