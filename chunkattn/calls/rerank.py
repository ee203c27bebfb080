"""Reranking: documents are items after an instruction and a query; the probability of "yes" is their relevance.

Instruction and query come first, so all documents share them. The template's text and the users' texts are tokenized
separately, so that only the template produces control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypedDict

from chunkattn.calls.algorithms import too_costly
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.rerank_template import RerankTemplate, pick_template
from chunkattn.calls.score import ScoreCall
from chunkattn.engine.limits import EngineLimits
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
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
        algorithm: see `chunkattn.calls.score_inputs.ScoreOptions`.
        cache_salt: see `LLM.generate`.
        priority: see `LLM.generate`; one value for the call.
    """

    instruction: str | None
    template: RerankTemplate | str | None
    max_tokens_per_doc: int | None
    truncate_prompt_tokens: int | None
    algorithm: str | None
    cache_salt: str | None
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
    algorithm: str | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
    names: Names = DOCUMENTS,
) -> ScoreCall[RerankOutput]:
    """Check the arguments of `LLM.rerank`, choose the algorithm and return the call, which scores documents as items.

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
    given = [document_of(document, names.of(index), names.chunks) for index, document in enumerate(documents)]
    if instruction is not None and not isinstance(instruction, str):
        raise RequestError(f"instruction must be a string, got {type(instruction).__name__}", param="instruction")
    if top_n != 0 or given:  # clients send the number of documents
        _check_count("top_n", top_n)
    _check_count("max_tokens_per_doc", max_tokens_per_doc)
    if truncate_prompt_tokens != -1:
        _check_count("truncate_prompt_tokens", truncate_prompt_tokens, " or -1")
    cuts = max_tokens_per_doc is not None or truncate_prompt_tokens is not None
    prefix, contents, end = fill_template(frontend.plain, picked, query, given, instruction, cuts=cuts, names=names)
    labels = () if classes else label_ids(frontend.plain, picked)
    most = _most_tokens(frontend.limits, len(prefix), len(end), contents, max_tokens_per_doc, truncate_prompt_tokens, names)
    truncated = [len(own) > most for own in contents]
    items = [own[:most] + end for own in contents]
    frontend.limits.check_ids(labels, "template")
    frontend.limits.check_items(prefix, items, names)
    call = ScoreCall(
        frontend,
        prefix,
        items,
        [],
        [labels] * len(items) if labels else [],
        finish=partial(rank, documents=given, truncated=truncated, template=picked.name, column=column, top_n=top_n),
        algorithm=algorithm,
        apply_softmax=True,
        cache_salt=cache_salt,
        priority=priority,
        raw=len(labels) == 1,
        names=names,
    )
    call.plan(too_costly([call], frontend.config.max_tokens_per_call))
    return call


def fill_template(
    plain: PlainEncoder,
    template: RerankTemplate,
    query: str,
    documents: Sequence[str | list[int]],
    instruction: str | None = None,
    *,
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
        cuts: whether documents will be cut, so that the far end of a text need not be tokenized.
        names: the caller's names of query and documents.

    Raises:
        RequestError: a text cannot be tokenized, or the template takes no instruction.
    """
    shared, spaces = template.split(query, instruction)
    gap = plain(spaces) if spaces else []
    contents = [
        plain(spaces + (plain.encode.head(document) if cuts else document), names.of(index), names.chunks)
        if isinstance(document, str)
        else [*gap, *document]
        for index, document in enumerate(documents)
    ]
    try:
        leading, prefix = plain.encode.leading_ids, [token for part in shared for token in plain.fill(part)]
    except RequestError:
        for name, own in ((names.prefix, query), ("instruction", instruction or "")):
            plain(own, name, name)  # raises for the text at fault
        raise
    prefix = prefix if prefix[: len(leading)] == leading else leading + prefix
    return prefix, contents, [token for part in template.tail for token in plain.fill([part])]


def label_ids(plain: PlainEncoder, template: RerankTemplate) -> tuple[int, ...]:
    """Return the token id of each label of a template.

    Args:
        plain: tokenizer of the model.
        template: the template.

    Raises:
        RequestError: a label is not one token where it follows the last part of the template, or two labels are the same token.
    """
    tail = template.tail[-1]
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


def _most_tokens(
    limits: EngineLimits,
    before: int,
    after: int,
    contents: list[list[int]],
    each: int | None,
    together: int | None,
    names: Names,
) -> int:
    """Return the number of tokens to which documents are cut.

    Args:
        limits: limits of the engine.
        before: tokens before a document.
        after: tokens after a document.
        contents: token ids of every document.
        each: `max_tokens_per_doc`.
        together: `truncate_prompt_tokens`.
        names: the caller's names of query and documents.

    Raises:
        CapacityError: a document does not fit and may not be cut, or no document could fit.
    """
    most = each
    taken = f"query, instruction and template take {before + after} tokens, and"
    if together is not None and together > 0:
        if (left := together - before - after) < 1:
            text = f"{taken} truncate_prompt_tokens {together} leaves no room for a document"
            raise CapacityError(text, param="truncate_prompt_tokens")
        most = left if most is None else min(most, left)
    limit, room = limits.room_behind(before)
    room -= after
    if room < 1 and contents:
        raise CapacityError(f"{taken} {limit} leaves no room for a document", param=names.prefix)
    for index, own in enumerate(contents):
        if each is None and together is None and len(own) > room:
            raise CapacityError(
                f" has {len(own)} tokens; after this query, {limit} leaves room for {room}; "
                f"pass max_tokens_per_doc={room} or less to cut documents",
                param=names.chunks,
                part=names.of(index),
            )
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
) -> RerankOutput:
    """Return the documents sorted by score, best first; equal scores keep their order.

    Args:
        output: scores of the documents.
        documents: texts of the documents, or their token ids.
        truncated: whether each document was cut.
        template: name of the template.
        column: place of the relevance in a row of scores.
        top_n: number of best documents to return; None returns all.
    """
    relevance = [row[column] for row in output.scores]
    order = sorted(range(len(relevance)), key=lambda i: (-relevance[i], i))[:top_n]
    # A single logit is the log-odds already; of two classes or labels, the odds are the ratio of their probabilities.
    raw = output.logprobs if output.logits is None else output.logits
    logits = [row[0] if len(row) == 1 else row[column] - row[1 - column] for row in raw or []]
    results = [RerankResult(i, relevance[i], documents[i], logits[i], truncated[i]) for i in order]
    return RerankOutput(results, template, output.algorithm, output.usage)
