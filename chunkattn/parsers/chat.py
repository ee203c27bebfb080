"""Chat messages to the parts of a prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from chunkattn.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def split_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **template_options: Any
) -> tuple[str, str]:
    """Render the chat template and cut it where the first user message's content begins.

    Returns:
        The text before the cut (the prefix), and the rest with later turns and the
        generation prompt (the question).

    Raises:
        RequestError: no user message, no usable template, or a template that moves the content.
    """
    if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}", param="messages")
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), None)
    if first is None:
        raise RequestError("messages hold no user message", param="messages")
    if not isinstance(messages[first].get("content"), str):
        raise RequestError("the content of a user message must be a string", param="messages")
    marked = copy.deepcopy(list(map(dict, messages)))
    mark = f"\u2063{uuid4().hex}\u2063"  # no text can hold it by chance or by intent
    marked[first]["content"] = mark
    text, probe = (_render(tokenizer, m, template_options) for m in (messages, marked))
    cut = probe.find(mark)
    if cut < 0 or text[:cut] != probe[:cut]:
        raise RequestError("the chat template does not render the first user message in place", param="messages")
    return text[:cut], text[cut:]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **{"add_generation_prompt": True, **options})
    except Exception as error:  # templates are programs: they raise what they like
        raise RequestError(f"the chat template failed: {error}", param="messages") from error
