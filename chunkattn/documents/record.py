"""Record of a stored document: what is needed to compute it again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chunkattn.citations import Document
from chunkattn.errors import ChunkAttnError, ConfigError
from chunkattn.parsers.document_encoder import Marked
from chunkattn.parsers.markers import marker_of


class RecordsError(ChunkAttnError, OSError):
    """Change of the records that the file did not take, for example because the disk is full.

    Nothing was changed, except for a deletion in portions: its message says when only a part was deleted.
    """


class RecordsInUseError(ConfigError):
    """File of records that another process has open."""


class Scope(NamedTuple):
    """Namespace of document ids.

    Attributes:
        owner: client that owns the documents; None for a server that does not tell clients apart.
        cache_salt: salt under which the documents are cached.
    """

    owner: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, eq=False)
class Prefix:
    """Prefix of a stored document, as the client gave it.

    Attributes:
        content: text, int32 token ids, or chat messages.
        is_chat: whether the content is the chat messages before the first user message, perhaps none.
        template_options: variables of the chat template.
    """

    content: str | Sequence[int] | Sequence[Mapping[str, Any]]
    is_chat: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        """Return the text, the list of token ids or the list of messages."""
        return self.content if isinstance(self.content, str) else list(self.content)

    def encode(self) -> bytes:
        """Return the prefix as bytes; equal prefixes have equal bytes."""
        return encode([self.source, self.is_chat, dict(self.template_options)])


@dataclass(eq=False)
class DocumentRecord:
    """Stored document. `DocumentRecords` changes the fields of the documents that it keeps.

    Attributes:
        scope: namespace of the id.
        id: name of the document, unique in its scope.
        prefix: prefix that the document follows.
        document: text without the document template, or int32 token ids.
        created: creation time in seconds since the epoch.
        expires: expiry time in seconds since the epoch; None for a document without a lifetime.
        pinned: whether the client wants the document's K/V protected from eviction.
        tokens: token count of the document as last computed; None if unknown.
        prefix_tokens: token count of the prefix as last computed; None if unknown.
        num_bytes: bytes of the document's K/V as last computed; None if unknown.
        keep_states: whether the client wants the state at the document's end kept, in a model with recurrent layers.
        cite_as: id that the marker in the document's chunk names; None for a document that was stored without a marker.
        fault: why this process cannot use the document, which is then in the file alone; None for a usable one. Never written.
    """

    scope: Scope
    id: str
    prefix: Prefix
    document: str | Sequence[int]
    created: float = field(default_factory=time.time)
    expires: float | None = None
    pinned: bool = False
    tokens: int | None = None
    prefix_tokens: int | None = None
    num_bytes: int | None = None
    keep_states: bool = False
    cite_as: str | None = None
    fault: str | None = None

    @property
    def is_live(self) -> bool:
        """Return whether clients can use the document now."""
        return self.fault is None and (self.expires is None or self.expires > time.time())

    @property
    def marked(self) -> Any:
        """Return the source, with its marker if the document was stored with one."""
        if self.cite_as is None:
            return self.source
        return Marked(self.source, marker_of(Document(self.source, self.cite_as)))

    @property
    def source(self) -> str | list[int]:
        """Return the text or the token ids of the document."""
        return self.document if isinstance(self.document, str) else list(self.document)


def encode(value: Any) -> bytes:
    """Return a JSON value as bytes; lone surrogates survive."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode(value: bytes) -> Any:
    """Return the JSON value of `encode`."""
    return json.loads(value.decode("utf-8", "surrogatepass"))
