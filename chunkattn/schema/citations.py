"""Field `citations` of request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from chunkattn.citations import INSTRUCTION, Citations, read_citations
from chunkattn.schema.base import Strict


class CitationOptions(Strict):
    """Way in which an answer cites its documents; see `chunkattn.Citations`."""

    mode: Literal["auto", "required"] = "auto"
    """Let the model cite or not, or demand at least one citation."""
    instruction: str = INSTRUCTION
    """Text before the question that tells the model to cite; an empty text adds none."""
    keep_markers: bool = False
    """Keep the markers in the text."""
    within: int = 400
    """Under `required`, characters behind which the first citation follows the next word at the latest."""


CitationsField = Annotated[
    bool | Literal["auto", "required"] | CitationOptions | None,
    Field(
        description='Cite the documents: `true`, `"required"`, or `{mode, instruction, keep_markers, within}`; by default not.'
    ),
]


def citations_of(value: bool | str | CitationOptions | None) -> Citations | None:
    """Return the citations of a request, or None without them.

    Args:
        value: value of the field `citations`.

    Raises:
        RequestError: as `read_citations`.
    """
    return read_citations(value.model_dump() if isinstance(value, CitationOptions) else value)


def citations_in(body: Mapping[str, Any]) -> Citations | None:
    """Return the citations of a body as a client sends it.

    Args:
        body: decoded JSON body.

    Raises:
        RequestError: as `read_citations`.
    """
    value = body.get("citations")
    if isinstance(value, Mapping):
        value = {name: entry for name, entry in value.items() if entry is not None}
    return read_citations(value)
