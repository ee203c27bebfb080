"""Request bodies of the scoring and reranking routes, in the dialects of this project and of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from chunkattn.errors import RequestError
from chunkattn.layout import Names
from chunkattn.schema.base import (
    Body,
    CacheSalt,
    Entry,
    FastList,
    LabelIdLists,
    LabelIds,
    LabelTextLists,
    LabelTexts,
    Texts,
    TokenIds,
    TokenLists,
)
from chunkattn.schema.generation import DocumentOrId, check_documents, named_documents, with_stored
from chunkattn.schema.parts import fields_text, stored_id, titled
from chunkattn.web.errors import ApiError

OneOrMany = str | Texts
PairDocuments = Annotated[FastList[str | DocumentOrId], AfterValidator(check_documents)]
ManyTexts = FastList[Texts]
ManyTokenLists = FastList[TokenLists]
ManyLabelTexts = FastList[LabelTextLists]
ManyLabelIds = FastList[LabelIdLists]


_PAIRWISE = ("instruction", "template", "max_tokens_per_doc", "truncate_prompt_tokens", "order")
"""Fields of `ScoreBody` that only pairwise calls take."""
_LABELLED = ("query", "packed_ids", "labels", "label_token_ids")
"""Fields of `ScoreBody` that pairwise calls do not take."""


class ScoringBody(Body):
    """Fields of every scoring call."""

    algorithm: str | None = None
    cache_salt: CacheSalt = None
    priority: int = 0


class RelevanceBody(ScoringBody):
    """Fields of calls that judge the relevance of documents to queries."""

    instruction: str | None = None
    template: str | None = None
    max_tokens_per_doc: int | None = None
    """Cut each document to this many tokens, or fewer where fewer fit; by default nothing is cut."""
    truncate_prompt_tokens: int | None = None
    """Cut each document so that query, template and document have this many tokens; -1 for what fits."""
    order: Literal["query_first", "document_first"] | None = None
    """`document_first` puts each document before the query and caches it; default `query_first`."""

    def relevance(self) -> dict[str, Any]:
        """Return the arguments of `LLM.rerank` that say how documents are judged."""
        cut = self.argument("truncate_prompt_tokens")
        return {
            "instruction": self.argument("instruction"),
            "template": self.template,
            "order": self.order or "query_first",
            "max_tokens_per_doc": self.argument("max_tokens_per_doc"),
            "truncate_prompt_tokens": -1 if cut is True else cut,
        }


class GenerativeScoringBody(ScoringBody):
    """Request body of vLLM's `/generative_scoring`: one query and many items, scored by the first label."""

    query: str | TokenIds
    items: Texts | TokenLists | str
    label_token_ids: LabelIds
    apply_softmax: bool = True
    item_first: bool = False


