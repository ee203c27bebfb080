"""Calls of tools and texts of a schema through `/v1/responses` and `/v1/messages`, over an engine that writes a given text."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.test_responses import ask as ask
from tests.server.test_tools import CALLED, CALLS, FIND, NOW

pytest_plugins = ["tests.told_engine"]
pytestmark = pytest.mark.usefixtures("compiled")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Where is Ana?"}
TOOLS = [{"type": "function", **tool["function"]} for tool in (FIND, NOW)]
EMPTY = {"type": "object", "properties": {}}
CUSTOM = [
    {"name": tool["name"], "description": tool.get("description"), "input_schema": tool.get("parameters", EMPTY)}
    for tool in TOOLS
]
CHOICES = [("required", {"type": "any"}), ("auto", {"type": "auto"})]


class Place(BaseModel):
    city: str


def events_of(answer):
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(("choice", "anthropic_choice"), CHOICES)
def test_calls_reach_both_apis(post, says, writer, choice, anthropic_choice):
    says("I look. " + CALLS)
    chat = post(CHAT, {"messages": [USER], "tools": [FIND, NOW], "tool_choice": choice, "max_tokens": 200})
    body = {"input": "Where is Ana?", "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 200}
    response = post(RESPONSES, body).json()
    Response.model_validate(response)
    said, *calls = response["output"]
    assert said["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]
    assert [(call["name"], call["arguments"]) for call in calls] == CALLED
    assert (response["status"], response["tool_choice"], len(response["tools"])) == ("completed", choice, 2)
    streamed = events_of(post(RESPONSES, body | {"stream": True}))
    for event in streamed:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [item["type"] for item in streamed[-1]["response"]["output"]] == ["message", "function_call", "function_call"]
    body = {"messages": [USER], "tools": CUSTOM, "tool_choice": anthropic_choice, "max_tokens": 200}
    message = post(MESSAGES, body).json()
    assert [(block["name"], block["input"]) for block in message["content"][1:]] == [(n, json.loads(a)) for n, a in CALLED]
    assert message["stop_reason"] == "tool_use"
    assert events_of(post(MESSAGES, body | {"stream": True}))[-2]["delta"]["stop_reason"] == "tool_use"
    first, *others = writer.requests
    grammar = first.sampling.structured_outputs
    assert (grammar is not None) == (choice == "required")
    assert all(other.sampling.structured_outputs == grammar for other in others)
    assert all([*other.layout.token_ids] == [*first.layout.token_ids] for other in others[:2])


def test_openai_s_client_calls_and_parses(ask, says, writer):
    async def call(client):
        says(CALLS)
        async with client.responses.stream(input="Where is Ana?", tools=TOOLS, model="chunkattn-demo") as stream:
            final = await stream.get_final_response()
        assert [(item.name, item.arguments) for item in final.output] == CALLED
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": "Oslo"} for c in final.output]
        says("Oslo.")
        again = await client.responses.create(input=[USER, *final.output, *results], tools=TOOLS)
        assert again.output_text.strip() == "Oslo."
        says('{"city": "Oslo"}')
        parsed = await client.responses.parse(input="Where is Ana?", text_format=Place, model="chunkattn-demo")
        assert parsed.output_parsed == Place(city="Oslo")
        assert json.loads(writer.requests[-1].sampling.structured_outputs.json)["properties"].keys() == {"city"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input="Who?", tool_choice="required")
        assert caught.value.param == "tool_choice"

    ask(call)
