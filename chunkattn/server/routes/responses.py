"""Route of `/v1/responses`: chats in the form of OpenAI's Responses API, without stored state."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from chunkattn.schema.responses import ResponsesBody
from chunkattn.server.chat_answer import Chat
from chunkattn.server.response_form import ResponseForm
from chunkattn.server.routes.generation import answered
from chunkattn.server.state import State
from chunkattn.web.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request, state: State) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API, with `documents` as in a chat; nothing is stored."""

    def form(answer: Chat) -> ResponseForm:
        sampled = {"temperature": answer.params.temperature, "top_p": answer.params.top_p}
        repeated, documents = body.repeated | sampled, answer.cited_documents()
        return ResponseForm(answer.common(answer.object_name), repeated, request.state.request_id, documents)

    return await answered(Chat, body.chat, request, state, form)
