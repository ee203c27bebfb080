"""Routes of `/v1/messages`: chats in the form of Anthropic's Messages API, and the tokens of their prompts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from chunkattn.errors import RequestError
from chunkattn.schema.anthropic import CountBody, MessagesBody
from chunkattn.server.answers import Answer
from chunkattn.server.chat_answer import Chat
from chunkattn.server.message_form import MessageForm
from chunkattn.server.routes.generation import answered
from chunkattn.server.state import State
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.errors import ApiError
from chunkattn.web.time_limit import unless_gone

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API, with `documents` as in a chat."""

    def form(answer: Answer) -> MessageForm:
        return MessageForm(answer.common(answer.object_name), request.state.request_id)

    return await answered(Chat, body.chat, request, state, form)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request, state: State) -> dict[str, Any]:
    """Return the number of tokens of a conversation's prompt as `{"input_tokens"}`, documents included."""
    caller = request.state.caller
    state.check(body.chat, caller)
    try:
        chat = Chat(body.chat, state, caller)
        caller.take(1)
        prompt = await unless_gone(request, state.llm.threads.run(chat.prompt))
    except (ApiError, RequestError) as error:
        raise body.chat.own_error(error) from None
    return {"input_tokens": len(prompt.layout)}
