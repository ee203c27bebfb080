"""Request bodies of `/tokenize`, `/detokenize` and `/inspect`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from chunkattn.schema.base import Body, CacheSalt, TokenIds
from chunkattn.schema.generation import Messages, PromptBody
from chunkattn.schema.rendered import Rendered
from chunkattn.web.errors import ApiError


class TokenizeBody(Rendered):
    """Text or conversation to tokenize."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if self.prompt is None and self.messages is None:
            raise ApiError(400, "give prompt or messages", param="prompt", code="missing_required_parameter")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("prompt and messages exclude each other")
        return self


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: TokenIds


class InspectBody(PromptBody):
    """One prompt in the formats of `/v1/completions`."""

    fields_of: ClassVar = {"prompt": ("chunks", "prompt")}

    prompt: str | TokenIds = ""
    cache_salt: CacheSalt = None
