"""Routes of `/v1/completions` and `/v1/chat/completions`, and their streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from chunkattn.errors import RequestError
from chunkattn.outputs import RequestOutput
from chunkattn.remote.async_runner import snapshot
from chunkattn.schema.generation import ChatBody, CompletionBody
from chunkattn.server.answers import Answer, Completion
from chunkattn.server.chat_answer import Chat
from chunkattn.server.forms import Form, openai_form
from chunkattn.server.json_answer import json_answer
from chunkattn.server.state import ServerState, State
from chunkattn.server.texts import Tail
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.errors import ApiError, api_error
from chunkattn.web.events import HEARTBEAT, EventStream, Timed, merged
from chunkattn.web.keys import Caller
from chunkattn.web.time_limit import unless_gone

router = APIRouter(route_class=JsonRoute, tags=["generation"])

A = TypeVar("A", bound=Answer)
B = TypeVar("B", CompletionBody, ChatBody)


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, state: State) -> Response:
    """Continue prompts: text, token ids, lists of either, or one prompt in parts (`chunks`)."""
    return await answered(Completion, body, request, state)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, state: State) -> Response:
    """Answer a conversation, with `documents` as chunks if there are any."""
    return await answered(Chat, body, request, state)


async def answered(
    kind: Callable[[B, ServerState, Caller], A],
    body: B,
    request: Request,
    state: ServerState,
    form_of: Callable[[A], Form] = openai_form,
) -> Response:
    """Return the answer to a request for generated text, whole or as a stream.

    Args:
        kind: class of the request.
        body: body of the request.
        request: the request.
        state: state of the server.
        form_of: function from the request to the form of its answer.

    Raises:
        ApiError: the request cannot be served.
        ChunkAttnError: as `AsyncLLM.stream`, under the names that the body has for the arguments.
    """
    state.check(body, request.state.caller)
    try:
        answer = kind(body, state, request.state.caller)
        answer.check_size()
    except (ApiError, RequestError) as error:
        raise body.own_error(error) from None
    form = form_of(answer)
    if not answer.options.stream:
        return await unless_gone(request, _whole(answer, form))
    # Await the first output, or the first heartbeat, before the response: errors up to there still get an HTTP status.
    outputs = Timed(_outputs(answer), state.config.stream_heartbeat_s or None)
    try:
        first = await unless_gone(request, outputs.next())
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(_events(answer, form, first, outputs, request.state.request_id), outputs)


async def _outputs(answer: Answer) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    try:
        async with aclosing(merged(await answer.streams())) as outputs:
            async for numbered in outputs:
                yield numbered
    except (ApiError, RequestError) as error:
        raise answer.options.own_error(error) from None


async def _whole(answer: Answer, form: Form) -> Response:
    async with aclosing(_outputs(answer)) as outputs:
        last = {number: output async for number, output in outputs}
    ordered = [last[number] for number in sorted(last)]

    def build() -> dict[str, Any]:
        choices = (answer.choice(i, o, s) for number, o in enumerate(ordered) for i, s in answer.indexed(number, o))
        return form.whole({**answer.common(answer.object_name), "choices": choices, "usage": answer.usage(ordered)})

    tokens = sum(len(sample.token_ids) for output in ordered for sample in output.outputs)
    values = max(answer.answer_values, tokens * (1 + (answer.params.logprobs or 0)))
    return await json_answer(answer.state, answer.caller, build, values)


async def _events(
    answer: Answer,
    form: Form,
    first: tuple[int, RequestOutput] | None,
    outputs: Timed[tuple[int, RequestOutput]],
    request_id: str,
) -> AsyncGenerator[str, None]:
    last: dict[int, RequestOutput] = {}
    tails: dict[int, Tail] = {}
    stream_options = answer.options.stream_options

    def event(choices: list[dict[str, Any]], *, with_usage: bool) -> str:
        body = {**answer.common(answer.chunk_name), "choices": choices}
        if with_usage:
            body["usage"] = answer.usage([last[number] for number in sorted(last)])
        return form.event(body)

    async def events(number: int, output: RequestOutput) -> Iterable[str]:
        if number not in last and answer.params.prompt_logprobs is not None:
            copy = snapshot(output)  # the engine keeps extending the original
            return await answer.state.llm.threads.run(lambda: list(made(number, copy)))  # many log-probabilities
        return made(number, output)

    def made(number: int, output: RequestOutput) -> Iterator[str]:
        last[number] = output
        for index, sample in answer.indexed(number, output):
            tail = tails.get(index)
            if tail is None:
                tail = tails[index] = Tail(answer.params.stop)
                if begin := answer.begin(index, output, tail):
                    yield event([begin], with_usage=continuous)
            if (new := tail.take(sample)) and (choice := answer.delta(index, new, output, tail)):
                yield event([choice], with_usage=continuous)

    continuous = stream_options is not None and stream_options.continuous_usage_stats
    try:
        arrived = first
        while True:
            for text in [HEARTBEAT] if arrived is None else await events(*arrived):
                yield text
            try:
                arrived = await outputs.next()
            except StopAsyncIteration:
                break
        if stream_options is not None and stream_options.include_usage:
            yield event([], with_usage=True)
    except Exception as error:
        yield form.failure(api_error(error, request_id))
    if form.end:
        yield form.end
