"""`Citations`: whether and how an answer cites the documents of its prompt; `Document`: a document with an id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkattn.errors import RequestError, shown

AUTO, REQUIRED = CITATION_MODES = ("auto", "required")
"""Values of `Citations.mode`."""
INSTRUCTION = (
    "Cite the documents: behind each statement, write the marker of the document that it comes from. The marker stands at the "
    "beginning of its document, in the form [doc:...].\n\n"
)
"""Default of `Citations.instruction`."""
MAX_INSTRUCTION_CHARS = 8192
MAX_WITHIN = 10_000
PARAM = "citations"
"""Name of the argument in errors."""


@dataclass(frozen=True)
class Document:
    """Document with an id, which names it in citations.

    Attributes:
        content: text or token ids.
        id: id of the document; None for a document without one, which citations name by a hash of its content.
    """

    content: str | Sequence[int]
    id: str | None = None

    def __len__(self) -> int:
        """Return the characters or the token ids of the document."""
        return len(self.content)


@dataclass(frozen=True)
class Citations:
    """Way in which an answer cites the documents of its prompt.

    Attributes:
        mode: `"auto"` lets the model cite or not; `"required"` demands at least one citation.
        instruction: text before the question that tells the model to cite; an empty text adds none. It is part of the question,
            so that no prefix and no document has other K/V.
        keep_markers: whether the answer's text keeps the markers; they are removed by default.
        within: number of characters behind which, in the mode `"required"`, the first citation follows the next word at the
            latest. `max_tokens` should leave room for them.
    """

    mode: str = AUTO
    instruction: str = INSTRUCTION
    keep_markers: bool = False
    within: int = 400


CitationsLike = bool | str | Mapping[str, Any] | Citations
"""Boolean that says whether to cite, a mode, the fields of a `Citations` by name, or a `Citations`."""


def read_citations(value: CitationsLike | None) -> Citations | None:
    """Return the citations that a caller asks for, checked; None for none.

    Args:
        value: see `CitationsLike`.

    Raises:
        RequestError: a field is unknown or has a wrong value.
    """
    if value is None or value is False:
        return None
    if value is True:
        return Citations()
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in Citations.__dataclass_fields__]:
            fields = ", ".join(Citations.__dataclass_fields__)
            raise RequestError(f"citations have the fields {fields}, got {shown(unknown[0])}", param=PARAM)
        value = Citations(**value)
    elif not isinstance(value, Citations):
        value = Citations(value)
    if not isinstance(value.mode, str) or value.mode not in CITATION_MODES:
        modes = ", ".join(CITATION_MODES)
        raise RequestError(f"citations must be True, False or one of {modes}, got {shown(value.mode)}", param=PARAM)
    if not isinstance(value.instruction, str) or len(value.instruction) > MAX_INSTRUCTION_CHARS:
        text = f"the instruction of citations must be a text of at most {MAX_INSTRUCTION_CHARS} characters"
        raise RequestError(text, param=PARAM)
    if not isinstance(value.keep_markers, bool):
        raise RequestError(f"keep_markers must be True or False, got {shown(value.keep_markers)}", param=PARAM)
    if isinstance(value.within, bool) or not isinstance(value.within, int) or not 0 <= value.within <= MAX_WITHIN:
        raise RequestError(f"within must be an integer from 0 to {MAX_WITHIN}, got {shown(value.within)}", param=PARAM)
    return value
