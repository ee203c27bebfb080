"""Route of `/v1/messages`: chats in the form of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from chunkattn.schema.anthropic import MessagesBody
from chunkattn.server.answers import Answer
from chunkattn.server.chat_answer import Chat
from chunkattn.server.message_form import MessageForm
from chunkattn.server.routes.generation import answered
from chunkattn.server.state import State
from chunkattn.web.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API, with `documents` as in a chat."""

    def form(answer: Answer) -> MessageForm:
        return MessageForm(answer.common(answer.object_name), request.state.request_id)

    return await answered(Chat, body.chat, request, state, form)
