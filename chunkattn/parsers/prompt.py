"""Forms of prompts: text, parts or documents as a caller gives them, and parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkattn.citations import Document
from chunkattn.focus import Focus, FocusLike
from chunkattn.layout import ChunkLayout, Names
from chunkattn.outputs import FocusOutput
from chunkattn.parsers.arguments import as_list
from chunkattn.parsers.markers import Cited

TokenIds = Sequence[int]
DocumentLike = str | TokenIds | Document
"""Document of a prompt: text, token ids, or either with an id."""

PROMPT_NAMES, DOCUMENT_NAMES = Names(), Names("prefix", "documents", "question", "document")
"""Names of the parts of a text, of token ids and of a `ChunkedPrompt`; and of a `DocumentPrompt` and `LLM.precompute`."""


@dataclass(frozen=True)
class ChunkedPrompt:
    """Prompt in parts, all text or all token ids. The parser never splits a part.

    Use this form for untrusted documents: a chunk that contains the separator cannot forge a boundary, and a chunk that
    contains the text of a special token does not become that token.
    """

    prefix: str | TokenIds
    chunks: Sequence[str | TokenIds]
    question: str | TokenIds


@dataclass(frozen=True)
class DocumentPrompt:
    """Prompt of a prefix, documents and a question. A document's text becomes a chunk in the engine's `document_template`.

    A chat with the same documents after the same prefix, and `LLM.precompute`, make the same chunks. Use `ChunkedPrompt` for
    chunks without the template.

    Attributes:
        prefix: text or token ids.
        documents: texts, token ids, or a `Document` with an id for citations. Token ids are taken without the template.
        question: text or token ids, as the prefix is.
        focus: number of documents to choose by the question, or a `Focus`; None shows all documents alike.
    """

    prefix: str | TokenIds
    documents: Sequence[DocumentLike]
    question: str | TokenIds
    focus: FocusLike | None = None


Prompt = str | Mapping[str, Any] | ChunkedPrompt | DocumentPrompt
"""Text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, parts, or documents. A dict may also hold a `"cache_salt"`."""
Prefix = str | TokenIds | Sequence[Mapping[str, Any]]
"""Text or token ids before documents, or the messages before a conversation's first user message."""
Documents = Sequence[str] | Sequence[TokenIds] | Sequence[Document]
"""Documents of `LLM.precompute`, `lookup` and `forget`, of the same kind as the prefix."""


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts.

    Args:
        prompts: prompt or list of prompts.

    Raises:
        RequestError: as `as_list`.
    """
    if isinstance(prompts, (str, ChunkedPrompt, DocumentPrompt, Mapping)):
        return [prompts]
    return as_list(prompts, "prompts")


@dataclass(frozen=True)
class ParsedPrompt:
    """Parsed prompt.

    Attributes:
        layout: token ids, positions and parts.
        texts: text of prefix, every chunk and question, or of a plain prompt; None for a prompt that holds token ids.
        cache_salt: salt of the cache; prompts of one salt share cached K/V.
        names: the caller's names of the parts, for errors.
        query: text of the question without the chat template; None for token ids and for plain prompts.
        history_len: tokens of the question before the last user message of a chat, which focus by likelihood does not count.
        sources: documents as the caller gave them; empty where they are the chunks themselves.
        focus: choice among the documents that is to be made.
        chosen: choice that the layout shows; None before it is made, and without focus.
        joins: whether the documents become one chunk when the choice is made.
        joined: see `RequestOutput`.
        cited: documents that the answer may cite; None without citations.
    """

    layout: ChunkLayout
    texts: tuple[str, ...] | None
    cache_salt: str | None = None
    names: Names = PROMPT_NAMES
    query: str | None = None
    history_len: int = 0
    sources: Sequence[DocumentLike] = ()
    focus: Focus | None = None
    chosen: FocusOutput | None = None
    joins: bool = False
    joined: Mapping[int, int] | None = None
    cited: Cited | None = None

    @property
    def text(self) -> str | None:
        """Return the parts joined without separators; None for a prompt that holds token ids."""
        return None if self.texts is None else "".join(self.texts)

    @property
    def shown(self) -> Sequence[int] | None:
        """Return the numbers of the documents that the prompt shows, if a focus leaves the others out; None for all."""
        if self.chosen is None or self.chosen.mode != "only" or not self.chosen.shown:
            return None
        return self.chosen.shown

    def source(self, number: int) -> str | list[int]:
        """Return a document as the caller gave it.

        Args:
            number: number of the document.
        """
        if not self.sources:
            return self.layout.part(self.layout.segments[1 + number]).tolist()
        document = self.sources[number]
        content = document.content if isinstance(document, Document) else document
        return content if isinstance(content, str) else list(content)
