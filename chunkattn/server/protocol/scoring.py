"""Request bodies of the scoring and reranking routes, in the dialects of this project, vLLM, Cohere and Jina."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from chunkattn.server.errors import ApiError
from chunkattn.server.protocol.base import Body, CacheSalt, LabelIds, LabelTexts, Texts, TokenIds, TokenLists
from chunkattn.server.protocol.generation import DocumentOrId, check_documents, named_documents, titled, with_stored

OneOrMany = str | Texts
MaxTokensPerDoc = Annotated[
    int | None, Field(description="Cut each document to this many tokens, or fewer where fewer fit; by default nothing is cut.")
]
TruncatePromptTokens = Annotated[
    int | None,
    Field(description="Cut each document so that query, template and document have this many tokens; -1 for what fits."),
]
PairDocuments = Annotated[list[str | DocumentOrId], Field(fail_fast=True), AfterValidator(check_documents)]
ManyTexts = Annotated[list[Texts], Field(fail_fast=True)]
ManyTokenLists = Annotated[list[TokenLists], Field(fail_fast=True)]


_PAIRWISE = ("instruction", "template", "max_tokens_per_doc", "truncate_prompt_tokens")
"""Fields of `ScoreBody` that only pairwise calls take."""


class GenerativeScoringBody(Body):
    """Request body of vLLM's `/generative_scoring`: one query and many items, scored by the first label."""

    query: str | TokenIds
    items: Texts | TokenLists | str
    label_token_ids: LabelIds
    apply_softmax: bool = True
    item_first: bool = False
    algorithm: str | None = None
    cache_salt: CacheSalt = None
    priority: int = 0


class ScoreBody(Body):
    """Request body of `/v1/score`: `query` and `items` for label scores, or two lists of texts for pairwise relevance."""

    query: Annotated[
        str | TokenIds | Texts | TokenLists | None, Field(description="Text or token ids, or a list of either.")
    ] = None
    items: Annotated[
        Texts | TokenLists | ManyTexts | ManyTokenLists | str | None,
        Field(description="Texts or token ids, or one text. A list of queries may come with a list of items per query."),
    ] = None
    labels: Annotated[LabelTexts | None, Field(description="Labels as texts of one token each; or label_token_ids.")] = None
    label_token_ids: LabelIds | None = None
    apply_softmax: bool = False
    item_first: bool = False
    return_logprobs: Annotated[bool, Field(description="Return the labels' log-probabilities with the scores.")] = False
    packed_ids: Annotated[TokenIds | None, Field(description="Query and items joined by delimiters; instead of both.")] = None
    algorithm: str | None = None
    text_1: OneOrMany | None = None
    text_2: OneOrMany | None = None
    queries: OneOrMany | None = None
    documents: Annotated[
        str | PairDocuments | None,
        Field(description='Pairs: texts, or `{"id"}` of stored documents; another name of `text_2`.'),
    ] = None
    instruction: str | None = None
    template: str | None = None
    max_tokens_per_doc: MaxTokensPerDoc = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    cache_salt: CacheSalt = None
    priority: int = 0

    @model_validator(mode="after")
    def _check(self) -> ScoreBody:
        firsts = [n for n in ("text_1", "queries") if getattr(self, n) is not None]
        seconds = [n for n in ("text_2", "documents") if getattr(self, n) is not None]
        if not (firsts or seconds):
            if any(getattr(self, name) is not None for name in _PAIRWISE):
                raise ValueError(f"{', '.join(_PAIRWISE)} belong to pairwise calls (queries and documents)")
            return self
        if self.query is not None or self.packed_ids is not None or self.labels is not None or self.label_token_ids is not None:
            raise ValueError("a pairwise call (text_1 or queries) takes no query, packed_ids or labels")
        seconds += ["items"] if self.items is not None else []
        if len(firsts) != 1 or len(seconds) != 1:
            raise ValueError("a pairwise call needs one of text_1 and queries, and one of text_2, documents and items")
        return self

    @property
    def pairwise(self) -> bool:
        """Return whether the call asks for the relevance of texts to each other."""
        return self.text_1 is not None or self.queries is not None

    def named(self) -> dict[int, str]:
        """Return the ids of the documents named by id, by their place."""
        return named_documents(self.documents if isinstance(self.documents, list) else None)

    def pairs(self, stored: Mapping[int, Any]) -> tuple[list[str], list[Any]]:
        """Return the queries and the documents of a pairwise call.

        Args:
            stored: texts or token ids of the documents named by id, by their place.

        Raises:
            ValueError: an item is not a text, or the number of queries is neither one nor the number of documents.
        """
        first = self.text_1 if self.text_1 is not None else self.queries
        second: Any = next(v for v in (self.text_2, self.documents, self.items) if v is not None)
        queries, documents = ([v] if isinstance(v, str) else list(v or []) for v in (first, second))
        if self.documents is None and not all(isinstance(d, str) for d in documents):
            raise ValueError("the items of a pairwise call must be texts")
        documents = with_stored(documents, stored)
        if len(queries) not in (1, len(documents)):
            raise ValueError(f"{len(queries)} queries for {len(documents)} documents; give one, or one each")
        return queries, documents


class RerankDocument(BaseModel):
    """Document as an object: a text, perhaps with a title for the line before it, or the id of a stored document alone.

    Other fields are returned as given.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, JsonValue]

    title: str | None = None
    text: str | None = None

    def plain(self) -> str:
        """Return the text of the document."""
        return titled(self.title, self.text or "")

    @property
    def stored_id(self) -> str | None:
        """Return the id of the stored document; None for a document with a text."""
        name = self.__pydantic_extra__.get("id")
        is_alone = self.text is None and self.title is None and len(self.__pydantic_extra__) == 1
        return name if is_alone and isinstance(name, str) else None


def _check_documents(documents: list[str | RerankDocument]) -> list[str | RerankDocument]:
    for number, document in enumerate(documents):
        if isinstance(document, RerankDocument) and document.text is None and document.stored_id is None:
            raise ValueError(f"entry {number} needs a text, or the id of a stored document and nothing else")
    return documents


class RerankBody(Body):
    """Request body of `/v1/rerank`, in the format of Cohere and Jina."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True), AfterValidator(_check_documents)]
    top_n: int | None = None
    return_documents: bool = False
    max_tokens_per_doc: MaxTokensPerDoc = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    instruction: str | None = None
    template: str | None = None
    algorithm: str | None = None
    cache_salt: CacheSalt = None
    priority: int = 0

    def check_returned(self) -> None:
        """Check that the documents can be returned.

        Raises:
            ApiError: 400, a document holds a lone surrogate.
        """
        for number, document in enumerate(self.documents):
            try:
                msgspec.json.encode(document if isinstance(document, str) else document.model_dump(exclude_unset=True))
            except ValueError:
                text = f"documents.{number} holds text that JSON cannot carry back"
                raise ApiError(400, text, param="documents", code="invalid_value") from None

    def named(self) -> dict[int, str]:
        """Return the ids of the documents named by id, by their place."""
        given = ((n, d.stored_id) for n, d in enumerate(self.documents) if isinstance(d, RerankDocument))
        return {number: name for number, name in given if name is not None}

    def texts(self, stored: Mapping[int, Any]) -> list[Any]:
        """Return the text or the token ids of each document.

        Args:
            stored: texts or token ids of the documents named by id, by their place.
        """
        return [stored[n] if n in stored else d if isinstance(d, str) else d.plain() for n, d in enumerate(self.documents)]
