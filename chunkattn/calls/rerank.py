"""Reranking: documents are items after an instruction and a query; the probability of "yes" is their relevance.

Instruction and query come first, so all documents share them. With the order `document_first`, each document is a prefix of
its own that stays in the cache, and instruction and query follow it. The template's text and the users' texts are tokenized
separately, so that only the template produces control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypedDict

import numpy as np

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.items_first import ItemsFirst
from chunkattn.calls.rerank_template import RerankTemplate, pick_template
from chunkattn.calls.score import ScoreCall
from chunkattn.calls.score_job import ScoreJob
from chunkattn.engine.limits import EngineLimits
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
from chunkattn.models.activation import ACTIVATIONS
from chunkattn.outputs import RerankOutput, RerankResult, ScoreOutput
from chunkattn.parsers.arguments import document_of
from chunkattn.parsers.encode import PlainEncoder

DOCUMENTS = Names("query", "documents", "documents", "document")
"""Names of the parts of `LLM.rerank`."""
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


class RerankOptions(TypedDict, total=False):
    """Options of `LLM.rerank`, all by name.

    Attributes:
        instruction: description of what the query wants, instead of the template's own.
        template: name of a template (`chunkattn.calls.rerank_template.TEMPLATES`) or a template; None takes the engine's
            `rerank_template`, or else the one that the checkpoint calls for.
        max_tokens_per_doc: number of tokens to which a document is cut, or fewer where fewer fit; None cuts nothing.
        truncate_prompt_tokens: limit on the tokens of query, template and document together, or what fits where that is less.
            The document alone is cut. -1 cuts to what fits; None cuts nothing.
        order: `"query_first"`, in which the documents share the query; or `"document_first"`, in which each document stays in
            the cache, so that the next query over it computes the tokens behind the document alone. The orders are different
            prompts with different scores.
        algorithm: see `chunkattn.calls.score_inputs.ScoreOptions`. With `"document_first"`, None and `"auto"` take
            `"prefill_extend"` where it can run, else `"serial"`, which keeps no document.
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        priority: see `LLM.generate`; one value for the call.
    """

    instruction: str | None
    template: RerankTemplate | str | None
    max_tokens_per_doc: int | None
    truncate_prompt_tokens: int | None
    order: str
    algorithm: str | None
    cache_salt: str | None
    lora_request: LoRARequest | None
    priority: int


def rerank_call(
    frontend: Frontend,
    query: str,
    documents: Sequence[str | Sequence[int]],
    top_n: int | None = None,
    *,
    instruction: str | None = None,
    template: RerankTemplate | str | None = None,
    max_tokens_per_doc: int | None = None,
    truncate_prompt_tokens: int | None = None,
    order: str = "query_first",
    algorithm: str | None = None,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
    priority: int = 0,
    names: Names = DOCUMENTS,
) -> ScoreJob[RerankOutput]:
    """Check the arguments of `LLM.rerank`, choose the algorithm and return the job, which scores documents as items.

    See `LLM.rerank` and `RerankOptions` for the arguments; errors call query and documents by `names`.

    Raises:
        RequestError: an argument is malformed, a document is too long, or the checkpoint is a classifier whose classes do not
            tell which one means relevant.
        CapacityError: the call would compute more than `max_tokens_per_call`.
    """
    classes = frontend.reranker.class_names
    column = relevance_class(classes) if classes else 0
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        text = f"documents must be a list of strings or token ids, got {type(documents).__name__}"
        raise RequestError(text, param=names.chunks)
    frontend.limits.check_count(len(documents), "documents", names.chunks)
    picked = frontend.rerank_template if template is None else pick_template(template, frontend.parser.encode)
    if not isinstance(query, str) or not query:
        raise RequestError(f"query must be a string that is not empty, got {query!r}", param=names.prefix)
    listed = [document_of(document, names.of(index), names.chunks) for index, document in enumerate(documents)]
    if instruction is not None and not isinstance(instruction, str):
        raise RequestError(f"instruction must be a string, got {type(instruction).__name__}", param="instruction")
    if top_n != 0 or listed:  # clients send the number of documents
        _check_count("top_n", top_n)
    _check_count("max_tokens_per_doc", max_tokens_per_doc)
    if truncate_prompt_tokens != -1:
        _check_count("truncate_prompt_tokens", truncate_prompt_tokens, " or -1")
    cuts = max_tokens_per_doc is not None or truncate_prompt_tokens is not None
    parts = fill_template(frontend.plain, picked, query, listed, instruction, order=order, cuts=cuts, names=names)
    before, contents, after = parts
    labels = () if classes else label_ids(frontend.plain, picked, order)
    first = order == "document_first"
    limit, room = _room(frontend.limits, len(before), len(after), document_first=first)
    taken = len(before) + len(after)
    most = _most_tokens(limit, room, taken, contents, max_tokens_per_doc, truncate_prompt_tokens, names)
    truncated = [len(ids) > most for ids in contents]
    cut = [ids[:most] for ids in contents]
    shared, items = (after, [before + ids for ids in cut]) if first else (before, [ids + after for ids in cut])
    frontend.limits.check_ids(labels, "template")
    frontend.limits.check_items(shared, items, names)
    activation = frontend.reranker.activation if len(classes) < 2 else "Sigmoid"
    finish = partial(rank, documents=listed, truncated=truncated, template=picked.name, column=column, top_n=top_n)
    finish = finish if frontend.reranker.activation is None else partial(finish, activation=activation)
    lists = [labels] * len(items) if labels else []
    options: dict[str, Any] = {"apply_softmax": True, "priority": priority}
    options |= {"cache_salt": salt_for(lora_request, cache_salt), "raw": len(labels) == 1, "names": names}
    if first:
        algorithm = _keeping(frontend, len(after)) if algorithm in (None, "auto") else algorithm
        turned = ItemsFirst(frontend, items, shared, lists, algorithm=algorithm, **options)
        return ScoreJob(frontend, turned.calls, lambda outputs: finish(turned.merge(outputs)))
    call = ScoreCall(frontend, shared, items, lists, algorithm=algorithm, **options)
    return ScoreJob(frontend, [call], lambda outputs: finish(outputs[0]))


def _keeping(frontend: Frontend, query_len: int) -> str:
    """Return the algorithm that keeps documents in the cache, or `serial` where it cannot run.

    Args:
        frontend: frontend of the engine.
        query_len: tokens behind a document.
    """
    config = frontend.config
    keeps = config.enable_prefix_caching and query_len <= config.max_chunk_len
    return "prefill_extend" if keeps else "serial"


def fill_template(
    plain: PlainEncoder,
    template: RerankTemplate,
    query: str,
    documents: Sequence[str | list[int]],
    instruction: str | None = None,
    *,
    order: str = "query_first",
    cuts: bool = False,
    names: Names = DOCUMENTS,
) -> tuple[list[int], list[list[int]], list[int]]:
    """Return the token ids before every document, of every document, and after every document.

    Args:
        plain: tokenizer of the users' texts.
        template: see `pick_template`.
        query: the query to judge documents by.
        documents: texts or token ids, which are taken as they are.
        instruction: replaces the template's own.
        order: one of `chunkattn.calls.rerank_template.ORDERS`.
        cuts: whether documents will be cut, so that the far end of a text need not be tokenized.
        names: the caller's names of query and documents.

    Raises:
        RequestError: a text cannot be tokenized, or the template takes no instruction or not this order.
    """
    head, spaces, rest = template.split(query, instruction, order)
    gap = plain(spaces) if spaces else []
    contents = [
        plain(spaces + (plain.encode.head(document) if cuts else document), names.of(index), names.chunks)
        if isinstance(document, str)
        else [*gap, *document]
        for index, document in enumerate(documents)
    ]
    try:
        before, after = ([token for part in side for token in plain.fill(part)] for side in (head, rest))
    except RequestError:
        for name, text in ((names.prefix, query), ("instruction", instruction or "")):
            plain(text, name, name)  # raises for the text at fault
        raise
    leading = plain.encode.leading_ids if template.add_special_tokens else []
    return before if before[: len(leading)] == leading else leading + before, contents, after


def label_ids(plain: PlainEncoder, template: RerankTemplate, order: str = "query_first") -> tuple[int, ...]:
    """Return the token id of each label of a template.

    Args:
        plain: tokenizer of the model.
        template: the template.
        order: one of `chunkattn.calls.rerank_template.ORDERS`.

    Raises:
        RequestError: a label is not one token where it follows the last part of the template, or two labels are the same token.
    """
    tail = template.tail(order)
    label_tokens, end = [], plain.fill([tail])
    for label in template.labels:
        if isinstance(label, int):
            label_tokens.append(label)
            continue
        ids = plain.fill([tail + label])
        if len(ids) != len(end) + 1 or ids[:-1] != end:
            raise RequestError(
                f"label {label!r} of template {template.name!r} is not one token after its end; take another label",
                param="template",
            )
        label_tokens.append(ids[-1])
    if len({*label_tokens}) < len(label_tokens):
        raise RequestError(f"the labels of template {template.name!r} are the same token", param="template")
    return tuple(label_tokens)


def _room(limits: EngineLimits, before: int, after: int, *, document_first: bool) -> tuple[str, int]:
    """Return the tightest limit on a document, and the tokens that it allows; below 0 without room.

    Args:
        limits: limits of the engine.
        before: tokens before a document.
        after: tokens after a document.
        document_first: whether the document begins the prompt. The query may then begin on a page of its own.
    """
    limit, room = limits.room_behind(after, chunks=True) if document_first else limits.room_behind(before)
    return limit, room - (before if document_first else after)


def _most_tokens(
    limit: str,
    room: int,
    around: int,
    contents: list[list[int]],
    each: int | None,
    together: int | None,
    names: Names,
) -> int:
    """Return the number of tokens to which documents are cut.

    Args:
        limit: name of the tightest limit on a document.
        room: tokens that the limit allows.
        around: tokens before and after a document.
        contents: token ids of every document.
        each: `max_tokens_per_doc`.
        together: `truncate_prompt_tokens`.
        names: the caller's names of query and documents.

    Raises:
        CapacityError: a document does not fit and may not be cut, or no document could fit.
    """
    most = each
    taken = f"query, instruction and template take {around} tokens, and"
    if together is not None and together > 0:
        if (left := together - around) < 1:
            text = f"{taken} truncate_prompt_tokens {together} leaves no room for a document"
            raise CapacityError(text, param="truncate_prompt_tokens")
        most = left if most is None else min(most, left)
    if room < 1 and contents:
        raise CapacityError(f"{taken} {limit} leaves no room for a document", param=names.prefix)
    for index, ids in enumerate(contents):
        if each is None and together is None and len(ids) > room:
            text = f" has {len(ids)} tokens; beside this query, {limit} leaves room for {room}"
            if names == DOCUMENTS:  # other calls have no such argument
                text += f"; pass max_tokens_per_doc={room} or less to cut documents"
            raise CapacityError(text, param=names.chunks, part=names.of(index))
    return room if most is None else min(most, room)


def _check_count(name: str, value: Any, other: str = "") -> None:
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
        raise RequestError(f"{name} must be an integer of at least 1{other}, got {value!r}", param=name)


def rank(
    output: ScoreOutput,
    *,
    documents: Sequence[str | list[int]],
    truncated: Sequence[bool],
    template: str,
    column: int = 0,
    top_n: int | None = None,
    activation: str | None = None,
) -> RerankOutput:
    """Return the documents sorted by score, best first. Equal scores, as of a saturated activation, are sorted by logit.

    Documents of equal logits keep their order.

    Args:
        output: scores of the documents.
        documents: texts of the documents, or their token ids.
        truncated: whether each document was cut.
        template: name of the template.
        column: place of the relevance in a row of scores.
        top_n: number of best documents to return; None returns all.
        activation: name in `ACTIVATIONS` of the function that makes a relevance of log-odds; None takes the scores.
    """
    # A single logit is the log-odds already; of two classes or labels, the odds are the ratio of their probabilities.
    raw = output.logprobs if output.logits is None else output.logits
    logits = [row[0] if len(row) == 1 else row[column] - row[1 - column] for row in raw or []]
    relevance = [row[column] for row in output.scores]
    if activation is not None:
        relevance = ACTIVATIONS[activation](np.asarray(logits, np.float64)[:, None])[:, 0].tolist() if logits else []
    order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], -logits[i], i))[:top_n]
    results = [RerankResult(i, relevance[i], documents[i], logits[i], truncated[i]) for i in order]
    return RerankOutput(results, template, output.algorithm, output.usage)
