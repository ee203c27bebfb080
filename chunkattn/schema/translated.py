"""`Translated`: bodies of other APIs that are answered as chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from fastapi.exceptions import RequestValidationError
from pydantic import PrivateAttr, ValidationError, ValidatorFunctionWrapHandler, model_validator

from chunkattn.schema.base import Sampled, TemplateOptions
from chunkattn.schema.generation import ChatBody, WithDocuments
from chunkattn.web.errors import ApiError, api_error


class Translated(Sampled, WithDocuments):
    """Body of another API, with the options of a chat that its API does not have.

    A body is translated where it is validated, so the chat is as valid as one that the client would have sent.
    """

    chat_template_kwargs: TemplateOptions

    _chat: ChatBody = PrivateAttr()

    @staticmethod
    def translate(body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat that answers a body.

        Args:
            body: valid body as it was sent.
        """
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _translate(cls, sent: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        body: Self = handler(sent)
        if sent is not body:
            try:
                body._chat = ChatBody.model_validate(cls.translate(sent))
            except ValidationError as error:
                faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
                raise body.own_error(api_error(RequestValidationError(faults), "")) from None
            except ApiError as error:
                raise body.own_error(error) from None
            body._chat.name_as(body.own_names())
        return body

    @property
    def chat(self) -> ChatBody:
        """Return the chat that answers the request. Its errors name the fields of this body."""
        return self._chat