class ScoreBody(RelevanceBody):
    """Request body of `/v1/score`: `query` and `items` for label scores, or two lists of texts for pairwise relevance."""

    fields_of: ClassVar = {"items": ("items", "packed_ids"), "labels": ("labels", "label_token_ids")}

    query: str | TokenIds | Texts | TokenLists | None = None
    """Text or token ids, or a list of either."""
    items: Texts | TokenLists | ManyTexts | ManyTokenLists | str | None = None
    """Texts or token ids, or one text. A list of queries may come with a list of items per query."""
    labels: LabelTexts | LabelTextLists | ManyLabelTexts | None = None
    """One token each; or label_token_ids. One list for all items, or one per item; for several queries also a list of these."""
    label_token_ids: LabelIds | LabelIdLists | ManyLabelIds | None = None
    """Token ids of the labels, in the same forms; or labels."""
    apply_softmax: bool = False
    item_first: bool = False
    return_logprobs: bool = False
    """Return the labels' log-probabilities with the scores."""
    packed_ids: TokenIds | None = None
    """Query and items joined by delimiters; instead of both."""
    text_1: OneOrMany | None = None
    text_2: OneOrMany | None = None
    queries: OneOrMany | None = None
    documents: str | PairDocuments | None = None
    """Pairs: texts, or `{"id"}` of stored documents; another name of `text_2`."""

    @model_validator(mode="after")
    def _check(self) -> ScoreBody:
        firsts = [n for n in ("text_1", "queries") if getattr(self, n) is not None]
        seconds = [n for n in ("text_2", "documents") if getattr(self, n) is not None]
        if not (firsts or seconds):
            if foreign := [name for name in _PAIRWISE if getattr(self, name) is not None]:
                raise ValueError(f"{foreign[0]} belongs to pairwise calls (queries and documents)")
            return self
        if foreign := [name for name in _LABELLED if getattr(self, name) is not None]:
            raise ValueError(
                f"{foreign[0]} belongs to calls with labels; a pairwise call (text_1 or queries) has no place for it"
            )
        seconds += ["items"] if self.items is not None else []
        if len(firsts) != 1 or len(seconds) != 1:
            text = "a pairwise call needs one of text_1 and queries, and one of text_2, documents and items"
            raise ValueError(f"{(firsts + seconds)[-1]}: {text}")
        return self

    @property
    def pairwise(self) -> bool:
        """Return whether the call asks for the relevance of texts to each other."""
        return self.text_1 is not None or self.queries is not None

    @property
    def pair_names(self) -> Names:
        """Return the request's own names of `query` and `documents` in a pairwise call."""
        first = "text_1" if self.text_1 is not None else "queries"
        second = next(name for name in ("text_2", "documents", "items") if getattr(self, name) is not None)
        return Names(first, second, second, "document")

    def named(self) -> dict[int, str]:
        """Return the ids of the documents named by id, by their place."""
        return named_documents(self.documents if isinstance(self.documents, list) else None)

    def pairs(self, stored: Mapping[int, Any]) -> tuple[list[str], list[Any]]:
        """Return the queries and the documents of a pairwise call.

        Args:
            stored: texts or token ids of the documents named by id, by their place.

        Raises:
            RequestError: an item is not a text, or the number of queries is neither one nor the number of documents.
        """
        names = self.pair_names
        first = self.text_1 if self.text_1 is not None else self.queries
        second: Any = next(v for v in (self.text_2, self.documents, self.items) if v is not None)
        queries, documents = ([v] if isinstance(v, str) else list(v or []) for v in (first, second))
        if self.documents is None and (others := [n for n, d in enumerate(documents) if not isinstance(d, str)]):
            raise RequestError(f"items.{others[0]} must be a text in a pairwise call", param="items")
        documents = with_stored(documents, stored)
        if len(queries) not in (1, len(documents)):
            text = f"{len(queries)} queries for {len(documents)} documents; give one, or one each"
            raise RequestError(text, param=names.prefix)
        return queries, documents


class RerankDocument(BaseModel):
    """Document as an object: a text, perhaps with a title for the line before it, or the id of a stored document alone.

    Other fields are returned as given.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, JsonValue]

    title: str | None = None
    text: str | None = None

    def check(self, number: int, names: Sequence[str] | None) -> None:
        """Check that there is something to rank.

        Args:
            number: place of the document in the request.
            names: `rank_fields` of the request.

        Raises:
            ValueError: the document has neither a text, nor one of the fields to rank by, nor an id alone.
        """
        values = self.model_dump()
        if names is not None and not self.stored_id and all(values.get(name) is None for name in names):
            raise ValueError(f"documents.{number} has none of rank_fields {list(names)}")
        if names is None and self.text is None and self.stored_id is None:
            raise ValueError(f"documents.{number} needs a text, or the id of a stored document and nothing else")

    def plain(self, names: Sequence[str] | None) -> str:
        """Return the text to rank.

        Args:
            names: fields to rank by, see `fields_text`. None reads the text, below its title.
        """
        return titled(self.title, self.text or "") if names is None else fields_text(self.model_dump(), names)

    @property
    def stored_id(self) -> str | None:
        """Return the id of the stored document; None for a document with a text."""
        return stored_id(self.model_dump())


class QueryText(Entry):
    """Query as an object, in Jina's form."""

    text: str


