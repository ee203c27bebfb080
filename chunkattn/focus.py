"""`Focus`: a choice among the documents of a prompt by its question, and how the prompt shows the chosen documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from chunkattn.errors import RequestError, shown

MODES = ("only", "reread")
"""Ways to show the chosen documents, see `Focus.mode`."""


@dataclass(frozen=True)
class Focus:
    """Choice among the documents of a prompt by its question.

    Attributes:
        top_n: number of documents to choose, at least 1. Fewer are chosen where the prompt has fewer.
        mode: `"only"` leaves the other documents out; `"reread"` repeats the chosen documents behind all documents, as the
            beginning of the question part.
        score: name of the score by which documents are chosen, see `chunkattn.calls.focus_scores.SCORES`.
    """

    top_n: int
    mode: str = "only"
    score: str = "likelihood"

    @property
    def name(self) -> str:
        """Return the name in tables, such as `reread 2 by likelihood`."""
        return f"{self.mode} {self.top_n} by {self.score}"


FocusLike = int | Mapping[str, Any] | Focus
"""Number of documents to choose, the fields of a `Focus` by name, or a `Focus`."""


def read_focus(value: FocusLike | None) -> Focus | None:
    """Return the focus that a caller gives, checked; None for none.

    Args:
        value: see `FocusLike`.

    Raises:
        RequestError: a field is unknown or has a wrong value. The name of the score is checked where the prompt runs.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in Focus.__dataclass_fields__]:
            fields = ", ".join(Focus.__dataclass_fields__)
            raise RequestError(f"focus has the fields {fields}, got {shown(unknown[0])}", param="focus")
        if "top_n" not in value:
            raise RequestError("focus needs top_n, the number of documents to choose", param="focus")
        value = Focus(**value)
    elif not isinstance(value, Focus):
        value = Focus(value)
    if isinstance(value.top_n, bool) or not isinstance(value.top_n, Integral) or value.top_n < 1:
        text = f"focus must choose an integer of at least 1 documents, got {shown(value.top_n)}"
        raise RequestError(text, param="focus")
    if not isinstance(value.mode, str) or value.mode not in MODES:
        raise RequestError(f"focus mode must be one of {', '.join(MODES)}, got {shown(value.mode)}", param="focus")
    if not isinstance(value.score, str):
        raise RequestError(f"focus score must be the name of a score, got {shown(value.score)}", param="focus")
    return Focus(int(value.top_n), value.mode, value.score)
