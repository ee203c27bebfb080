"""`Form`: the form in which an answer is sent, whole or as a stream: that of OpenAI's completions and chats."""

from __future__ import annotations

from typing import Any

from chunkattn.server.answers import Answer
from chunkattn.web.error_events import DONE
from chunkattn.web.errors import ApiError
from chunkattn.web.events import event_of


class Form:
    """Form of one answer: that of completions and chats, whose own subclasses translate an answer to a chat.

    A stream is the texts of `event` for each chunk, then that of `failure` if the stream ends with an error, then `end`.
    """

    end: str = DONE

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer.

        Args:
            answer: the answer in OpenAI's form.
        """
        return answer

    def event(self, chunk: dict[str, Any]) -> str:
        """Return the events of a chunk.

        Args:
            chunk: the chunk in OpenAI's form.
        """
        return event_of(chunk)

    def failure(self, error: ApiError) -> str:
        """Return the events of an error that ends the stream."""
        return event_of(error.body)


def openai_form(answer: Answer) -> Form:
    """Return the form of completions and chats."""
    return Form()
