"""Routes of `/tokenize`, `/detokenize` and `/inspect`: prompts as the engine sees them."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from chunkattn.errors import RequestError
from chunkattn.parsers.prompt import Prompt
from chunkattn.schema.tokens import DetokenizeBody, InspectBody, TokenizeBody
from chunkattn.server.json_answer import json_answer
from chunkattn.server.state import CallerOf, ServerState, State
from chunkattn.web.bodies import JsonRoute
from chunkattn.web.errors import ApiError
from chunkattn.web.time_limit import unless_gone

router = APIRouter(route_class=JsonRoute, tags=["tokens"])

_MAX_SHOWN_TOKENS = 1 << 16
"""Limit on the tokens that one answer may show as text."""
_VALUES_PER_TOKEN = 6
"""Values of a token in an answer of `/inspect`."""


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Return the token ids of a text, or of a conversation under the chat template."""
    state.check(body)
    caller.take(1)
    parser = state.tokenizing_parser

    def ids() -> list[int]:
        if body.messages is not None:
            parsed = parser.parse_chat([m.plain() for m in body.messages], **body.template_options())
            return [int(t) for t in parsed.layout.token_ids]
        text = body.prompt or ""
        return parser.text(text) if body.add_special_tokens else parser.prompts(text, param="prompt")

    def fields() -> dict[str, Any]:
        tokens = ids()
        answer = {"count": len(tokens), "max_model_len": state.llm.limits.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            _check_shown(len(tokens), "prompt")
            answer["token_strs"] = [state.texts.piece(t) for t in tokens]
        return answer

    return await unless_gone(request, json_answer(state, caller, fields, len(body.prompt or ""), in_thread=True))


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, state: State, caller: CallerOf) -> dict[str, Any]:
    """Return the text of token ids."""
    state.check(body)

    def text() -> str:
        state.llm.limits.check_ids(body.tokens, "tokens")
        return state.texts.whole(body.tokens)

    _check_shown(len(body.tokens), "tokens")
    caller.take(1)
    return {"prompt": await unless_gone(request, state.llm.threads.run(text))}


@router.post("/inspect")
async def inspect(body: InspectBody, request: Request, state: State, caller: CallerOf) -> Response:
    """Return the parts of a prompt, their tokens and position ids, and which tokens each token sees.

    Token `i` sees token `k` if `k <= i`, and `k < prefix_len` or `k >= row_start[i]`.
    """
    state.check(body, caller)
    stored = state.named_documents(body.named(), caller, body.cache_salt, field="chunks.documents")
    documents = {number: document.chunk for number, document in stored.items()}
    prompt: Prompt = next(iter(body.prompts(documents)), {"prompt_token_ids": []})
    caller.take(1)
    values = _VALUES_PER_TOKEN * min(_MAX_SHOWN_TOKENS, state.llm.frontend.parser.max_tokens or _MAX_SHOWN_TOKENS)
    options = {"chunk_mode": body.chunk_mode, "add_special_tokens": body.add_special_tokens}
    answer = partial(_inspected, state, prompt, body.chunk_aware, options)
    try:
        return await unless_gone(request, json_answer(state, caller, answer, values, in_thread=True))
    except (ApiError, RequestError) as error:
        raise body.own_error(error) from None


def _check_shown(tokens: int, param: str) -> None:
    """Check the number of tokens that an answer would show as text.

    Raises:
        ApiError: 400, more than `_MAX_SHOWN_TOKENS`.
    """
    if tokens > _MAX_SHOWN_TOKENS:
        text = f"{param} has {tokens} tokens; the texts of up to {_MAX_SHOWN_TOKENS} are shown"
        raise ApiError(400, text, param=param, code="invalid_value")


def _inspected(state: ServerState, prompt: Prompt, chunk_aware: bool | None, options: dict[str, Any]) -> dict[str, Any]:
    (parsed,) = state.llm.frontend.parse([prompt], chunk_aware, **options)
    layout, parts = parsed.layout, []
    _check_shown(len(layout), "prompt")
    for segment in layout.segments:
        if segment.end > segment.start or segment.chunk_id >= 0:
            ids, positions = layout.part(segment).tolist(), layout.positions[segment.start : segment.end].tolist()
            tokens = [{"id": t, "text": state.texts.piece(t), "position": p} for t, p in zip(ids, positions, strict=True)]
            parts.append({"name": segment.name, "first": segment.start, "tokens": tokens})
    return {
        "chunked": not layout.is_plain,
        "num_tokens": len(layout),
        "max_position": layout.max_position,
        "prefix_len": layout.prefix_len,
        "row_start": layout.row_start.tolist(),
        "parts": parts,
    }
