"""Routes of `/v1/messages`: chats in the form of Anthropic's Messages API, and the tokens of their prompts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from chunkattn.errors import RequestError
from chunkattn.schema.anthropic import CountBody, MessagesBody
from chunkattn.server.chat_answer import Chat
from chunkattn.server.citations import CitedDocument
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

    def form(answer: Chat) -> MessageForm:
        documents, own, blocks = answer.cited_documents(), len(body.documents or ()), body.document_blocks

        def cited(number: int) -> CitedDocument:
            assert documents is not None
            if number < own:
                return documents(number)
            block = blocks[number - own]
            return CitedDocument(block.text, title=block.title, num_blocks=block.num_blocks)

        return MessageForm(answer.common(answer.object_name), request.state.request_id, cited if documents else None)

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