class RerankBody(RelevanceBody):
    """Request body of `/v1/rerank`: `documents` in the form of Cohere, Jina and SiliconFlow, or `texts` in TEI's form."""

    fields_of: ClassVar = {
        "documents": ("documents", "texts"),
        "top_n": ("top_n", "top_k"),
        "instruction": ("instruction", "instruct"),
        "max_tokens_per_doc": ("max_tokens_per_doc", "max_doc_length"),
        "truncate_prompt_tokens": ("truncate_prompt_tokens", "truncation", "truncate"),
    }

    query: str | QueryText
    """Text, or `{"text"}`."""
    documents: FastList[str | RerankDocument] | None = None
    """Texts, objects with a text, or `{"id"}` of stored documents."""
    texts: Texts | None = None
    """Documents in TEI's form; instead of documents."""
    top_n: int | None = None
    """Number of documents to return, the best first; by default all."""
    top_k: int | None = None
    """Another name of `top_n`."""
    return_documents: bool = False
    """Return the documents with their scores."""
    return_text: bool = False
    """Return the texts with their scores; needs texts."""
    raw_scores: bool = False
    """Return log-odds, whose sigmoid is the relevance."""
    rank_fields: Annotated[list[str] | None, Field(min_length=1, max_length=64)] = None
    """Fields of document objects to rank by, in this order."""
    max_doc_length: Annotated[int | None, Field(ge=1)] = None
    """Another name of `max_tokens_per_doc`."""
    max_query_length: Annotated[int | None, Field(ge=1)] = None
    """Limit on the tokens of the query. A longer query is an error; it is not cut."""
    truncation: bool = False
    """Cut each document to what fits; by default nothing is cut."""
    truncate: bool = False
    """Another name of `truncation`."""
    truncation_direction: Literal["right", "Right", "left", "Left"] = "right"
    """Documents are cut at the right, their end."""
    instruct: str | None = None
    """Another name of `instruction`."""
    max_chunks_per_doc: Annotated[int | None, Field(ge=1)] = None
    """Has no effect: a document is ranked whole."""
    overlap_tokens: Annotated[int | None, Field(ge=0)] = None
    """Has no effect, as `max_chunks_per_doc`."""
    chunk_overlap_tokens: Annotated[int | None, Field(ge=0)] = None
    """Another name of `overlap_tokens`."""
    return_len: bool = False
    """Has no effect: the answer always counts the tokens."""
    request_id: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """Id of the answer; by default a new one."""

    @model_validator(mode="after")
    def _check(self) -> RerankBody:
        if self.documents is None and self.texts is None:
            raise ApiError(400, "documents is missing", param="documents", code="missing_required_parameter")
        if self.documents is not None and self.texts is not None:
            raise ValueError("texts and documents exclude each other")
        if self.return_text and self.texts is None:
            raise ValueError("return_text needs texts; with documents it is return_documents")
        if self.return_documents and self.texts is not None:
            raise ValueError("return_documents needs documents; with texts it is return_text")
        for name, other in (("instruct", "instruction"), ("max_doc_length", "max_tokens_per_doc"), ("top_k", "top_n")):
            self.check_same(name, other)
        cuts = self.argument("max_tokens_per_doc"), self.argument("truncate_prompt_tokens")
        if self.truncation_direction.lower() == "left" and cuts != (None, None):
            raise ValueError("truncation_direction must be right: documents are cut at their end")
        for number, document in enumerate(self.documents or ()):
            if isinstance(document, RerankDocument):
                document.check(number, self.rank_fields)
            elif self.rank_fields is not None and "text" not in self.rank_fields:
                raise ValueError(f"documents.{number} is a text and has none of rank_fields {self.rank_fields}")
        return self

    def check_returned(self) -> None:
        """Check that the documents can be returned.

        Raises:
            ApiError: 400, a document holds a lone surrogate.
        """
        name = "documents" if self.documents is not None else "texts"
        for number, document in enumerate(self.entries):
            try:
                msgspec.json.encode(document if isinstance(document, str) else document.model_dump(exclude_unset=True))
            except ValueError:
                text = f"{name}.{number} holds text that JSON cannot carry back"
                raise ApiError(400, text, param=name, code="invalid_value") from None

    @property
    def query_text(self) -> str:
        """Return the text of the query."""
        return self.query if isinstance(self.query, str) else self.query.text

    @property
    def entries(self) -> Sequence[str | RerankDocument]:
        """Return the documents as the request has them."""
        return self.documents if self.documents is not None else self.texts or []

    def named(self) -> dict[int, str]:
        """Return the ids of the documents named by id, by their place."""
        if self.rank_fields is not None and "id" in self.rank_fields:
            return {}
        ids = ((n, d.stored_id) for n, d in enumerate(self.entries) if isinstance(d, RerankDocument))
        return {number: name for number, name in ids if name is not None}

    def contents(self, stored: Mapping[int, Any]) -> list[Any]:
        """Return the text or the token ids of each document.

        Args:
            stored: texts or token ids of the documents named by id, by their place.
        """
        entries, names = self.entries, self.rank_fields
        return [stored[n] if n in stored else d if isinstance(d, str) else d.plain(names) for n, d in enumerate(entries)]
