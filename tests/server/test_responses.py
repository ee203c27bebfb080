"""`/v1/responses`: OpenAI's client, and the chats that bodies become."""

import asyncio

import httpx
import openai
import pytest

from chunkattn.errors import NonFiniteError
from chunkattn.schema.generation import ChatBody
from chunkattn.schema.responses import ResponsesBody
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "Where is Ana?"}
FUNCTION = {"name": "find", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"who": "Ana"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"who": "Ana"}'}}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SCHEMA = {"type": "json_schema", "name": "place", "schema": {"type": "object"}, "strict": True}
LOGPROBS = ["message.output_text.logprobs"]

# Bodies of responses, and the fields of the chats that they stand for.
CHATS = [
    ({"input": "Where is Ana?"}, {"messages": [USER]}),
    (
        {"input": [USER], "instructions": "Be kind.", "max_output_tokens": 5},
        {"messages": [{"role": "system", "content": "Be kind."}, USER], "max_tokens": 5},
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
    ),
    (
        {"input": [USER, THOUGHT, CALL, CALL, {"type": "function_call_output", "call_id": "c1", "output": "Oslo"}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [CALLED, CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": "Oslo"},
            ]
        },
    ),
    (
        {
            "input": [
                USER,
                {"role": "assistant", "content": "I look."},
                CALL,
                THOUGHT,
                {"role": "assistant", "content": "Oslo."},
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
                {"role": "assistant", "reasoning_content": "Hm.", "content": "Oslo."},
            ]
        },
    ),
    (
        {"input": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "No."}]}, USER]},
    ),
    (
        {"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well."}], "content": None}]},
        {"messages": [USER, {"role": "assistant", "reasoning_content": "Well."}]},
    ),
    (
        {"input": "Where is Ana?", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"messages": [USER], "reasoning_effort": "low", "verbosity": "medium"},
    ),
    (
        {"input": "Where is Ana?", "include": LOGPROBS, "top_logprobs": 2, "stream": True},
        {
            "messages": [USER],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ({"input": "Where is Ana?", "tools": [], "tool_choice": "auto"}, {"messages": [USER]}),
    (
        {
            "input": "Where is Ana?",
            "documents": ["a", {"id": "b"}],
            "focus": 1,
            "cache_salt": "s",
            "top_k": 3,
        },
        {"messages": [USER], "documents": ["a", {"id": "b"}], "focus": 1, "cache_salt": "s", "top_k": 3},
    ),
]
# Fields that a chat of the server may refuse.
TOOLED = [
    (
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False},
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    (
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "find"}},
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "find"}},
        },
    ),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": SCHEMA}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {name: value for name, value in SCHEMA.items() if name != "type"},
            }
        },
    ),
]


@pytest.mark.parametrize(("body", "chat"), CHATS)
def test_a_body_becomes_a_chat(body, chat):
    made, expected = ResponsesBody.model_validate(body).chat, ChatBody.model_validate(chat)
    assert made.model_dump() == expected.model_dump()
    assert made.model_fields_set == expected.model_fields_set
    nulled = body | dict.fromkeys(("instructions", "tools", "metadata", "text", "max_output_tokens"))
    nulled |= {name: value for name, value in body.items() if value}
    assert ResponsesBody.model_validate(nulled).chat.model_dump() == made.model_dump()


@pytest.mark.parametrize(("body", "chat"), TOOLED)
def test_tools_and_formats_become_those_of_chats(body, chat):
    made = ResponsesBody.translate({"input": "Where is Ana?", **body})
    assert made == {"messages": [USER], **chat}


