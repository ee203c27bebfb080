"""Documents of `LLM.decide`: chunks between the beginning of the chat template and the state, which sees all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chunkattn.calls.algorithms import Documents
from chunkattn.calls.frontend import Frontend
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import PrecomputeRequest, ScoreRequest
from chunkattn.errors import RequestError
from chunkattn.layout import Names
from chunkattn.parsers.state_template import StateTemplate

DOCUMENTS = Names("system", "documents", "state", "document", last="state")
"""Names of the parts before a question."""


def read_documents(frontend: Frontend, documents: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Return the token ids of each document.

    Args:
        frontend: frontend of the engine.
        documents: texts or token ids.

    Raises:
        RequestError: a document is malformed, there are too many, or the engine has no cache to keep them in.
        CapacityError: the documents have more tokens than a prompt may have.
    """
    chunks = frontend.parser.read_documents(documents)
    if chunks and not frontend.config.enable_prefix_caching:
        text = "decide keeps documents in the cache, and this engine has enable_prefix_caching=False; put them into the state"
        raise RequestError(text, param="documents")
    return chunks


def behind_documents(
    frontend: Frontend, template: StateTemplate, state: str, chunks: list[list[int]]
) -> tuple[list[int], Documents]:
    """Return the token ids before documents, and the documents with the state behind them.

    Args:
        frontend: frontend of the engine.
        template: chat template of the call.
        state: text of the state.
        chunks: token ids of each document.

    Raises:
        RequestError: the state cannot be tokenized.
    """
    before, ids = template.parts(state)
    return before, Documents(chunks, ids, frontend.parser.strategy, frontend.parser.gap)


def check_behind(
    limits: EngineLimits, before: list[int], documents: Documents, items: Sequence[list[int]], parts: Sequence[str]
) -> None:
    """Check documents, state and questions against the limits of an engine.

    Args:
        limits: limits of the engine.
        before: token ids before the documents.
        documents: documents and state.
        items: token ids of each question.
        parts: names of the questions, for error messages.

    Raises:
        RequestError: a token id is outside the vocabulary, or the checkpoint has a sliding window.
        CapacityError: a document, the state or a question can never fit.
    """
    limits.check(PrecomputeRequest("", documents.layout(before, [])), DOCUMENTS)
    for item, part in zip(items, parts, strict=True):
        limits.check_ids(item, "questions", part, placed=False)
    longest = max(range(len(items)), key=lambda number: len(items[number]))
    layout = documents.layout(before, items[longest])
    labels = ((0,),)
    request = ScoreRequest("", layout, np.asarray([len(layout) - 1]), labels, share_prefix=True, state_len=len(documents.state))
    limits.check(request, DOCUMENTS._replace(question="questions", last=f"state with {parts[longest]}"))
