"""Stored document as the engine sees it: token ids of its prefix and of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Stored document after its prefix.

    Attributes:
        record: record of the document.
        content: salt, prefix ids and document ids.
        pin: pin id, and the engine's restart count when the pin was made. A restart of the engine drops all pins.
    """

    record: DocumentRecord
    content: Content
    pin: tuple[str, int] | None = None

    @property
    def text(self) -> str | None:
        """Return the text without the document template; None for a document given as token ids."""
        return self.record.document if isinstance(self.record.document, str) else None

    @property
    def chunk(self) -> np.ndarray:
        """Return the int32 token ids of the document's chunk, with the document template."""
        return np.frombuffer(self.content[2], np.int32)

    @property
    def source(self) -> str | np.ndarray:
        """Return the document without the document template: its text, or the token ids it was given as."""
        return self.chunk if self.text is None else self.text

    def follows(self, output: RequestOutput) -> bool:
        """Return whether the prompt of an output has the prefix that the document was stored after."""
        prefix = self.content[1]
        return count_ids(prefix) == output.prefix_len and prefix == as_bytes(output.prompt_token_ids[: output.prefix_len])


def as_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes."""
    return np.asarray(ids, np.int32).tobytes()


def as_ids(content: bytes) -> list[int]:
    """Return the token ids of int32 bytes."""
    return np.frombuffer(content, np.int32).tolist()


def count_ids(content: bytes) -> int:
    """Return the number of token ids in int32 bytes."""
    return len(content) // _ID_BYTES
