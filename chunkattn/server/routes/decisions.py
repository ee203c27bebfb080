"""Route of `/v1/decisions`, and the call that it shares with `/v1/systemone`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from chunkattn.calls.decide_verdict import AUTO
from chunkattn.decisions import DecisionOutput
from chunkattn.errors import RequestError
from chunkattn.outputs import ScoreUsage
from chunkattn.schema.decide import DecideBody
from chunkattn.schema.decisions import DecisionsBody
from chunkattn.schema.generation import named_documents
from chunkattn.server.json_answer import json_answer
from chunkattn.server.state import CallerOf, ServerState, State
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.keys import Caller
from chunkattn.web.time_limit import unless_gone

router = APIRouter(route_class=JsonRoute, tags=["decisions"])


@router.post("/v1/decisions")
async def decisions(body: DecisionsBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer typed questions about one input, in OpenAI's format."""
    return await decide(body, request, state, caller)


async def decide(body: DecideBody, request: Request, state: ServerState, caller: Caller) -> Response:
    """Return the answer to a request, and end its work if the client disconnects.

    Args:
        body: body of the request, in the format of its route.
        request: the request.
        state: state of the server.
        caller: client of the request.

    Raises:
        ApiError: the request cannot be served.
        ChunkAttnError: as `AsyncLLM.decide`, under the names that the body has for the arguments.
    """
    state.check(body, caller)
    state.check_answer_values(body.num_values, "questions or options at once", "questions")
    caller.take(1)
    return await unless_gone(request, _answer(body, state, caller))


async def _answer(body: DecideBody, state: ServerState, caller: Caller) -> Response:
    method = (state.llm.decide_method or AUTO) if body.method == AUTO else body.method
    output = DecisionOutput([], ScoreUsage(0, 0, 0), method)
    salt, timeout = caller.salt(body.salt), state.config.request_timeout_s
    stored = state.named_documents(named_documents(body.documents), caller, body.salt)
    options = body.options(salt, {number: document.chunk for number, document in stored.items()})
    try:
        asked_of, questions = await state.llm.threads.run(body.call)
        if questions:  # a question with one possible answer is not asked
            output = await state.llm.decide(asked_of, questions, timeout=timeout, **options)
    except RequestError as error:
        raise body.own_error(error) from None

    def build() -> dict[str, Any]:
        named = {"model": state.name_for(caller), "method": output.method}
        return named | body.answer(output, state.config.min_label_mass)

    # The answer repeats texts of the request, which may be long.
    return await json_answer(state, caller, build, body.num_values, in_thread=True)