def test_the_engine_gets_what_it_gets_of_a_chat(post, writer):
    body = {"input": "Where is Ana?", "documents": ["Ana is in Oslo.", "Rumi is a poet."], "max_output_tokens": 2}
    chat = {"messages": [USER], "documents": body["documents"], "max_tokens": 2}
    answers = [post(RESPONSES, body), post(CHAT, chat), post(RESPONSES, body | {"stream": True})]
    assert [answer.status_code for answer in answers] == [200] * 3
    first, second, third = writer.requests
    assert [*first.layout.token_ids] == [*second.layout.token_ids] == [*third.layout.token_ids]
    assert first.sampling == second.sampling == third.sampling
    assert first.layout.num_chunks == 2
    content = answers[1].json()["choices"][0]["message"]["content"]
    assert answers[0].json()["output"][0]["content"][0]["text"] == content


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice", "unsupported_parameter"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "unsupported_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input", "missing_required_parameter"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"include": ["all"]}, "include", "invalid_value"),
    ({"messages": [USER]}, "messages", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"reasoning": {"summary": "detailed"}}, "summary", "unsupported_parameter"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"documents": [{"id": "none"}]}, "documents", "document_not_found"),
]


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(post, body, param, code):
    answer = post(RESPONSES, {"input": "Who?", **body})
    assert answer.status_code == (404 if code == "document_not_found" else 400)
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"] or code == "document_not_found"


@pytest.fixture
def ask(llm, writer):
    """Run a coroutine function with OpenAI's client over the app."""

    def run(case, **options):
        async def once():
            transport = httpx.ASGITransport(create_app(llm, ServerConfig(**options)))
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0) as client,
            ):
                await case(client)
            await asyncio.gather(*writer.tasks)

        asyncio.run(once())

    return run


def test_openai_s_client(ask, writer):
    writer.token_ids = [40, 50, 60]

    async def case(client):
        answer = await client.responses.create(model="chunkattn-demo", input="Who?", metadata={"a": "b"}, store=True)
        assert answer.output_text
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (answer.usage.output_tokens, answer.store, answer.metadata) == (3, False, {"a": "b"})
        items = [{"role": "user", "content": "Who?"}, *answer.output, {"role": "user", "content": "And?"}]
        again = await client.responses.create(input=items, extra_body={"documents": ["Ana."], "return_chunk_usage": True})
        assert again.output_text == answer.output_text
        parsed = await client.responses.parse(input="Who?", model="chunkattn-demo")
        assert parsed.output_text == answer.output_text
        kinds, text = [], ""
        async with client.responses.stream(input="Who?", model="chunkattn-demo") as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
        assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
        assert text == answer.output_text
        with pytest.raises(openai.BadRequestError, match="stores no answers") as caught:
            await client.responses.create(input="Who?", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"

    ask(case)


def test_the_defaults_of_the_model_are_told(ask, llm, monkeypatch):
    monkeypatch.setattr(llm.frontend, "sampling_defaults", {"temperature": 0.25})

    async def case(client):
        answer = await client.responses.create(input="Who?", top_p=0.5)
        assert (answer.temperature, answer.top_p) == (0.25, 0.5)

    ask(case)


def test_a_stream_that_fails_raises_in_openai_s_client(ask, llm, monkeypatch):
    real = llm.stream

    async def failing(*args, **options):
        async for output in real(*args, **options):
            yield output
            raise NonFiniteError("a logit is NaN")

    monkeypatch.setattr(llm, "stream", failing)

    async def case(client):
        seen = {}

        async def read():
            async for event in await client.responses.create(input="Who?", stream=True):
                seen.update({event.type: event})

        with pytest.raises(openai.APIError, match="a logit is NaN"):
            await read()
        assert seen["response.failed"].response.error.code == "server_error"

    ask(case)


def test_a_silent_stream_begins_with_comments(ask, writer):
    writer.delay = 0.05

    async def case(client):
        answer = await client.post("/responses", cast_to=httpx.Response, body={"input": "Who?", "stream": True}, options={})
        text = answer.text
        assert text.startswith(": keep-alive\n\n")
        assert text.count("event: response.created") == 1
        assert "[DONE]" not in text

    ask(case, stream_heartbeat_s=0.01)
