"""Stored document: its ids, its source and its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from chunkattn.documents.records import DocumentRecord

if TYPE_CHECKING:
    from chunkattn.outputs import RequestOutput

_ID_BYTES = 4

Content = tuple[str | None, bytes, bytes]
"""Key of a document's K/V: salt, then the int32 token ids of prefix and document as bytes."""


@dataclass(eq=False)
class StoredDocument:
    """Document after its prefix, as a client stored it.

    Attributes:
        id: name of the document, unique within its salt.
        content: salt, prefix ids and document ids.
        num_bytes: size in bytes of the document's K/V pages.
        text: text of the document without the document template; None for a document given as token ids.
        owner: holder of the API key that owns the document; None for a server without a key file.
        created: creation time in seconds since the epoch.
        expires: expiry time in seconds since the epoch; None for a document without a lifetime.
        pin: pin id, and the engine's restart count when the pin was made. A restart of the engine drops all pins.
        timer: scheduled expiry.
        record: record of the document in the document store; None for a server without one.
    """

    id: str
    content: Content
    num_bytes: int
    text: str | None
    owner: str | None = None
    created: float = field(default_factory=time.time)
    expires: float | None = None
    pin: tuple[str, int] | None = None
    timer: asyncio.TimerHandle | None = None
    record: DocumentRecord | None = None

    @property
    def cache_salt(self) -> str | None:
        """Return the salt; requests with the same salt share the document."""
        return self.content[0]

    @property
    def chunk(self) -> np.ndarray:
        """Return the int32 token ids of the document's chunk, with the document template."""
        return np.frombuffer(self.content[2], np.int32)

    def follows(self, output: RequestOutput) -> bool:
        """Return whether the prompt of an output has the prefix that the document was stored after."""
        prefix = self.content[1]
        return count_ids(prefix) == output.prefix_len and prefix == as_bytes(output.prompt_token_ids[: output.prefix_len])

    @property
    def source(self) -> str | np.ndarray:
        """Return the document without the document template: its text, or the token ids it was given as."""
        return self.chunk if self.text is None else self.text

    @property
    def prefix(self) -> np.ndarray:
        """Return the int32 token ids of the prefix."""
        return np.frombuffer(self.content[1], np.int32)

    @property
    def lens(self) -> tuple[int, int]:
        """Return the token counts of the prefix and of the document."""
        return count_ids(self.content[1]), count_ids(self.content[2])


def as_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes."""
    return np.asarray(ids, np.int32).tobytes()


def as_ids(content: bytes) -> list[int]:
    """Return the token ids of int32 bytes."""
    return np.frombuffer(content, np.int32).tolist()


def count_ids(content: bytes) -> int:
    """Return the number of token ids in int32 bytes."""
    return len(content) // _ID_BYTES
