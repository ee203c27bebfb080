"""Request bodies of `/v1/cache/documents`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from chunkattn.schema.base import Body, CacheSalt, FastList, TemplateOptions, TokenIds
from chunkattn.schema.generation import ChunkMode, Document, Messages
from chunkattn.schema.rendered import Tooled

_ID = re.compile(r"[\w.:@-]{1,128}", re.ASCII)
_LONGEST_TTL_S = 10.0**9


def _check_ttl(value: float) -> float:
    if not 0 < value <= _LONGEST_TTL_S:
        raise ValueError(f"ttl_s must be above 0 and at most {_LONGEST_TTL_S:.0f} seconds, got {value}")
    return value


Seconds = Annotated[float, AfterValidator(_check_ttl), Field(description="Seconds until the document is deleted.")]


class _Parts(Tooled):
    """Documents after a prefix."""

    prefix: str | TokenIds = ""
    """Prefix of the prompts that will use the documents."""
    messages: Messages | None = None
    """Messages before the first user message, for chats; instead of prefix. Empty for chats without any."""
    documents: FastList[str | TokenIds | Document]
    """Texts, token ids, or objects with a text, and perhaps a title."""
    cache_salt: CacheSalt = None
    chat_template_kwargs: TemplateOptions
    citations: bool = False
    """Documents with the markers that answers with `citations` cite them by."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.messages is not None and self.prefix:
            raise ValueError("prefix and messages exclude each other")
        if self.messages is None and self.tools:
            raise ValueError("tools need messages: the chat template shows them")
        if not self.documents:
            raise ValueError("documents hold no document")
        if self.messages == [] and all(isinstance(document, list) for document in self.documents):
            raise ValueError("documents of an empty list of messages must be texts; give the prefix of token ids as prefix")
        for number, name in enumerate(self.ids()):
            if name is not None and not _ID.fullmatch(name):
                raise ValueError(f"documents.{number}: an id has 1 to 128 letters, digits or any of _.:@-")
        return self

    def ids(self) -> list[str | None]:
        """Return the id of each document; None for a document without an id."""
        return [d.id if isinstance(d, Document) else None for d in self.documents]

    def cited_ids(self) -> list[str | None]:
        """Return the id that citations name each document by; None for a document without an id."""
        return [(d.id if d.cite_as is None else d.cite_as) if isinstance(d, Document) else None for d in self.documents]

    def texts(self) -> list[Any]:
        """Return text or token ids of each document."""
        return [d.plain() if isinstance(d, Document) else d for d in self.documents]

    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template, with the tools."""
        return {**self.chat_template_kwargs, **({"tools": self.shown_tools} if self.tools else {})}

    def start(self) -> Any:
        """Return the messages or the prefix. A missing prefix is empty text, or empty ids if the documents are ids."""
        if self.messages is not None:
            return [m.plain() for m in self.messages]
        return self.prefix or ([] if isinstance(self.documents[0], list) else "")


class CacheBody(_Parts):
    """Documents to compute ahead of use, after a prefix."""

    pin: bool = False
    """Protect the documents' K/V from eviction."""
    keep_states: bool = False
    """Keep the state at each document's end, too, in a model with recurrent layers. A pin protects it."""
    ttl_s: Seconds | None = None
    priority: int = 1
    """Lower values are scheduled first. The default is after generation."""


class ForgetBody(_Parts):
    """Documents whose K/V the engine forgets, after a prefix."""

    chunk_mode: ChunkMode = "isolated"
    """Forget `isolated` chunks, or one `joined` chunk."""


class ChangeBody(Body):
    """Changes to a stored document."""

    pinned: bool | None = None
    ttl_s: Seconds | Literal["never"] | None = None
    """Lifetime in seconds from now, or 'never'."""
    cache_salt: CacheSalt = None
